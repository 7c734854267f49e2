"""Tasks of a Python function."""

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from worker_agent.tasks import Task, TaskError, open_tasks

SUMS = """
import itertools
from worker_agent.tasks import Message, Task

PROMPT = [{"role": "user", "content": "2+3="}]
SOME = 3

def endless():
    return ({"task_id": f"sum-{i}", "messages": PROMPT} for i in itertools.count())

def ready_made():
    yield Task(task_id="a", group_id="g", messages=(Message(role="user", content="x"),), task_source="mine")

def from_a_list():
    return [{"task_id": "a", "messages": PROMPT, "group_id": "g"}]

def lacks_messages():
    yield {"task_id": "a", "messages": PROMPT}
    yield {"task_id": "b"}

def yields_text():
    yield "sum-1"

def breaks_down():
    yield {"task_id": "a", "messages": PROMPT}
    raise ValueError("the shelf is empty")

def refuses():
    raise RuntimeError("no licence")

def returns_a_number():
    return 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Iterator[Task]]]:
    """Opens a function of a module in the working directory."""
    name = f"sums_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SUMS)
    (tmp_path / f"{name}_broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def read(function: str) -> Iterator[Task]:
        with open_tasks(function.replace("sums", name, 1), "w1", None, 4) as tasks:
            yield from tasks

    yield read
    for made in (name, f"{name}_broken"):
        sys.modules.pop(made, None)


def test_dicts_are_tasks_named_after_the_function(here: Callable[[str], Iterator[Task]]) -> None:
    first = list(itertools.islice(here("sums:endless"), 3))
    assert [(t.task_id, t.group_id) for t in first] == [(f"sum-{i}", f"sum-{i}") for i in range(3)]
    assert {re.sub("_.*:", ":", t.task_source) for t in first} == {"sums:endless"}


def test_tasks_are_taken_as_they_are_and_a_list_is_no_less(here: Callable[[str], Iterator[Task]]) -> None:
    assert [(t.task_id, t.group_id, t.task_source) for t in here("sums:ready_made")] == [("a", "g", "mine")]
    assert [(t.task_id, t.group_id) for t in here("sums:from_a_list")] == [("a", "g")]


@pytest.mark.parametrize(
    ("function", "before", "said"),
    [
        ("sums:lacks_messages", 1, "item 2: .*messages"),
        ("sums:yields_text", 0, "item 1: a task is a dict or a Task, not str"),
        ("sums:breaks_down", 1, "before item 2: ValueError: the shelf is empty"),
        ("sums:refuses", 0, "RuntimeError: no licence"),
        ("sums:returns_a_number", 0, "must return an iterator of tasks, not int"),
        ("sums:absent", 0, "absent is not there in .*sums"),
        ("sums:SOME", 0, "SOME is no function"),
        ("sums_broken:endless", 0, "importing .*No module named 'a_module_that_nobody_has'"),
        ("no_such_module_at_all:tasks", 0, "importing no_such_module_at_all: ModuleNotFoundError"),
    ],
)
def test_what_goes_wrong_is_said_with_the_function(
    here: Callable[[str], Iterator[Task]], function: str, before: int, said: str
) -> None:
    tasks = here(function)
    assert len(list(itertools.islice(tasks, before))) == before
    with pytest.raises(TaskError, match=rf"(?s)tasks \w+:\w+.*{said}"):
        next(tasks)


def test_a_file_with_a_colon_in_its_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums:easy").write_text("")
    with open_tasks("sums:easy", "w1", None, 4) as tasks:
        assert list(tasks) == []
