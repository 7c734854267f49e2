"""The calls of the story with their recorded answers, as examples of the endpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from coordinator.openapi.story import STORY


@dataclass(frozen=True)
class Example:
    """One call of an endpoint and its answer. `request` and `answer` are JSON, or the text of a file."""

    key: str
    title: str
    parameters: dict[str, Any]
    request: Any
    status: int
    answer: Any


@cache
def _recorded() -> dict[str, list[Example]]:
    answers = json.loads((files("coordinator.openapi") / "answers.json").read_text(encoding="utf-8"))
    found: dict[str, list[Example]] = {}
    for number, (step, answer) in enumerate(zip(STORY, answers, strict=True), start=1):
        parameters = {**step.path, **step.query}
        request = step.body if step.file is None else step.file
        example = Example(
            f"step-{number}", f"{number}. {step.title}", parameters, request, answer["status"], answer["body"]
        )
        found.setdefault(step.operation, []).append(example)
    return found


def examples(operation: str) -> list[Example]:
    """The examples of this endpoint, in the order of the story."""
    return _recorded().get(operation, [])
