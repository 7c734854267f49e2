"""Activations that meet each other, their end, and the workers that confirm them, on two replicas."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import asyncpg

from coordinator.client import Coordinator, Run, Worker
from coordinator.wire.policies import PolicyRef, PolicyView
from tests.client.runs import BASE, group, new_worker, write_adapter
from tests.concurrency.together import at_once, codes, everywhere
from tests.ledger_checker import check_ledger

ROUNDS = 20


def published(run: Run, folder: Path, version: int, parent: int) -> PolicyView:
    files = write_adapter(folder / f"{run.id}-{version}", b"%d" % version)
    return run.publish(version=version, parent_version=parent, folder=files, base_model=BASE)


@contextlib.contextmanager
def one_pointer(url: str, run: Run) -> Iterator[None]:
    """At every moment of the block exactly one version is active, the pointer's, and the pointer only grows."""
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(asyncio.run, pointers(url, run.id, ended))
        try:
            yield
        finally:
            ended.set()
        observed = seen.result()
    # A withdrawn version is active until the restoring one takes its place.
    assert {count for _, count in observed} == {1}, "at some moment not exactly one version was active"
    versions = [version for version, _ in observed]
    assert len(versions) > 10
    assert versions == sorted(versions)


async def pointers(url: str, run_id: str, ended: threading.Event) -> list[tuple[int, int]]:
    """The pointer and the number of active versions that agree with it, again and again."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    seen = []
    try:
        while not ended.is_set():
            row = await connection.fetchrow(
                "SELECT active_version, (SELECT count(*) FROM policy_versions v WHERE v.run_no = r.run_no"
                " AND v.version = r.active_version AND v.state IN ('active', 'withdrawn')) AS active FROM runs r"
                " WHERE r.run_id = $1",
                run_id,
            )
            seen.append((row["active_version"], row["active"]))
            await asyncio.sleep(0.002)
    finally:
        await connection.close()
    return seen


def test_acks_of_six_workers_switch_once_and_only_forward(
    coordinators: list[Coordinator], replicated_url: str, tmp_path: Path
) -> None:
    runs = everywhere(coordinators)
    workers = [new_worker(runs[n % 2], f"w{n}") for n in range(6)]
    with one_pointer(replicated_url, runs[0]):
        for version in range(1, 13):
            policy = published(runs[0], tmp_path, version, version - 1)
            runs[0].open_activation(version, f"a{version}")
            answers = at_once(*(partial(worker.ack, version, policy.artifact_hash) for worker in workers))
            assert all(answer.matching for answer in answers)
            assert [a.activation.activated for a in answers if a.activation is not None].count(True) == 1
            assert {run.view().active.version for run in runs} == {version}
    assert check_ledger(replicated_url) == []


def test_giving_up_draining_and_the_last_ack_leave_one_outcome(
    coordinators: list[Coordinator], replicated_url: str, tmp_path: Path
) -> None:
    runs = everywhere(coordinators)
    workers = [new_worker(runs[n], f"w{n}") for n in range(2)]
    ends: Counter[str] = Counter()
    for version in range(1, 17):
        policy = published(runs[0], tmp_path, version, runs[0].view().active.version)
        runs[0].open_activation(version, f"a{version}")
        assert workers[0].ack(version, policy.artifact_hash).matching
        late = group(workers[0], PolicyRef(version=version, artifact_hash=policy.artifact_hash), f"late{version}")
        drains = version % 4 == 0
        outcomes = at_once(
            workers[1].drain if drains else partial(workers[1].ack, version, policy.artifact_hash),
            partial(runs[1].give_up, f"a{version}", "at the same time"),
            partial(runs[1].submit, late),
        )
        assert codes(outcomes).keys() <= {"ok", "activation_ended"}
        activation = runs[0].activation(f"a{version}")
        ends[activation.state] += 1
        switched = activation.state == "succeeded"
        assert switched == (runs[1].view().active.version == version)
        states = {runs[0].rollout(rollout.rollout_id).state for rollout in late}
        assert states == ({"generated"} if switched else {"quarantined"})
        if drains:  # a new life, to take part again
            workers[1] = runs[1].worker("w1", f"w1-{version}")
            workers[1].register("hand", "1")
    assert ends.keys() == {"succeeded", "given_up"}
    assert check_ledger(replicated_url) == []


def test_of_two_activations_at_once_one_is_open_and_no_version_is_lost(
    coordinators: list[Coordinator], replicated_url: str, tmp_path: Path
) -> None:
    """The older one first: the newer waits. The newer first: the older is refused."""
    runs = everywhere(coordinators)
    worker = new_worker(runs[0])
    ends: Counter[str] = Counter()
    with one_pointer(replicated_url, runs[0]):
        for version in range(1, 2 * ROUNDS, 2):
            active = runs[0].view().active.version
            older = published(runs[0], tmp_path, version, active)
            newer = published(runs[1], tmp_path, version + 1, active)
            outcomes = at_once(
                partial(runs[0].open_activation, version, f"a{version}"),
                partial(runs[1].open_activation, version + 1, f"a{version + 1}"),
            )
            states = [a.state for a in runs[0].activations()[-2:] if a.version >= version]
            assert Counter(states) in ({"open": 1, "waiting": 1}, {"open": 1})
            ends["activation_open" if "activation_open" in codes(outcomes) else "ok"] += 1
            for policy in (older, newer):
                worker.ack(policy.version, policy.artifact_hash)
            assert runs[1].view().active.version == version + 1
    assert ends.keys() == {"ok", "activation_open"}, "one side won every race: there was none"
    assert check_ledger(replicated_url) == []


def test_superseding_meets_the_last_ack(coordinators: list[Coordinator], replicated_url: str, tmp_path: Path) -> None:
    runs = everywhere(coordinators)
    worker = new_worker(runs[0])
    ends: Counter[str] = Counter()
    with one_pointer(replicated_url, runs[0]):
        for version in range(1, 2 * ROUNDS, 2):
            active = runs[0].view().active.version
            policy = published(runs[0], tmp_path, version, active)
            newer = published(runs[0], tmp_path, version + 1, active)
            runs[0].open_activation(version, f"a{version}")
            outcomes = at_once(
                partial(worker.ack, version, policy.artifact_hash),
                partial(runs[1].open_activation, version + 1, f"a{version + 1}", supersede=True),
            )
            assert codes(outcomes) == {"ok": 2}
            first = runs[1].activation(f"a{version}").state
            ends[first] += 1
            assert runs[1].view().active.version == (version if first == "succeeded" else active)
            assert runs[1].policy(version).state == ("active" if first == "succeeded" else "abandoned")
            worker.ack(version + 1, newer.artifact_hash)
            assert runs[0].view().active.version == version + 1
    assert ends.keys() == {"succeeded", "superseded"}
    assert check_ledger(replicated_url) == []


def test_dropping_a_worker_meets_its_ack(coordinators: list[Coordinator], replicated_url: str, tmp_path: Path) -> None:
    """The worker acks while it is fenced from elsewhere; a replica's clock drops whoever is fenced."""
    runs = everywhere(coordinators, on_lost="drop")
    workers = [new_worker(runs[n], f"w{n}") for n in range(2)]
    ends: Counter[int] = Counter()
    with one_pointer(replicated_url, runs[0]):
        for version in range(1, 9):
            policy = published(runs[0], tmp_path, version, version - 1)
            runs[0].open_activation(version, f"a{version}")
            outcomes = at_once(
                partial(workers[1].ack, version, policy.artifact_hash),
                partial(workers[1].fail, version, "load", "out of memory"),
            )
            assert codes(outcomes) == {"ok": 2}
            workers[0].ack(version, policy.artifact_hash)
            activation = runs[1].activate(version, f"a{version}")
            ends[len(activation.dropped)] += 1
            assert {r.ack for r in activation.required} == {"matching"}
            back(workers[1], policy)
    assert ends.keys() <= {0, 1}
    assert ends[1] > 0, "nobody was ever dropped"
    assert check_ledger(replicated_url) == []


def back(worker: Worker, policy: PolicyView) -> None:
    """A dropped worker confirms the active version."""
    assert worker.ack(policy.version, policy.artifact_hash).matching


def test_a_rollback_meets_the_last_ack(coordinators: list[Coordinator], replicated_url: str, tmp_path: Path) -> None:
    """Before it: the candidate is withdrawn and fails. After it: what became active is withdrawn at once."""
    runs = everywhere(coordinators)
    worker = new_worker(runs[0])
    good = published(runs[0], tmp_path, 1, 0)
    runs[0].open_activation(1, "a1")
    worker.ack(1, good.artifact_hash)
    version, ends = 2, Counter[str]()
    with one_pointer(replicated_url, runs[0]):
        for _ in range(ROUNDS):
            # What is active must be later than the version that comes back.
            second = published(runs[0], tmp_path, version, runs[0].view().active.version)
            runs[0].open_activation(version, f"a{version}")
            worker.ack(version, second.artifact_hash)
            policy = published(runs[0], tmp_path, version + 1, version)
            runs[0].open_activation(version + 1, f"a{version + 1}")
            late = group(worker, PolicyRef(version=version + 1, artifact_hash=policy.artifact_hash), f"late{version}")
            outcomes = at_once(
                partial(worker.ack, version + 1, policy.artifact_hash),
                partial(runs[1].roll_back, 1, "at the same time", activation_id=f"b{version}"),
                partial(runs[1].submit, late),
            )
            assert codes(outcomes) == {"ok": 3}
            ends[runs[0].activation(f"a{version + 1}").state] += 1
            assert {runs[0].policy(v).state for v in (version, version + 1)} == {"withdrawn"}
            assert {runs[0].rollout(r.rollout_id).state for r in late} == {"quarantined"}
            worker.ack(version + 2, good.artifact_hash)
            assert runs[1].view().active.version == version + 2
            version += 3
    assert ends.keys() == {"succeeded", "failed"}
    assert check_ledger(replicated_url) == []


def test_one_rollback_id_with_two_targets_is_one_rollback(
    coordinators: list[Coordinator], replicated_url: str, tmp_path: Path
) -> None:
    runs = everywhere(coordinators)
    worker = new_worker(runs[0])
    for version in (1, 2, 3):
        policy = published(runs[0], tmp_path, version, version - 1)
        runs[0].open_activation(version, f"a{version}")
        worker.ack(version, policy.artifact_hash)
    outcomes = at_once(
        *(partial(run.roll_back, to, "at once", rollback_id="one") for run, to in ((runs[0], 1), (runs[1], 2)))
    )
    assert codes(outcomes) == {"ok": 1, "rollback_conflict": 1}
    assert [p.version for p in runs[0].policies()] == [0, 1, 2, 3, 4]
    assert check_ledger(replicated_url) == []
