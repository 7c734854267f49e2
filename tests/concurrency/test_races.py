"""Calls let loose at the same moment on two replicas."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from coordinator.client import Coordinator, LeaseExpired, Refused, Run
from coordinator.client.connection import Connection
from coordinator.client.rollouts import Candidates
from coordinator.wire.rollouts import RescoredReward, Reward, Rollout
from coordinator.wire.updates import (
    AbortUpdate,
    CommitUpdate,
    OpenUpdate,
    ReserveAnswer,
    ReserveItem,
    ReserveRequest,
    UpdateView,
)
from tests.client.runs import BASE, LOG_PROB, group, new_worker, rewarded_groups, write_adapter
from tests.client.server_process import ServerProcess
from tests.concurrency.together import at_once, codes, everywhere, log_probs
from tests.ledger_checker import check_ledger

ROUNDS = 200


def test_of_two_updates_exactly_one_wins_each_rollout(coordinators: list[Coordinator], replicated_url: str) -> None:
    runs = everywhere(coordinators, group_size=None, hold_seconds=0.001)
    rewarded_groups(runs[0], new_worker(runs[0]), ROUNDS // 2)
    with runs[0].update("a") as a, runs[1].update("b") as b:
        found = a.candidates(ROUNDS)
        assert len(found) == ROUNDS
        for trajectory in found:
            one = Candidates((trajectory,))
            answers = at_once(partial(a.reserve, one, log_probs(one)), partial(b.reserve, one, log_probs(one)))
            verdicts = Counter(answer.verdicts[0].verdict for answer in answers)
            assert verdicts == {"reserved": 1, "revision_conflict": 1}
        views = [runs[0].update_view(name) for name in ("a", "b")]
        assert sum(view.reserved for view in views) == ROUNDS
        assert all(view.reserved > 0 for view in views), "one side won every race: there was none"
        assert codes(at_once(a.commit, b.commit)) == {"ok": 1, "line_conflict": 1}
    assert check_ledger(replicated_url) == []


def test_an_identical_call_sent_twice_at_once_has_one_effect(
    coordinators: list[Coordinator], replicated_url: str, tmp_path: Path
) -> None:
    runs = everywhere(coordinators)
    worker = new_worker(runs[0])
    active = runs[0].view().active
    folder = write_adapter(tmp_path / "adapter")
    for number in range(10):
        batch = group(worker, active, f"g{number}")
        answers = at_once(*(partial(run.submit, batch) for run in runs * 2))
        verdicts = Counter(verdict.verdict for answer in answers for verdict in answer.verdicts)
        assert verdicts == {"accepted": 2, "duplicate": 6}
        at_once(*(partial(reward_again, run, batch) for run in runs * 2))
        version = number + 1
        prepare = {"version": version, "parent_version": number, "folder": folder, "base_model": BASE}
        published = at_once(*(partial(run.publish, **prepare) for run in runs * 2))
        assert codes(published) == {"ok": 4}
        opened = at_once(*(partial(run.open_activation, version, f"a{version}") for run in runs * 2))
        assert codes(opened) == {"ok": 4}
        assert worker.ack(version, runs[0].policy(version).artifact_hash).matching
        active = runs[1].view().active
        assert active.version == version
    assert check_ledger(replicated_url) == []


def reward_again(run: Run, batch: Sequence[Rollout]) -> None:
    answer = run.reward(
        [
            Reward(rollout_id=rollout.rollout_id, status="ok", value=1.0, ruleset_id="count", ruleset_hash="d" * 64)
            for rollout in batch
        ]
    )
    assert {verdict.verdict for verdict in answer.verdicts} <= {"stored", "duplicate"}


def test_versions_of_one_number_with_two_contents_have_one_winner(
    coordinators: list[Coordinator], replicated_url: str, tmp_path: Path
) -> None:
    runs = everywhere(coordinators)
    for version in range(1, 11):
        folders = [write_adapter(tmp_path / f"{version}-{side}", b"%d" % side) for side in range(2)]
        outcomes = at_once(
            *(
                partial(run.publish, version=version, parent_version=version - 1, folder=folder, base_model=BASE)
                for run, folder in zip(runs, folders, strict=True)
            )
        )
        assert codes(outcomes) == {"ok": 1, "policy_conflict": 1}
    assert check_ledger(replicated_url) == []


def test_commit_abort_and_expiry_end_an_update_once(
    coordinators: list[Coordinator], replicas: list[ServerProcess], replicated_url: str
) -> None:
    """Commits and an abort before, around and after the lease's end: the first is the only end, until each was seen."""
    runs = everywhere(coordinators, update_lease_seconds=0.8)
    worker = new_worker(runs[0])
    links = [Connection(s.url, s.token, timeout_seconds=30, retry_seconds=0) for s in replicas]
    ends = dict.fromkeys(("committed", "aborted", "expired"), 0)
    for number in range(60):
        names = [r.rollout_id for r in rewarded_groups(runs[0], worker, 1, prefix=f"{number}:")]
        view = runs[0].view()
        path = ("runs", view.run_id, "updates", f"u{number}")
        opening = OpenUpdate(owner="t", policy_version=view.active.version, artifact_hash=view.active.artifact_hash)
        opened = links[0].call("PUT", path, UpdateView, body=opening)
        items = [
            ReserveItem(rollout_id=name, revision=1, current_log_probs=[None, None, *[LOG_PROB] * 3]) for name in names
        ]
        reserving = ReserveRequest(owner="t", after_commit_no=view.last_commit_no, rollouts=items)
        answer = links[0].call("POST", (*path, "reserve"), ReserveAnswer, body=reserving)
        assert {verdict.verdict for verdict in answer.verdicts} == {"reserved"}
        # Three moments, and four ways in which `at_once` lets the calls go: all of their pairs come.
        if number % 3:
            sleep_until(opened.lease_until, (-0.02, 0.05)[number % 3 - 1])
        committing = CommitUpdate(owner="t", after_commit_no=view.last_commit_no)
        aborting = AbortUpdate(owner="t", reason="at the same time")
        outcomes = at_once(
            partial(links[0].call, "POST", (*path, "commit"), UpdateView, body=committing),
            partial(links[1].call, "POST", (*path, "commit"), UpdateView, body=committing),
            partial(links[number % 2].call, "POST", (*path, "abort"), UpdateView, body=aborting),
        )
        sleep_until(opened.lease_until, 0.05)
        end = runs[0].update_view(f"u{number}").state
        ends[end] += 1
        assert {outcome.state for outcome in outcomes if not isinstance(outcome, Refused)} <= {end}
        assert codes(outcomes).keys() <= {"ok", "update_fenced", "lease_expired"}
        if number >= 11 and min(ends.values()) >= 2:
            break
    for link in links:
        link.close()
    assert min(ends.values()) >= 2, ends
    assert check_ledger(replicated_url) == []


def sleep_until(moment: datetime, later: float) -> None:
    """Until `later` seconds after the moment."""
    time.sleep(max(0.0, (moment - datetime.now(UTC)).total_seconds() + later))


def test_commits_that_meet_the_end_of_their_lease_are_in_time_or_nothing(
    coordinators: list[Coordinator], replicas: list[ServerProcess], replicated_url: str
) -> None:
    """Commits sent around the moment at which the lease ends, until five came in time and five did not."""
    runs = everywhere(coordinators, group_size=None, update_lease_seconds=0.5)
    rollouts = rewarded_groups(runs[0], new_worker(runs[0]), 50)
    links = [Connection(s.url, s.token, timeout_seconds=30, retry_seconds=0) for s in replicas]
    ends: Counter[str] = Counter()
    for number, rollout in enumerate(rollouts):
        view = runs[0].view()
        path = ("runs", view.run_id, "updates", f"late{number}")
        opening = OpenUpdate(owner="t", policy_version=view.active.version, artifact_hash=view.active.artifact_hash)
        opened = links[number % 2].call("PUT", path, UpdateView, body=opening)
        item = ReserveItem(rollout_id=rollout.rollout_id, revision=1, current_log_probs=[None, None, *[LOG_PROB] * 3])
        reserving = ReserveRequest(owner="t", after_commit_no=view.last_commit_no, rollouts=[item])
        links[number % 2].call("POST", (*path, "reserve"), ReserveAnswer, body=reserving)
        if number % 4:
            sleep_until(opened.lease_until, (-0.03, -0.015, 0.0)[number % 4 - 1])
        committing = CommitUpdate(owner="t", after_commit_no=view.last_commit_no)
        try:
            end = links[(number + 1) % 2].call("POST", (*path, "commit"), UpdateView, body=committing)
        except LeaseExpired:
            ends["expired"] += 1
        else:
            assert (end.state, end.commit_no) == ("committed", runs[0].view().last_commit_no)
            assert end.ended_at is not None
            assert end.ended_at <= end.lease_until
            ends["committed"] += 1
        if min(ends["committed"], ends["expired"]) >= 5:
            break
    for link in links:
        link.close()
    assert min(ends["committed"], ends["expired"]) >= 5
    deadline = time.monotonic() + 60
    while runs[0].counts().rollouts["reserved"]:
        assert time.monotonic() < deadline, "what expired updates held was not given back"
        time.sleep(0.1)
    states = Counter(rollout.state for rollout in runs[0].rollouts())
    assert states == {"consumed": ends["committed"], "rewarded": len(rollouts) - ends["committed"]}
    assert check_ledger(replicated_url) == []


def test_an_abort_and_a_commit_at_once_leave_one_end(coordinators: list[Coordinator], replicated_url: str) -> None:
    runs = everywhere(coordinators)
    worker = new_worker(runs[0])
    for number in range(16):
        names = {r.rollout_id for r in rewarded_groups(runs[0], worker, 1, prefix=f"{number}:")}
        with runs[0].update(f"u{number}") as update:
            found = update.candidates(1)
            assert {t.rollout_id for t in found} == names
            update.reserve(found, log_probs(found))
            path = ("runs", runs[0].id, "updates", update.id)
            aborting = AbortUpdate(owner=update.owner, reason="at the same time", quarantine=number % 3 == 0)
            other = runs[1]._connection
            outcomes = at_once(update.commit, partial(other.call, "POST", (*path, "abort"), UpdateView, body=aborting))
            assert codes(outcomes) == {"ok": 1, "update_fenced": 1}
        (won,) = (outcome for outcome in outcomes if not isinstance(outcome, Refused))
        states = {runs[0].rollout(name).state for name in names}
        aborted = "quarantined" if number % 3 == 0 else "rewarded"
        assert states == ({"consumed"} if won.state == "committed" else {aborted})
        if states == {"rewarded"}:  # not to be offered again
            with runs[0].update() as update:
                found = update.candidates(1)
                update.reserve(found, log_probs(found))
                update.commit()
    assert check_ledger(replicated_url) == []


def test_a_rescore_and_a_reserve_at_once_agree_on_the_reward(
    coordinators: list[Coordinator], replicated_url: str
) -> None:
    """Either the update trains on what it was offered, or it must look again: never on a reward that it did not see."""
    runs = everywhere(coordinators)
    worker = new_worker(runs[0])
    for number in range(16):
        members = rewarded_groups(runs[0], worker, 1, prefix=f"{number}:")
        renewed = [RescoredReward(rollout_id=r.rollout_id, value=10.0 + n) for n, r in enumerate(members)]
        with runs[0].update(f"u{number}") as update:
            found = update.candidates(1)
            reserved, rescored = at_once(
                partial(update.reserve, found, log_probs(found)),
                partial(runs[1].rescore, members[0].group_id, "again", "e" * 64, renewed),
            )
            assert not isinstance(reserved, Refused)
            verdicts = {verdict.verdict for verdict in reserved.verdicts}
            if isinstance(rescored, Refused):
                assert (rescored.code, verdicts) == ("group_held", {"reserved"})
            else:
                assert {verdict.verdict for verdict in rescored.verdicts} == {"rescored"}
                assert verdicts == {"revision_conflict"}
                found = update.candidates(1)
                assert {t.reward for t in found} == {10.0, 11.0}
                update.reserve(found, log_probs(found))
            update.commit()
        trained = {t.rollout_id: t.reward for t in found}
        assert trained == {r.rollout_id: runs[0].rollout(r.rollout_id).reward for r in members}
        assert {runs[0].rollout(r.rollout_id).state for r in members} == {"consumed"}
    assert check_ledger(replicated_url) == []


def test_of_two_contents_under_one_id_the_first_stays_whichever_replica_it_came_through(
    coordinators: list[Coordinator], replicated_url: str
) -> None:
    """Batches that overlap, each in an order of its own, with the same ids in the same or in other groups."""
    runs = everywhere(coordinators)
    worker = new_worker(runs[0])
    active = runs[0].view().active
    for number in range(8):
        mine = [r for n in range(16) for r in group(worker, active, f"{number}.{n}")]
        other = [r.model_copy(update={"task_id": "another"}) for r in mine]
        elsewhere = [r.model_copy(update={"group_id": f"other-{r.group_id}"}) for r in mine]
        batches = [mine, mine[::-1], other, other[::-1], elsewhere, elsewhere[::-1]]
        outcomes = at_once(*(partial(runs[n % 2].submit, batch) for n, batch in enumerate(batches)))
        stored = {r.rollout_id: runs[0].rollout(r.rollout_id) for r in mine}
        told: dict[str, Counter[str]] = {name: Counter() for name in stored}
        for batch, outcome in zip(batches, outcomes, strict=True):
            assert not isinstance(outcome, Refused)
            for sent, verdict in zip(batch, outcome.verdicts, strict=True):
                told[sent.rollout_id][verdict.verdict] += 1
                there = stored[sent.rollout_id]
                same = (sent.task_id, sent.group_id) == (there.task_id, there.group_id)
                assert (verdict.verdict != "conflict") == same
        assert all(verdicts == {"accepted": 1, "duplicate": 1, "conflict": 4} for verdicts in told.values())
    assert check_ledger(replicated_url) == []
