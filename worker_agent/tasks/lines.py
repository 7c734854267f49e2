"""Tasks of a file or of stdin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from worker_agent.tasks.task import Task, TaskError, task_of_line


def read_tasks(path: Path) -> Iterator[Task]:
    """Tasks of a file with one JSON object a line, or of stdin for `-`. Blank lines are skipped.

    Raises OSError here for a file that cannot be opened, and `TaskError` at the line that is no task, after those
    before it.
    """
    return _read(sys.stdin, "stdin") if str(path) == "-" else _file(path.open(encoding="utf-8"), path.name)


def _file(lines: TextIO, source: str) -> Iterator[Task]:
    with lines:
        yield from _read(lines, source)


def _read(lines: TextIO, source: str) -> Iterator[Task]:
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield task_of_line(line, f"{source}, line {number}", source)
    except UnicodeDecodeError as error:  # found where a piece of the file is read, which holds several lines
        raise TaskError(f"{source}, after line {number}: not UTF-8: {error}") from error
