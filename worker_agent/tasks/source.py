"""Which source of tasks a setting names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from worker_agent.tasks.function import tasks_of_function
from worker_agent.tasks.lines import read_tasks
from worker_agent.tasks.service import TaskService
from worker_agent.tasks.task import Task, TaskError

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


@contextmanager
def open_tasks(name: str, worker_id: str, token: str | None, count: int) -> Iterator[Iterable[Task]]:
    """The tasks that `name` stands for: `-` for stdin, an http(s) address, `module:function`, or a file.

    `worker_id`, `token` and `count` (tasks at a time) are for a service. Raises `TaskError` if the source cannot be
    opened.
    """
    if name.startswith(("http://", "https://")):
        service = TaskService(name, worker_id, token, count)
        try:
            yield service
        finally:
            service.close()
    else:
        yield _here(name)


def _here(name: str) -> Iterator[Task]:
    path = Path(name)
    if _FUNCTION.fullmatch(name) and not path.exists():
        return tasks_of_function(name)
    try:
        return read_tasks(path)
    except OSError as error:
        raise TaskError(f"tasks: {name}: {error.strerror}") from error
