"""Tasks that wait for their turn."""

import time
from pathlib import Path

from tests.worker_agent.tasks.written import line
from worker_agent.tasks import TaskQueue, read_tasks


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
