"""Reading tasks."""

import json
import time
from pathlib import Path

import pytest

from worker_agent.tasks import TaskError, TaskQueue, read_tasks


def line(**fields: object) -> str:
    return json.dumps({"task_id": "t1", "messages": [{"role": "user", "content": "2+3="}]} | fields)


def test_group_and_source_follow_from_the_task_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(f"{line()}\n\n{line(task_id='t2', group_id='g', task_source='s')}\n")
    assert [(t.task_id, t.group_id, t.task_source) for t in read_tasks(path)] == [
        ("t1", "t1", "sums.jsonl"),
        ("t2", "g", "s"),
    ]


@pytest.mark.parametrize("bad", ["{", "[]", '{"task_id": "t"}', line(messages=[]), line(more=1), line(task_id="../x")])
def test_a_line_that_is_no_task_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(f"{line()}\n{bad}\n")
    tasks = read_tasks(path)
    assert next(tasks).task_id == "t1"
    with pytest.raises(TaskError, match="line 2"):
        next(tasks)


def test_a_postponed_task_lets_others_go_first_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(line(task_id=f"t{i}") + "\n" for i in range(3)))
    tasks = TaskQueue(read_tasks(path), ahead=4)
    end = time.monotonic() + 5
    while len(first := tasks.first(3)) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    tasks.postpone(first[0], 0.2)
    assert [t.task_id for t in tasks.first(3)] == ["t1", "t2"]
    tasks.done(first[1:])
    assert tasks.first(3) == []
    assert not tasks.ended
    time.sleep(0.25)
    assert [t.task_id for t in tasks.first(3)] == ["t0"]
    tasks.done(first)
    assert tasks.ended
