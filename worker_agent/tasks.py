"""Tasks: what to generate for, one group of rollouts each."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.wire.base import Identifier


class TaskError(Exception):
    """A tasks file that cannot be used; the message names the line."""


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    content: str


class Task(BaseModel):
    """A prompt, answered by one group. `group_id` is the task's id and `task_source` the file's, unless
    given.

    Rollout ids are made from `group_id`, which leaves it 180 of an id's 200 characters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    task_id: Identifier
    group_id: Identifier = Field(max_length=180)
    messages: tuple[Message, ...] = Field(min_length=1)
    task_source: Identifier


def read_tasks(path: Path) -> Iterator[Task]:
    """Tasks of a file with one JSON object a line, or of stdin for `-`. Blank lines are skipped.

    Raises `TaskError` at the line that is no task, after those before it.
    """
    if str(path) == "-":
        yield from _read(sys.stdin, "stdin")
        return
    with path.open(encoding="utf-8") as lines:
        yield from _read(lines, path.name)


def _read(lines: TextIO, source: str) -> Iterator[Task]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise TaskError(f"{source}, line {number}: a task is a JSON object")
            fields = {"group_id": fields.get("task_id"), "task_source": source} | fields
            yield Task.model_validate(fields)
        except (json.JSONDecodeError, ValidationError) as error:
            raise TaskError(f"{source}, line {number}: {error}") from error


class TaskQueue:
    """Reads tasks ahead on a thread of its own, since stdin may keep its reader waiting."""

    def __init__(self, tasks: Iterable[Task], ahead: int) -> None:
        self._tasks = tasks
        self._queue: queue.Queue[Task | Exception | None] = queue.Queue(max(1, ahead))
        self._waiting: list[Task] = []
        self._postponed: list[tuple[float, Task]] = []
        self._read_all = False
        threading.Thread(target=self._fill, name="tasks", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether every task was read and is done."""
        return self._read_all and not self._waiting and not self._postponed

    def first(self, count: int) -> list[Task]:
        """Up to `count` tasks that wait, oldest first; they stay until `done`.

        Raises what the reader raised.
        """
        now = time.monotonic()
        self._waiting += [task for when, task in self._postponed if when <= now]
        self._postponed = [(when, task) for when, task in self._postponed if when > now]
        while len(self._waiting) < count and not self._read_all:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:
                self._read_all = True
            elif isinstance(item, Exception):
                raise item
            else:
                self._waiting.append(item)
        return self._waiting[:count]

    def postpone(self, task: Task, seconds: float) -> None:
        """Let the others go first for some time."""
        self.done([task])
        self._postponed.append((time.monotonic() + seconds, task))

    def done(self, tasks: Iterable[Task]) -> None:
        """Take tasks off the queue."""
        gone = {task.group_id for task in tasks}
        self._waiting = [task for task in self._waiting if task.group_id not in gone]

    def _fill(self) -> None:
        try:
            for task in self._tasks:
                self._queue.put(task)
        except Exception as error:  # noqa: BLE001  handed over to the thread that asks for tasks
            self._queue.put(error)
        else:
            self._queue.put(None)
