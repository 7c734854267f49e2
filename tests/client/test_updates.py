"""Updates through the client, against a real coordinator."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from coordinator.client import Coordinator, LeaseExpired, LineConflict, Refused, Update, UpdateFenced
from coordinator.wire.updates import Discard
from tests.client.runs import BASE, LOG_PROB, new_run, new_worker, rewarded_groups, write_adapter
from tests.client.server_process import ServerProcess


def current_of(candidates: object) -> list[np.ndarray]:
    return [np.full(len(ids), LOG_PROB + 0.01) for ids in candidates.token_ids]  # type: ignore[attr-defined]


def test_candidates_are_reserved_and_consumed(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    rewarded_groups(run, new_worker(run), 2)
    with run.update() as update:
        candidates = update.candidates(groups=2, wait_seconds=5)
        assert list(candidates.groups) == ["g0", "g1"]
        assert candidates.empty is None
        first = candidates[0]
        assert (first.token_ids.dtype, first.action_mask.dtype) == (np.int64, np.bool_)
        assert first.behavior_log_probs.dtype == np.float32
        assert np.isnan(first.behavior_log_probs[:2]).all()
        assert candidates.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
        reserved = update.reserve(candidates, current_of(candidates), use=["a", "b", "a", "b"])
        assert [verdict.verdict for verdict in reserved.verdicts] == ["reserved"] * 4
        assert reserved.verdicts[0].drift == pytest.approx(0.01, abs=1e-6)
        assert len(reserved.admitted) == 4
        assert reserved.usable == {"g0": 2, "g1": 2}
        committed = update.commit([Discard(rollout_id="g1:0.0", reason="no advantage")])
    assert (committed.state, committed.commit_no) == ("committed", 1)
    assert {r.rollout_id for r in run.rollouts(state="consumed")} == {"g0:0.0", "g0:1.0", "g1:1.0"}
    assert run.rollout("g1:0.0").state == "offline"
    lineage = run.lineage(update.id)
    assert {member.use for member in lineage.members} == {"a", "b"}
    assert run.update_view(update.id).commit_no == 1


def test_no_candidates_come_with_the_reason_after_the_wait(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    with run.update() as update:
        started = time.monotonic()
        candidates = update.candidates(groups=1, wait_seconds=1.0)
        assert time.monotonic() - started >= 0.9
        assert not candidates
        assert candidates.empty is not None
        assert candidates.empty.reason == "no_live_producers"
        update.abort("nothing to do")
    assert run.update_view(update.id).state == "aborted"


def test_an_exception_aborts_and_goes_on(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    rewarded_groups(run, new_worker(run), 1)
    with pytest.raises(ZeroDivisionError), run.update() as update:
        candidates = update.candidates(groups=1)
        update.reserve(candidates, current_of(candidates))
        assert run.counts().rollouts["reserved"] == 2
        raise ZeroDivisionError("loss exploded")
    view = run.update_view(update.id)
    assert (view.state, view.reason) == ("aborted", "ZeroDivisionError: loss exploded")
    assert run.counts().rollouts["rewarded"] == 2
    assert any(failure.update_id == update.id for failure in run.failures())


def test_leaving_without_a_commit_aborts(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    with run.update() as update:
        pass
    view = run.update_view(update.id)
    assert (view.state, view.reason) == ("aborted", "left without commit")
    with pytest.raises(RuntimeError, match="has ended"):
        update.commit()


def test_the_lease_is_renewed_while_the_block_runs(coordinator: Coordinator) -> None:
    run = new_run(coordinator, update_lease_seconds=1.5)
    rewarded_groups(run, new_worker(run), 1)
    with run.update() as update:
        candidates = update.candidates(groups=1)
        update.reserve(candidates, current_of(candidates))
        time.sleep(3.5)
        assert update.commit().state == "committed"


def test_a_lost_lease_is_raised_by_the_next_call(mortal_server: ServerProcess) -> None:
    with Coordinator(mortal_server.url, mortal_server.token) as coordinator:
        run = new_run(coordinator, update_lease_seconds=1.5)
        rewarded_groups(run, new_worker(run), 1)
        with pytest.raises((LeaseExpired, UpdateFenced)), run.update() as update:
            candidates = update.candidates(groups=1)
            update.reserve(candidates, current_of(candidates))
            mortal_server.kill()
            time.sleep(2.0)
            mortal_server.start()
            update.commit()
        assert run.update_view(update.id).state == "expired"
        assert run.counts().rollouts["rewarded"] == 2


def test_a_coordinator_that_is_closed_too_soon_ends_the_renewal_in_words(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "coordinator.client")  # verl, where it is loaded, lets only errors through
    coordinator = Coordinator(server.url, server.token)
    run = new_run(coordinator, update_lease_seconds=1.0)
    with pytest.raises(RuntimeError, match="closed"), run.update() as update:
        renewing = next(thread for thread in threading.enumerate() if update.id in thread.name)
        coordinator.close()
        renewing.join(10)
    assert not renewing.is_alive()
    assert f"update {update.id}: its coordinator was closed before it ended: the lease runs out" in caplog.messages


def test_a_trainer_on_an_old_line_is_told_so(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    rewarded_groups(run, new_worker(run), 1)
    with pytest.raises(LineConflict), run.update() as update:
        candidates = update.candidates(groups=1)
        update.reserve(candidates, current_of(candidates), after_commit_no=7)


def test_log_probs_of_another_shape_are_refused_before_they_are_sent(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    rewarded_groups(run, new_worker(run), 1)
    with run.update() as update:
        candidates = update.candidates(groups=1)
        with pytest.raises(ValueError, match="shape"):
            update.reserve(candidates, [np.zeros(3)] * 2)
        with pytest.raises(ValueError, match="1 rollouts for 2"):
            update.reserve(candidates, [np.zeros(5)])
        update.abort("checked")


def test_a_update_is_not_usable_before_it_is_entered(coordinator: Coordinator) -> None:
    update: Update = new_run(coordinator).update()
    with pytest.raises(RuntimeError, match="not open"):
        update.candidates(groups=1)


BEFORE_ITS_END = """
import os, sys
from coordinator.client import Coordinator

run = Coordinator(sys.argv[1], sys.argv[2], owner="trainer-0").run(sys.argv[3])
with run.update("step-1") as update:
    candidates = update.candidates(groups=1)
    update.reserve(candidates, candidates.behavior_log_probs)
    os._exit(9)  # no abort, no goodbye
"""


def test_a_restarted_trainer_of_the_same_owner_goes_on_with_its_update(
    coordinator: Coordinator, server: ServerProcess, tmp_path: Path
) -> None:
    run = new_run(coordinator)
    worker = new_worker(run)
    rewarded_groups(run, worker, 1)
    ended = subprocess.run([sys.executable, "-c", BEFORE_ITS_END, server.url, server.token, run.id], check=False)
    assert ended.returncode == 9
    policy = run.publish(version=1, parent_version=0, folder=write_adapter(tmp_path / "a"), base_model=BASE)
    run.open_activation(1, "to-1")
    worker.ack(1, policy.artifact_hash)
    assert run.view().active.version == 1
    with pytest.raises(Refused, match="update_owned"), run.update("step-1"):
        pass
    with Coordinator(server.url, server.token, owner="trainer-0") as again:
        with again.run(run.id).update("step-1") as update:
            assert (update.policy.version, update.view.reserved, update.view.after_commit_no) == (0, 2, 0)
            assert update.commit().commit_no == 1
        with again.run(run.id).update("step-1") as update:  # and once more, after the commit
            assert (update.view.state, update.view.commit_no) == ("committed", 1)
    assert {row.state for row in run.rollouts()} == {"consumed"}
