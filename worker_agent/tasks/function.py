"""Tasks of a Python function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from worker_agent.tasks.task import Task, TaskError, task_of_fields


def tasks_of_function(name: str) -> Iterator[Task]:
    """Tasks of what the function `module:function` returns: an iterator of `Task`, or of dicts as in a line.

    The module is looked for in the working directory too. Raises `TaskError` here if the function cannot be had or
    called, and later at the item that is no task, after those before it, or when the iterator raises.
    """
    items = _call(name, _function(name))
    return _read(name, items)


def _function(name: str) -> Callable[[], Iterable[Task | Mapping[str, object]]]:
    module_name, _, attribute = name.partition(":")
    # As `python -m` has it; the script of an installation has its own folder there instead.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise TaskError(f"tasks {name}: importing {module_name}: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        there = "is no function" if hasattr(module, attribute) else "is not there"
        raise TaskError(f"tasks {name}: {attribute} {there} in {module.__file__ or module_name}")
    found: Callable[[], Iterable[Task | Mapping[str, object]]] = function
    return found


def _call(
    name: str, function: Callable[[], Iterable[Task | Mapping[str, object]]]
) -> Iterator[Task | Mapping[str, object]]:
    try:
        items = function()
    except Exception as error:
        raise TaskError(f"tasks {name}: {type(error).__name__}: {error}") from error
    try:
        return iter(items)
    except TypeError as error:
        raise TaskError(f"tasks {name}: must return an iterator of tasks, not {type(items).__name__}") from error


def _read(name: str, items: Iterator[Task | Mapping[str, object]]) -> Iterator[Task]:
    source = name.lstrip("_")
    number = 0
    while True:
        number += 1
        try:
            item = next(items)
        except StopIteration:
            return
        except Exception as error:
            raise TaskError(f"tasks {name}, before item {number}: {type(error).__name__}: {error}") from error
        if isinstance(item, Task):
            yield item
        elif isinstance(item, Mapping):
            yield task_of_fields(item, f"tasks {name}, item {number}", source)
        else:
            raise TaskError(f"tasks {name}, item {number}: a task is a dict or a Task, not {type(item).__name__}")
