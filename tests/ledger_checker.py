"""Proves the coordinator's promises from the audit of one database, or says what contradicts them.

Everything is read in one snapshot and judged here, by none of the server's own statements. Each fault is a line
that begins with the number of the statement that it breaks:

1. a rollout's revisions run without holes, each from where the last one led, by an allowed transition;
2. a rollout is consumed at most once at a time, each commit following a reserve by the same update;
3. commits are numbered without holes, form one surviving line, lie within their leases, and split no group;
4. what a client got an acknowledgement for is there;
5. every reserve kept the limits on lag and drift, under one contract for each update;
6. the pointer only grows, each switch after the artifact's commit and every required worker's matching ack;
7. every action span was vouched for by an earlier ack of its incarnation, or the rollout was quarantined.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import asyncpg

from coordinator.rules.lifecycle import LIFECYCLE_TRANSITIONS, OUTCOME_TRANSITIONS

STEPS = {(origin, event, target) for (origin, event), target in LIFECYCLE_TRANSITIONS.items()} | OUTCOME_TRANSITIONS

TABLES = {
    "rollouts": "rollout_id",
    "rollout_evidence": "rollout_id",
    "rollout_audit": "rollout_id, revision",
    "updates": "update_id",
    "update_members": "update_id, rollout_id, revision",
    "policy_versions": "version",
    "journal": "event_no",
}


@dataclass
class Acknowledged:
    """What the clients of one run were told, in their own words."""

    rollouts: set[str] = field(default_factory=set)
    rewards: dict[str, float] = field(default_factory=dict)
    reserves: set[tuple[str, str, int]] = field(default_factory=set)
    """(update_id, rollout_id, revision after it)"""
    commits: dict[str, int] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    """Versions that were said to be active at some time."""


class Ledger:
    """The rows of one run."""

    def __init__(self, run: Any, rows: dict[str, list[Any]]) -> None:
        self.run = run
        self.settings: dict[str, Any] = json.loads(run["settings"])
        self.rollouts = {row["rollout_id"]: row for row in rows["rollouts"]}
        self.evidence = {row["rollout_id"]: row for row in rows["rollout_evidence"]}
        self.audit: defaultdict[str, list[Any]] = defaultdict(list)
        for row in rows["rollout_audit"]:
            self.audit[row["rollout_id"]].append(row)
        self.updates = {row["update_id"]: row for row in rows["updates"]}
        self.members = rows["update_members"]
        self.versions = {row["version"]: row for row in rows["policy_versions"]}
        self.journal = [(row, json.loads(row["detail"])) for row in rows["journal"]]

    def events(self, name: str) -> list[tuple[Any, dict[str, Any]]]:
        return [(row, detail) for row, detail in self.journal if row["event"] == name]


def check_ledger(url: str, acknowledged: dict[str, Acknowledged] | None = None) -> list[str]:
    """Every contradiction in the database at `url`; none: the promises held. `acknowledged` is by run_id."""
    return asyncio.run(_check_at(url, acknowledged or {}))


async def _check_at(url: str, acknowledged: dict[str, Acknowledged]) -> list[str]:
    connection = await asyncpg.connect(url.replace("postgresql+asyncpg://", "postgresql://"))
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return await check(connection, acknowledged)
    finally:
        await connection.close()


async def check(connection: asyncpg.Connection, acknowledged: dict[str, Acknowledged]) -> list[str]:
    """Every contradiction in what this connection sees."""
    ledgers = {}
    for run in await connection.fetch("SELECT * FROM runs ORDER BY run_no"):
        rows = {
            table: await connection.fetch(f"SELECT * FROM {table} WHERE run_no = $1 ORDER BY {order}", run["run_no"])
            for table, order in TABLES.items()
        }
        ledgers[run["run_id"]] = Ledger(run, rows)
    faults = [f"4: the acknowledged run {run_id} is gone" for run_id in acknowledged if run_id not in ledgers]
    for run_id, ledger in ledgers.items():
        for statement in (_revisions, _consumption, _line, _limits, _pointer, _vouching):
            faults += [f"{fault} (run {run_id})" for fault in statement(ledger)]
        if run_id in acknowledged:
            faults += [f"{fault} (run {run_id})" for fault in _acknowledged(ledger, acknowledged[run_id])]
    return faults


def _revisions(ledger: Ledger) -> Iterator[str]:
    for rollout_id in sorted(ledger.audit.keys() ^ ledger.rollouts.keys()):
        yield f"1: {rollout_id} has {'no row' if rollout_id in ledger.audit else 'no audit'}"
    for rollout_id in sorted(ledger.rollouts.keys() ^ ledger.evidence.keys()):
        yield f"1: {rollout_id} has {'no evidence' if rollout_id in ledger.rollouts else 'no row'}"
    for rollout_id, steps in ledger.audit.items():
        state: str | None = None
        for expected, step in enumerate(steps):
            if step["revision"] != expected:
                yield f"1: {rollout_id} has revision {step['revision']} where {expected} should follow"
                break
            if step["from_state"] != state:
                yield f"1: {rollout_id} revision {expected} leaves {step['from_state']}, but it was {state}"
            if (step["from_state"], step["event"], step["to_state"]) not in STEPS:
                what = f"{step['from_state']} --{step['event']}--> {step['to_state']}"
                yield f"1: {rollout_id} revision {expected}: {what}"
            state = step["to_state"]
        row = ledger.rollouts.get(rollout_id)
        if row is not None and (row["state"], row["revision"]) != (steps[-1]["to_state"], steps[-1]["revision"]):
            yield (
                f"1: {rollout_id} is {row['state']} at {row['revision']}, its audit ends "
                f"{steps[-1]['to_state']} at {steps[-1]['revision']}"
            )


def _consumption(ledger: Ledger) -> Iterator[str]:
    reserved = {
        (m["update_id"], m["rollout_id"], m["revision"] + 1) for m in ledger.members if m["verdict"] == "reserved"
    }
    for rollout_id, steps in ledger.audit.items():
        consumed = 0
        holder: str | None = None
        for step in steps:
            update_id, event = step["update_id"], step["event"]
            if event == "reserve":
                holder = update_id
                if (update_id, rollout_id, step["revision"]) not in reserved:
                    yield f"2: {rollout_id} was reserved by {update_id} without a row among its members"
                reserved.discard((update_id, rollout_id, step["revision"]))
                update = ledger.updates.get(update_id)
                if update is not None and update["ended_at"] is not None and step["at"] > update["ended_at"]:
                    yield f"2: {rollout_id} was reserved by {update_id} after its end"
            elif event in ("commit", "discard", "abort"):
                if holder is None or holder != update_id:
                    yield f"2: {rollout_id} revision {step['revision']}: {event} by {update_id}, held by {holder}"
                holder = None
            elif step["to_state"] != "reserved":
                holder = None
            consumed += (event == "commit") - (event == "rewind" and step["from_state"] == "consumed")
            if consumed not in (0, 1):
                yield f"2: {rollout_id} revision {step['revision']}: consumed {consumed} times"
            state = None if event != "commit" else ledger.updates.get(update_id)
            if event == "commit" and (state is None or state["state"] not in ("committed", "rewound")):
                yield f"2: {rollout_id} was consumed by {update_id}, which did not commit"
    for update_id, rollout_id, revision in sorted(reserved):
        yield f"2: {update_id} lists {rollout_id} as reserved, its audit has no reserve at revision {revision}"


def _line(ledger: Ledger) -> Iterator[str]:
    commits = {u["commit_no"]: u for u in ledger.updates.values() if u["commit_no"] is not None}
    numbers = [u["commit_no"] for u in ledger.updates.values() if u["commit_no"] is not None]
    if sorted(numbers) != list(range(1, ledger.run["commits"] + 1)):
        yield f"3: commit numbers are {sorted(numbers)}, the run counts {ledger.run['commits']}"
    for number, update in sorted(commits.items()):
        after = update["after_commit_no"]
        if after is None or not 0 <= after < number or (after and after not in commits):
            yield f"3: commit {number} follows {after}"
    line: list[int] = []
    at = ledger.run["last_commit_no"]
    while at in commits and at not in line:
        line.append(at)
        at = commits[at]["after_commit_no"]
    if at != 0:
        yield f"3: the line from {ledger.run['last_commit_no']} does not lead to the beginning but to {at}"
    on_line = {commits[number]["update_id"] for number in line}
    for update in commits.values():
        if (update["state"] == "committed") != (update["update_id"] in on_line):
            yield f"3: {update['update_id']} is {update['state']}, which disagrees with the surviving line"
    yield from _within_leases(ledger)

    uses = Counter(
        step["rollout_id"]
        for steps in ledger.audit.values()
        for step in steps
        if step["event"] == "commit" and step["update_id"] in on_line
    )
    for rollout_id, count in uses.items():
        if count > 1:
            yield f"3: the surviving line consumes {rollout_id} {count} times"
    if ledger.settings["group_size"] is not None:
        owners: defaultdict[str, set[str]] = defaultdict(set)
        for row in ledger.rollouts.values():
            if row["state"] == "consumed":
                owners[row["group_id"]].add(row["update_id"])
        for group_id, updates in owners.items():
            if len(updates) > 1:
                yield f"3: group {group_id} is split over {sorted(updates)}"


def _within_leases(ledger: Ledger) -> Iterator[str]:
    """Leases as the journal tells them, commits as journal, updates and audit tell them."""
    leases: dict[str, datetime] = {}
    committed: Counter[str] = Counter()
    for row, detail in ledger.journal:
        update_id = row["subject"]
        if row["event"] in ("update.opened", "update.renewed"):
            leases[update_id] = datetime.fromisoformat(detail["lease_until"])
        if row["event"] != "update.committed":
            continue
        committed[update_id] += 1
        update = ledger.updates.get(update_id)
        if update is None or update["commit_no"] != detail["commit_no"]:
            yield f"3: the journal has commit {detail['commit_no']} of {update_id}, the updates do not"
            continue
        lease = leases.get(update_id)
        if lease is None or update["ended_at"] > lease or update["lease_until"] != lease:
            yield f"3: {update_id} committed at {update['ended_at']}, its lease ended at {lease}"
    for update in ledger.updates.values():
        expected = int(update["state"] in ("committed", "rewound"))
        found = committed[update["update_id"]]
        if found != expected:
            yield f"3: {update['update_id']} is {update['state']}, the journal has its commit {found} times"


def _acknowledged(ledger: Ledger, told: Acknowledged) -> Iterator[str]:
    for rollout_id in sorted(told.rollouts - ledger.rollouts.keys()):
        yield f"4: the acknowledged rollout {rollout_id} is gone"
    for rollout_id, value in sorted(told.rewards.items()):
        row = ledger.rollouts.get(rollout_id)
        if row is None or row["reward"] != value:
            yield f"4: the acknowledged reward {value} of {rollout_id} is {row and row['reward']}"
    reserves = {
        (step["update_id"], step["rollout_id"], step["revision"])
        for steps in ledger.audit.values()
        for step in steps
        if step["event"] == "reserve"
    }
    for update_id, rollout_id, revision in sorted(told.reserves - reserves):
        yield f"4: {update_id} was told to hold {rollout_id} at {revision}; the audit has no such reserve"
    for update_id, number in sorted(told.commits.items()):
        update = ledger.updates.get(update_id)
        if update is None or update["commit_no"] != number:
            yield f"4: {update_id} was told commit {number}; it has {update and update['commit_no']}"
    switched = {int(row["subject"]) for row, _ in ledger.events("policy.activated")}
    for version in sorted(told.versions - switched - {_first_version(ledger)}):
        yield f"4: version {version} was said to be active; the journal has no switch to it"


def _limits(ledger: Ledger) -> Iterator[str]:
    contracts: defaultdict[str, set[str | None]] = defaultdict(set)
    drifts = {(m["update_id"], m["rollout_id"], m["revision"] + 1): m["drift"] for m in ledger.members}
    for rollout_id, steps in ledger.audit.items():
        for step in steps:
            if step["event"] != "reserve":
                continue
            update_id, lag, drift = step["update_id"], step["lag"], step["drift"]
            what = f"{rollout_id} revision {step['revision']} by {update_id}"
            contracts[update_id].add(step["contract_hash"])
            if lag is None or lag < 0:
                yield f"5: {what}: lag {lag}"
            elif ledger.settings["lag_gate"] == "enforce" and lag > step["max_lag"]:
                yield f"5: {what}: lag {lag} over {step['max_lag']}"
            if ledger.settings["drift_gate"] == "enforce" and (drift is None or not drift <= step["max_drift"]):
                yield f"5: {what}: drift {drift} over {step['max_drift']}"
            if (step["max_lag"], step["max_drift"]) != (ledger.settings["max_lag"], ledger.settings["max_drift"]):
                yield f"5: {what}: limits {step['max_lag']}, {step['max_drift']} are not the run's"
            update, row = ledger.updates.get(update_id), ledger.rollouts.get(rollout_id)
            if update is None or row is None or update["lag_clock"] - row["oldest_clock"] != lag:
                yield f"5: {what}: lag {lag} is not what the versions' clocks say"
            if drifts.get((update_id, rollout_id, step["revision"])) != drift:
                yield f"5: {what}: the members have another drift than {drift}"
    for update_id, hashes in contracts.items():
        if hashes != {ledger.run["contract_hash"]}:
            yield f"5: {update_id} holds the contracts {sorted(map(str, hashes))}"


def _first_version(ledger: Ledger) -> int:
    return int(ledger.events("run.created")[0][1]["version"])


def _pointer(ledger: Ledger) -> Iterator[str]:
    """Plays the journal from its beginning and looks at each switch as it happened."""
    numbers = [row["event_no"] for row, _ in ledger.journal]
    if numbers != list(range(1, ledger.run["event_no"] + 1)):
        yield f"6: the journal is not numbered 1 to {ledger.run['event_no']} without holes"
    active = _first_version(ledger)
    committed: dict[int, str] = {}
    required: dict[str, set[str]] = {}
    live: dict[str, str] = {}
    fenced: set[str] = set()
    acks: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row, detail in ledger.journal:
        subject = row["subject"]
        match row["event"]:
            case "policy.committed":
                committed[int(subject)] = detail["artifact_hash"]
            case "worker.registered":
                live[subject] = detail["incarnation"]
                fenced.discard(subject)
            case "worker.fenced":
                fenced.add(subject)
            case "worker.unfenced":
                fenced.discard(subject)
            case "worker.deregistered":
                live.pop(subject, None)
            case "activation.opened":
                required[subject] = set(detail["required_workers"])
            case "activation.dropped":
                required[subject].discard(detail["worker_id"])
            case "worker.acked":
                acks[subject, detail["incarnation"], detail["version"]] = detail
            case "policy.activated":
                version, activation_id = int(subject), detail["activation_id"]
                if version <= active:
                    yield f"6: the pointer went from {active} to {version}"
                if detail["retired"] != active:
                    yield f"6: version {version} followed {active}, but {detail['retired']} was retired"
                active = version
                if committed.get(version) != detail["artifact_hash"]:
                    yield f"6: version {version} became active before its artifact was committed"
                if not required.get(activation_id):
                    yield f"6: version {version} became active without a required worker"
                for worker_id in sorted(required.get(activation_id, ())):
                    ack = acks.get((worker_id, live.get(worker_id, ""), version))
                    matching = (
                        ack is not None
                        and ack["matching"]
                        and ack["artifact_hash"] == detail["artifact_hash"]
                        and ack["activation_id"] == activation_id
                    )
                    if not matching or worker_id in fenced:
                        yield f"6: version {version} became active without the ack of {worker_id}"
    if active != ledger.run["active_version"]:
        yield f"6: the journal ends at version {active}, the pointer is at {ledger.run['active_version']}"
    if [v["version"] for v in ledger.versions.values() if v["state"] == "active"] != [active]:
        yield f"6: version {active} is not the one that is marked active"


def _vouching(ledger: Ledger) -> Iterator[str]:
    acked: defaultdict[tuple[str, str, int], list[tuple[datetime, str]]] = defaultdict(list)
    for row, detail in ledger.events("worker.acked"):
        if detail["matching"]:
            key = (row["subject"], detail["incarnation"], detail["version"])
            acked[key].append((row["at"], detail["artifact_hash"]))
    for rollout_id, row in ledger.rollouts.items():
        evidence, steps = ledger.evidence.get(rollout_id), ledger.audit.get(rollout_id)
        if evidence is None or not steps:
            continue  # statement 1 has said so
        if any(step["to_state"] == "quarantined" for step in steps):
            continue
        mask = bytes(evidence["action_mask"])
        spans = zip(
            evidence["span_versions"],
            evidence["span_hashes"],
            evidence["span_starts"],
            evidence["span_ends"],
            strict=True,
        )
        covered = bytearray(len(mask))
        for version, artifact_hash, start, end in spans:
            covered[start:end] = b"\1" * (end - start)
            vouchers = acked[row["worker_id"], row["incarnation"], version]
            known = ledger.versions.get(version)
            if not any(at <= steps[0]["at"] and artifact_hash == named for at, named in vouchers):
                yield f"7: {rollout_id}: {row['incarnation']} had not acked version {version} when it arrived"
            elif known is None or known["artifact_hash"] != artifact_hash:
                yield f"7: {rollout_id}: version {version} is not {artifact_hash}"
        if any(acts and not seen for acts, seen in zip(mask, covered, strict=True)):
            yield f"7: {rollout_id} has action tokens outside of its spans"
