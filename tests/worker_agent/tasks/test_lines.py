"""Tasks of a file or of stdin."""

import io
from pathlib import Path

import pytest

from tests.worker_agent.tasks.written import line
from worker_agent.tasks import TaskError, open_tasks, read_tasks


def test_group_and_source_follow_from_the_task_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(f"{line()}\n\n{line(task_id='t2', group_id='g', task_source='s')}\n")
    assert [(t.task_id, t.group_id, t.task_source) for t in read_tasks(path)] == [
        ("t1", "t1", "sums.jsonl"),
        ("t2", "g", "s"),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        pytest.param("[" * 100_000, id="nested"),
        '{"task_id": "t"}',
        line(messages=[]),
        line(more=1),
        line(task_id="../x"),
        pytest.param(line(messages=[{"role": "user", "content": "\ud800"}]), id="half a surrogate pair"),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(f"{line()}\n{bad}\n")
    tasks = read_tasks(path)
    assert next(tasks).task_id == "t1"
    with pytest.raises(TaskError, match=r"sums\.jsonl, line 2"):
        next(tasks)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_bytes(line().encode() + b"\n\xff\xfe\n")
    with pytest.raises(TaskError, match=r"sums\.jsonl, after line \d: not UTF-8"):
        list(read_tasks(path))


def test_a_dash_is_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(line() + "\n"))
    with open_tasks("-", "w1", None, 4) as tasks:
        assert [(t.task_id, t.task_source) for t in tasks] == [("t1", "stdin")]


def test_a_file_that_is_not_there_is_named_before_anything_is_read(tmp_path: Path) -> None:
    with (
        pytest.raises(TaskError, match=r"nowhere\.jsonl: No such file"),
        open_tasks(str(tmp_path / "nowhere.jsonl"), "w1", None, 4),
    ):
        pass
