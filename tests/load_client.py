"""One client process of a load; run as a script, so that it imports nothing but the product.

`python load_client.py ROLE NAME RUN REPORT END URL TOKEN [URL TOKEN]`: with two addresses a client uses both; it
works until the file END is there.
Each line of REPORT is one acknowledgement, flushed as it came: ["rollout", id], ["reward", id, value],
["reserve", update, rollout, revision], ["commit", update, number], ["active", version], ["rewind", id],
["release", rollouts]. Every retry is a line
["retry", text], and what a client must not be told a line ["fault", text].
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from coordinator.client import (
    Coordinator,
    DriftSuspect,
    LeaseExpired,
    LineConflict,
    NotActivated,
    Refused,
    Run,
    UpdateFenced,
    Worker,
)
from coordinator.client.rollouts import Candidates, Trajectory
from coordinator.wire.policies import BaseModelIdentity, PolicyRef
from coordinator.wire.rollouts import Reward, Rollout, Span
from coordinator.wire.runs import GenerationContract
from coordinator.wire.updates import Discard

LOG_PROB = math.log(0.5)
ENOUGH_WAITING = 800
"""Producers make nothing new while so many rollouts wait for a reward or for an update."""
LOSES = frozenset({
    "partial_group", "policy_withdrawn", "beyond_retention", "commit_rewound", "non_monotonic_version",
    "policy_conflict", "policy_state", "update_not_committed", "activation_open", "activation_ended",
})  # fmt: skip
"""Refusals that whoever competes must expect, beside those with a class of their own."""


class Report:
    """What this client was told, on disk as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._lock = threading.Lock()

    def write(self, *line: object) -> None:
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


class _Retries(logging.Handler):
    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        if "trying again" in record.getMessage():
            self._report.write("retry", record.getMessage())


def produce(runs: Sequence[Run], worker_id: str, end: Path, report: Report) -> None:
    """Acks whatever is active or to be, and sends batches that overlap, through all runs at once."""
    worker = runs[0].worker(worker_id, f"{worker_id}-1")
    worker.register("hand", "1")
    acked: set[int] = set()
    ready: list[list[Rollout]] = []
    number = 0
    contract = runs[0].view().contract
    while not end.exists():
        heard = worker.heartbeat()
        for policy in (heard.active, heard.candidate):
            if policy is not None and policy.version not in acked:
                if worker.ack(policy.version, policy.artifact_hash).matching:
                    acked.add(policy.version)
                else:  # it was withdrawn or given up just now: the active one is to be confirmed again
                    acked.clear()
        report.write("active", heard.active.version)
        counts = runs[0].counts().rollouts
        if counts["generated"] + counts["rewarded"] < ENOUGH_WAITING:
            ready += [_group(worker, heard.active, contract, f"{worker_id}:{number + n}") for n in range(4)]
            number += 4
        batches = [[rollout for members in ready[-6:] for rollout in members] for _ in runs]
        for batch in batches:
            random.shuffle(batch)
        threads = [
            threading.Thread(target=_submit, args=(run, batch, report))
            for run, batch in zip(runs, batches, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(0.05)


def _group(worker: Worker, policy: PolicyRef, contract: GenerationContract, group_id: str) -> list[Rollout]:
    return [
        Rollout(
            rollout_id=f"{group_id}:{index}.0",
            task_id=group_id,
            task_source="load",
            group_id=group_id,
            sample_index=index,
            spans=(Span(version=policy.version, artifact_hash=policy.artifact_hash, start=2, end=5),),
            span_source="dispatch",
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            contract=contract,
            token_ids=[1, 2, 3, 4, 5 + index],
            action_mask=[False, False, True, True, True],
            behavior_log_probs=[None, None, LOG_PROB, LOG_PROB, LOG_PROB],
        )
        for index in range(4)
    ]


def _submit(run: Run, batch: list[Rollout], report: Report) -> None:
    with _watched(report):
        for verdict in run.submit(batch).verdicts:
            if verdict.verdict in ("accepted", "duplicate"):
                report.write("rollout", verdict.rollout_id)
            else:
                report.write("fault", f"{verdict.rollout_id}: {verdict.verdict} {verdict.reason} {verdict.detail}")


def judge(runs: Sequence[Run], name: str, end: Path, report: Report) -> None:
    """Rewards whatever is unrewarded; some first time out, and some rewards are sent by several judges at once."""
    while not end.exists():
        run = random.choice(runs)
        waiting = [
            row.rollout_id
            for state in ("generated", "reward_failed")
            for row in itertools.islice(run.rollouts(state=state), 200)
        ]
        random.shuffle(waiting)
        rewards = [
            Reward(rollout_id=rollout_id, status="timeout", ruleset_id="count", ruleset_hash="d" * 64)
            if random.random() < 0.05
            else Reward(
                rollout_id=rollout_id,
                status="ok",
                value=float(len(rollout_id)),
                ruleset_id="count",
                ruleset_hash="d" * 64,
            )
            for rollout_id in waiting[:64]
        ]
        if not rewards:
            time.sleep(0.1)
            continue
        for sent, verdict in zip(rewards, run.reward(rewards).verdicts, strict=True):
            if verdict.verdict in ("stored", "duplicate") and sent.value is not None:
                report.write("reward", sent.rollout_id, sent.value)
            # One that was consumed and dropped by retention since it was listed: another judge was faster.
            elif verdict.verdict not in ("recorded_failure", "stored", "missing_rollout"):
                report.write("fault", f"reward of {sent.rollout_id}: {verdict.verdict} {verdict.detail}")


def train(runs: Sequence[Run], name: str, end: Path, report: Report) -> None:
    """Competes for the oldest groups: reserves, then commits, aborts, discards or lets go."""
    number = 0
    while not end.exists():
        number += 1
        run = random.choice(runs)
        with _lost_races(), run.update(f"{name}:{number}") as update:
            if update.view.state != "open":  # opened by a request whose answer came after its lease had ended
                continue
            found = update.candidates(6) if random.random() < 0.5 else _anyone_s(run)
            if len(found) == 0:
                update.abort("nothing to do")
                time.sleep(0.1)
                continue
            shift = 0.5 if random.random() < 0.05 else random.uniform(0, 0.1)
            current = [np.full(len(t.token_ids), LOG_PROB + shift) for t in found]
            reserved = update.reserve(found, current)
            for verdict in reserved.verdicts:
                if verdict.verdict == "reserved":
                    report.write("reserve", update.id, verdict.rollout_id, verdict.revision)
            time.sleep(random.uniform(0, 0.2))
            fate = random.random()
            if fate < 0.15:
                update.abort("a bad step", quarantine=fate < 0.03)
                continue
            dropped = [t.rollout_id for t in reserved.admitted][:1] if fate > 0.95 else []
            view = update.commit([Discard(rollout_id=r, reason="no advantage") for r in dropped])
            report.write("commit", update.id, view.commit_no)


def _anyone_s(run: Run) -> Candidates:
    """Two of the oldest rewarded groups, whoever may hold them."""
    groups: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for row in itertools.islice(run.rollouts(state="rewarded"), 100):
        assert row.reward is not None
        groups[row.group_id].append(
            Trajectory(
                rollout_id=row.rollout_id,
                revision=row.revision,
                group_id=row.group_id,
                task_id=row.task_id,
                task_source=row.task_source,
                sample_index=row.sample_index,
                attempt=row.attempt,
                policy_version=row.spans[0].version,
                lag=0,
                reward=row.reward,
                token_ids=np.zeros(row.tokens, np.int32),
                action_mask=np.zeros(row.tokens, np.bool_),
                behavior_log_probs=np.zeros(row.tokens, np.float32),
                row_starts=row.row_starts,
                side_data=None,
            )
        )
    return Candidates(tuple(t for members in list(groups.values())[:2] for t in members), None)


@contextlib.contextmanager
def _lost_races() -> Iterator[None]:
    """What a trainer that competes must expect."""
    try:
        yield
    except (LineConflict, LeaseExpired, UpdateFenced, DriftSuspect):
        pass
    except Refused as error:
        if error.code not in LOSES:
            raise


@contextlib.contextmanager
def _watched(report: Report) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        report.write("fault", f"{type(error).__name__}: {error}")
        raise


def rewind(runs: Sequence[Run], name: str, end: Path, report: Report) -> None:
    """Now and then goes back by up to three commits, as a trainer that restored a checkpoint, and activates the version
    that restores an older one where the active one was withdrawn."""
    number = 0
    while not end.exists():
        time.sleep(random.uniform(0.5, 1.5))
        run = random.choice(runs)
        updates = run.updates()
        line = sorted(u.commit_no for u in updates if u.state == "committed" and u.commit_no is not None)
        number += 1
        if line and random.random() < 0.5:
            back = ([0, *line])[-random.randint(1, 4) :][0]
            with _lost_races():  # another commit may have come meanwhile, which is undone too
                run.rewind(
                    back, "a checkpoint was restored", rewind_id=f"{name}:{number}",
                    consumed=random.choice(("release", "spent")),
                )  # fmt: skip
                report.write("rewind", f"{name}:{number}")
        policies = {policy.version: policy for policy in run.policies()}
        newest = policies[max(policies)]
        if policies[run.view().active.version].state == "withdrawn" and newest.state == "committed":
            with _lost_races():
                run.open_activation(newest.version, f"{name}:{newest.version}")


def operate(runs: Sequence[Run], name: str, end: Path, report: Report) -> None:
    """Releases what is in quarantine, some by name and some by the update that put it there."""
    while not end.exists():
        time.sleep(random.uniform(0.2, 0.6))
        run = random.choice(runs)
        held = [row.rollout_id for row in itertools.islice(run.rollouts(state="quarantined"), 200)]
        released = []
        if held:
            released += run.release(random.sample(held, min(24, len(held)))).verdicts
        for update in run.updates()[-3:]:
            reason = random.choice(("policy_drift", "update_aborted"))
            released += run.release_quarantined_by(update.update_id, reason).verdicts
        count = sum(verdict.verdict == "released" for verdict in released)
        if count:
            report.write("release", count)


def publish(runs: Sequence[Run], name: str, end: Path, report: Report) -> None:
    """Makes a version of the newest commit that it sees, and activates it."""
    base_model = BaseModelIdentity(name="tiny", revision="1", sha256="c" * 64)
    number = 0
    while not end.exists():
        time.sleep(random.uniform(0.3, 1.5))
        number += 1
        folder = end.with_name(f"{name}-{number}")
        folder.mkdir()
        (folder / "adapter.bin").write_bytes(f"{name} {number}".encode())
        run = random.choice(runs)
        with _lost_races():
            committed = [u for u in run.updates() if u.state == "committed" and u.commit_no == u.last_commit_no]
            policies = run.policies()
            version = max(policy.version for policy in policies) + 1
            parent = max(policy.version for policy in policies if policy.state in ("active", "retired"))
            made_by = [update.update_id for update in committed]
            run.publish(version=version, parent_version=parent, folder=folder, base_model=base_model, updates=made_by)
            try:
                run.activate(version, f"{name}:{version}", wait_seconds=10)
            except NotActivated as failed:
                if failed.activation.state == "open":
                    run.give_up(failed.activation.activation_id, "it took too long")


ROLES = {
    "produce": produce,
    "judge": judge,
    "train": train,
    "rewind": rewind,
    "operate": operate,
    "publish": publish,
}


def main() -> None:
    role, name, run_id, report_path, end = sys.argv[1:6]
    addresses = sys.argv[6:]
    report = Report(Path(report_path))
    logging.getLogger("coordinator.client").addHandler(_Retries(report))
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(Coordinator(url, token)).run(run_id)
            for url, token in zip(addresses[::2], addresses[1::2], strict=True)
        ]
        with _watched(report):
            ROLES[role](runs, name, Path(end), report)


if __name__ == "__main__":
    main()
