"""The whole chain at small size, with the coordinator killed in the middle of it and started again."""

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.client import Run
from tests.demo.parity import PARITY
from worker_agent.demo.production import COORDINATOR, REWARDER, TRAINER, WORKERS, Plot, Production
from worker_agent.demo.record import promises, read_record
from worker_agent.models import tiny_qwen2

pytestmark = pytest.mark.xdist_group("models")

UPDATES = 4
LIMIT_SECONDS = 110.0


def until(production: Production, holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while not holds():
        production.cast.check()
        assert time.monotonic() < limit, f"not in time; see {production.folder / 'logs'}"
        time.sleep(0.05)


def handed_in(production: Production) -> set[str]:
    """The rollouts that the workers had acknowledged: made, and no longer waiting in a spool."""
    made: set[str] = set()
    for name in WORKERS:
        folder = production.folder / "workers" / production.run_id / name
        assert not list((folder / "spool").iterdir()), f"{name} left with rollouts in its spool"
        assert not list((folder / "rejected").iterdir()), f"{name} had rollouts rejected"
        finished = folder / "finished.log"  # not there while the other worker was always the quicker one
        groups = finished.read_text().split() if finished.exists() else []
        made |= {f"{group_id}:{index}.0" for group_id in groups for index in range(4)}
    return made


def commits(run: Run) -> int:
    return max((update.commit_no or 0 for update in run.updates()), default=0)


def test_everything_carries_on_after_the_coordinator_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", here)  # for the processes, which import the exercise by its name
    model = tiny_qwen2(tmp_path / "tiny-qwen2")
    run_id = f"survivor-{uuid.uuid4().hex[:12]}"
    production = Production(tmp_path / "data", run_id, Plot(model, "parity:PARITY", UPDATES, 4))
    try:
        production.start_coordinator()
        production.create_run()
        production.start_players()
        before: set[str] = set()
        for kill_after in (1, 2):
            until(production, lambda wanted=kill_after: commits(production.run) >= wanted)
            before |= {rollout.rollout_id for rollout in production.run.rollouts()}
            address = production.url
            production.cast.kill(COORDINATOR)
            time.sleep(1.0)  # long enough for every process to meet a coordinator that is away
            production.start_coordinator()
            assert production.url == address

        until(production, lambda: production.cast.ended(TRAINER))
        rewarded = {
            str(line["rollout_id"]): line["value"]
            for line in production.told(REWARDER)
            if line["event"] == "rewarded" and line["verdict"] in ("stored", "duplicate")
        }
        production.stop_players()
        record = read_record(production.run)
    finally:
        production.stop(2.0)

    there = record.rollouts.keys()
    assert before and before <= there
    assert handed_in(production) == there
    assert rewarded
    assert {rollout_id: record.rollouts[rollout_id].reward for rollout_id in rewarded} == rewarded
    assert {line.ruleset_hash for update in record.lineages for line in update.members} == {PARITY.ruleset_hash}
    for history in record.histories.values():
        assert [transition.revision for transition in history] == list(range(len(history)))
        assert sum(transition.event == "commit" for transition in history) <= 1
    assert [update.update.commit_no for update in record.lineages] == list(range(1, UPDATES + 1))
    assert record.view.active.version == UPDATES
    broken = [claim for claim in promises(record, WORKERS, UPDATES) if not claim.holds]
    assert not broken, json.dumps([claim.__dict__ for claim in broken], indent=1)
