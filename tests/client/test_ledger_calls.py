"""The rest of the ledger through the client: rewind, release, rescore, failures, reads, lineage, diagnosis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from coordinator.client import Coordinator, Refused, Run
from coordinator.wire.rollouts import GenerationFailure, RescoredReward
from tests.client.runs import new_run, new_worker, rewarded_groups


def test_rewind_and_what_it_leads_to(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    worker = new_worker(run)
    rewarded_groups(run, worker, 2)
    for _ in range(2):
        with run.update() as update:
            candidates = update.candidates(1)
            update.reserve(candidates, candidates.behavior_log_probs)
            last = update.commit()
    view = run.rewind(1, "the checkpoint of commit 1 was restored", rewind_id="back")
    assert (view.rewound_updates, view.released) == ([last.update_id], len(candidates))
    assert run.rewind(1, "the same again", rewind_id="back") == view
    assert run.rewinds() == [view]
    with pytest.raises(Refused, match="commit_rewound"):
        run.rewind(2, "no longer on the line")
    assert [use.state for use in run.uses_of_version(0)] == ["committed", "rewound"]
    assert run.uses_of_ruleset("count", "d" * 64) == run.uses_of_version(0)
    assert run.uses_of_ruleset("other") == []
    assert {entry.event for entry in run.audit(update_id=last.update_id)} == {"reserve", "commit"}
    past = datetime.now(UTC) - timedelta(days=1)
    assert list(run.audit(at_before=past)) == []
    assert len(list(run.audit(at_from=past, rollout_id=candidates[0].rollout_id))) == 5


def test_tokens_of_many_and_filters(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    worker = new_worker(run)
    rewarded_groups(run, worker, 2)
    ids = [rollout.rollout_id for rollout in run.rollouts()]
    columns = run.evidence_of([*ids, "missing"])
    assert (columns.rollout_id, columns.missing) == (ids, ["missing"])
    one = run.evidence(ids[0])
    np.testing.assert_array_equal(columns.token_ids[0], one.token_ids)
    assert [r.rollout_id for r in run.rollouts(version=0, state="rewarded")] == ids
    assert list(run.rollouts(version=1)) == []
    assert list(run.rollouts(arrived_before=datetime.now(UTC) - timedelta(days=1))) == []


def test_quarantine_is_released_as_a_whole(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    worker = new_worker(run)
    rewarded_groups(run, worker, 1)
    with pytest.raises(KeyError), run.update("drifting") as update:
        candidates = update.candidates(1)
        drifted = [log_probs - 1 for log_probs in candidates.behavior_log_probs]
        update.reserve(candidates, drifted, confirm_drift=True)
        raise KeyError("the log-probs were misaligned")
    [measured] = run.differences(candidates[0].rollout_id).measured
    assert (measured.update_id, measured.verdict) == ("drifting", "policy_drift")
    moved = [None if d is None else round(d, 3) for d in measured.differences]
    assert moved == [-1.0 if action else None for action in candidates[0].action_mask]
    answer = run.release_quarantined_by("drifting", "policy_drift")
    assert {(v.verdict, v.state) for v in answer.verdicts} == {("released", "rewarded")}
    assert run.release([candidates[0].rollout_id]).verdicts[0].verdict == "not_releasable"
    assert [f.stage for f in run.failures(stage="update")] == ["update"]
    assert list(run.failures(stage="reward")) == []


def test_rescore_and_generation_failures(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    worker = new_worker(run)
    rewarded_groups(run, worker, 1)
    members = list(run.rollouts())
    rewards = [RescoredReward(rollout_id=m.rollout_id, value=7.0) for m in members]
    answer = run.rescore(members[0].group_id, "count-2", "d" * 64, rewards)
    assert {(v.verdict, v.revision) for v in answer.verdicts} == {("rescored", 2)}
    failure = GenerationFailure(
        rollout_id="lost", task_id="t", task_source="s", group_id="other", sample_index=0, worker_id=worker.worker_id,
        incarnation=worker.incarnation, kind="timeout", message="no token in 60 s",
    )  # fmt: skip
    assert run.report_generation_failures([failure]).verdicts[0].state == "generation_failed"
    assert [f.message for f in run.failures(stage="generation")] == ["no token in 60 s"]


def test_diagnosis_says_what_to_do(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    assert [b.code for b in run.diagnosis().blockers] == ["no_workers", "nothing_generated"]
    worker = new_worker(run)
    rewarded_groups(run, worker, 1)
    assert [b.code for b in run.diagnosis().blockers] == ["no_open_update"]


def test_take_binds_in_one_call(coordinator: Coordinator) -> None:
    run: Run = new_run(coordinator, drift_gate="off")
    worker = new_worker(run)
    rewarded_groups(run, worker, 3)
    with run.update() as update:
        taken = update.take(groups=2)
        assert len(taken.groups) == 2
        again = update.take(groups=2)
        assert [t.rollout_id for t in again] == [t.rollout_id for t in taken]
        assert update.commit().commit_no == 1
    assert run.counts().rollouts["consumed"] == len(taken)
