"""Retention drops what is over while others release, reserve, rewind or send it again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import asyncpg
import pytest

from coordinator.client import Coordinator, Refused, Run, UpdateFenced
from coordinator.wire.rollouts import GenerationFailure, Rollout
from tests.client.runs import group, new_worker, reward, rewarded_groups
from tests.concurrency.together import Retention, at_once, codes, everywhere, log_probs
from tests.ledger_checker import check_ledger

SHORT = {"evidence_retention_seconds": 0.001, "rollout_retention_seconds": 0.002, "rewind_commits": 0}
# Transactions of the ledger that wait for another; the sweeper's is not one of them.
WAITING = """
    SELECT count(DISTINCT w.pid) FROM pg_locks w JOIN pg_stat_activity s USING (pid)
    WHERE NOT w.granted AND s.datname = current_database() AND s.query NOT LIKE '%folded%'
"""


@pytest.fixture
def retention(replicated_url: str) -> Iterator[Retention]:
    with Retention(replicated_url) as retention:
        yield retention


def commit_all(run: Run, update_id: str) -> set[str]:
    """Consumes every group that is offered; their members."""
    with run.update(update_id) as update:
        found = update.candidates(200)
        if found:
            assert {v.verdict for v in update.reserve(found, log_probs(found)).verdicts} == {"reserved"}
        update.commit()
    return {t.rollout_id for t in found}


def release_and_commit(run: Run, names: list[str], update_id: str) -> set[str]:
    """An operator releases these, and a trainer takes what came of it; the members that it committed."""
    answer = run.release(names)
    assert {(v.verdict, v.reason) for v in answer.verdicts} <= {
        ("released", None), ("stays", "beyond_retention"), ("missing_rollout", None), ("not_releasable", None),
    }  # fmt: skip
    return commit_all(run, update_id)


def test_what_is_released_keeps_its_tokens_and_what_lost_them_stays(
    coordinators: list[Coordinator], replicated_url: str, retention: Retention
) -> None:
    runs = everywhere(coordinators, **SHORT)
    active = runs[0].view().active
    met: Counter[str] = Counter()
    for number in range(10):
        hasty = runs[0].worker("hasty", f"hasty-{number}")
        hasty.register("hand", "1")
        held = [r for n in range(12) for r in group(hasty, active, f"{number}.{n}")]
        assert {verdict.reason for verdict in runs[0].submit(held).verdicts} == {"worker_not_acked"}
        reward(runs[0], held)
        assert hasty.ack(active.version, active.artifact_hash).matching
        names = [r.rollout_id for r in held]
        releasing = partial(release_and_commit, runs[1], names, f"u{number}")
        if number == 0:  # both orders are met for certain
            retention()
        taken, _ = (releasing(), None) if number < 2 else at_once(releasing, retention)
        assert not isinstance(taken, Refused)
        taken |= commit_all(runs[0], f"rest{number}")  # groups that retention was just looking at are not offered
        left = {row.rollout_id: row.state for row in runs[0].rollouts() if row.rollout_id in set(names)}
        assert {left[name] for name in taken if name in left} <= {"consumed"}
        assert {state for name, state in left.items() if name not in taken} <= {"offline", "quarantined"}
        met["taken"] += len(taken)
        met["dropped"] += len(names) - len(taken)
    assert check_ledger(replicated_url) == []
    assert min(met["taken"], met["dropped"]) > 0


def test_what_a_rewind_brings_back_was_not_dropped(
    coordinators: list[Coordinator], replicated_url: str, retention: Retention
) -> None:
    """With one commit kept from retention: the rewind comes first and undoes it, or the next commit ends its time."""
    runs = everywhere(coordinators, **(SHORT | {"rewind_commits": 1}))
    worker = new_worker(runs[0])
    ends: Counter[str] = Counter()
    for number in range(12):
        first = rewarded_groups(runs[0], worker, 4, prefix=f"{number}.first")
        before = runs[0].view().last_commit_no
        commit_all(runs[0], f"first{number}")
        rewarded_groups(runs[0], worker, 4, prefix=f"{number}.then")
        try:
            with runs[1].update(f"then{number}") as update:
                found = update.candidates(4)
                update.reserve(found, log_probs(found))
                swept, rewound, committed = at_once(
                    retention, partial(runs[0].rewind, before, "back", rewind_id=f"r{number}"), update.commit
                )
        except UpdateFenced:
            pass
        assert not isinstance(swept, Refused)
        there = {r.rollout_id for r in first} & {row.rollout_id for row in runs[0].rollouts()}
        if isinstance(rewound, Refused):
            assert (rewound.code, codes([committed])) == ("beyond_retention", {"ok": 1})
            ends["committed"] += 1
        else:
            assert codes([committed]) == {"update_fenced": 1}
            assert len(there) == len(first)
            assert len(runs[0].evidence_of([r.rollout_id for r in first]).rollout_id) == len(first)
            ends["rewound"] += 1
            commit_all(runs[0], f"again{number}")
    assert ends.keys() <= {"committed", "rewound"}
    assert check_ledger(replicated_url) == []


@pytest.mark.parametrize("grouped", [True, False])
def test_an_id_whose_tombstone_is_being_written_is_taken(
    coordinators: list[Coordinator], replicated_url: str, retention: Retention, grouped: bool
) -> None:
    """Sent again at that moment: the same is a duplicate; in another group, or another id in its place, a conflict."""
    runs = everywhere(coordinators, **SHORT, group_size=2 if grouped else None)
    worker = new_worker(runs[0])
    for number in range(4):
        gone = rewarded_groups(runs[0], worker, 20, prefix=f"{number}.")
        commit_all(runs[0], f"u{number}")
        elsewhere = [r.model_copy(update={"group_id": f"other-{r.group_id}"}) for r in gone]
        replacing = [r.model_copy(update={"rollout_id": f"other-{r.rollout_id}"}) for r in gone]
        failed = [failure_of(r) for r in elsewhere]
        with ThreadPoolExecutor() as pool, counting_stopped(replicated_url) as waits:
            dropped = pool.submit(retention.rows, runs[0].id)  # its rows are deleted, it cannot count that yet
            waits(1)
            sent = [
                pool.submit(runs[0].submit, elsewhere),
                pool.submit(runs[1].submit, replacing),
                pool.submit(runs[1].report_generation_failures, failed),
                pool.submit(runs[0].submit, gone),
            ]
            waits(5)
        assert dropped.result() == len(gone)
        verdicts = [{verdict.verdict for verdict in answer.result().verdicts} for answer in sent]
        assert verdicts == [{"conflict"}, {"conflict"}, {"conflict"}, {"duplicate"}]
        assert list(runs[0].rollouts()) == []
    assert check_ledger(replicated_url) == []


def failure_of(rollout: Rollout) -> GenerationFailure:
    """The same attempt, reported as one that gave no tokens."""
    return GenerationFailure(
        rollout_id=rollout.rollout_id,
        task_id=rollout.task_id,
        task_source=rollout.task_source,
        group_id=rollout.group_id,
        sample_index=rollout.sample_index,
        worker_id=rollout.worker_id,
        incarnation=rollout.incarnation,
        message="out of memory",
    )


@contextlib.contextmanager
def counting_stopped(database_url: str) -> Iterator[Callable[[int], None]]:
    """While this lasts, whatever changes rollouts stops before its end. Gives a call that waits for so many to wait."""
    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(database_url.replace("+asyncpg", "")))
        runner.run(connection.execute("BEGIN; LOCK TABLE count_deltas IN SHARE MODE"))

        def wait(count: int) -> None:
            deadline = time.monotonic() + 60
            while (found := runner.run(connection.fetchval(WAITING))) < count:
                assert time.monotonic() < deadline, f"{found} of {count} wait"
                time.sleep(0.02)

        try:
            yield wait
        finally:
            runner.run(connection.close())
