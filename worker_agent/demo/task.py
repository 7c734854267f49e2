"""What the demo's workers are asked, and the rule that rewards their answers."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import random
import re
from typing import Protocol

from worker_agent.tasks import Message, Task


class Exercise(Protocol):
    """Tasks and the rule for them. `ruleset_hash` is the sha256 of the rule's source text.

    `max_tokens` (tokens) and `stop` (texts) bound one answer.
    """

    source: str
    ruleset_id: str
    max_tokens: int
    stop: tuple[str, ...]

    @property
    def ruleset_hash(self) -> str: ...

    def tasks(self, count: int) -> list[Task]:
        """The first `count` tasks, the same at every call, each with a group of its own."""
        ...

    def reward(self, task_id: str, text: str) -> float:
        """Reward of the answer `text` to the task."""
        ...


def named_exercise(name: str) -> Exercise:
    """The exercise at `module:attribute`; this is how the demo's processes are told which one they share."""
    module, _, attribute = name.partition(":")
    exercise: Exercise = getattr(importlib.import_module(module), attribute)
    return exercise


def source_hash(rule: object) -> str:
    """sha256 of the source text of a function or class."""
    return hashlib.sha256(inspect.getsource(rule).encode()).hexdigest()  # type: ignore[arg-type]  # not for objects


def exact_sum(task_id: str, text: str) -> float:
    """1.0 if the last integer of the first line, after "=" where there is one, is the result, else 0.0."""
    left, sign, right = re.fullmatch(r"(\d+)([+-])(\d+)", task_id).groups()  # type: ignore[union-attr]  # our own ids
    expected = int(left) + int(right) if sign == "+" else int(left) - int(right)
    line = text.strip().split("\n")[0].rpartition("=")[2]
    found = re.findall(r"-?\d+", line.replace(",", ""))
    return float(bool(found) and int(found[-1]) == expected)


class Sums:
    """One-digit sums that carry, and differences, through the chat template, with one worked example."""

    source = "one-digit-sums"
    ruleset_id = "exact-sum"
    max_tokens = 16
    stop = ("\n",)

    @property
    def ruleset_hash(self) -> str:
        return source_hash(exact_sum)

    def tasks(self, count: int) -> list[Task]:
        draw = random.Random(1000)
        made: list[Task] = []
        while len(made) < count:
            high, low = sorted((draw.randint(1, 9), draw.randint(1, 9)), reverse=True)
            sign = draw.choice("+-")
            if sign == "+" and high + low < 10:
                continue  # the small model nearly always gets these right, and learns nothing from them
            made.append(
                Task(
                    task_id=f"{high}{sign}{low}",
                    group_id=f"sum-{len(made):03d}",
                    task_source=self.source,
                    messages=(
                        Message(role="system", content="Do the sum."),
                        Message(role="user", content="What is 40 - 16?"),
                        Message(role="assistant", content="40 - 16 = 24"),
                        Message(role="user", content=f"What is {high} {sign} {low}?"),
                    ),
                )
            )
        return made

    def reward(self, task_id: str, text: str) -> float:
        return exact_sum(task_id, text)


SUMS = Sums()
