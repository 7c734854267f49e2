"""Tasks that wait for their turn."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable

from worker_agent.tasks.task import Task


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
