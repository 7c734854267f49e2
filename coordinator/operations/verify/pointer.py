"""Statement 6: the pointer only grows, each switch after the artifact's commit and every required worker's ack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import text

from coordinator.operations.verify.entries import Entry, Numbering
from coordinator.operations.verify.findings import Finding
from coordinator.operations.verify.ledger import Ledger

MARKED = text("""
    SELECT version, state FROM policy_versions
    WHERE run_no = :run_no AND (state = 'active' OR version = :version) ORDER BY version
""")


@dataclass
class Pointer:
    """Plays the journal from its beginning and looks at each switch as it happened.

    Only acks of versions beyond the active one are kept: no switch can need another.
    """

    active: int = -1
    """The version that is active; -1 before the run was created."""
    switched: set[int] = field(default_factory=set)
    """Every version that was ever active."""
    found: list[Finding] = field(default_factory=list)
    _committed: dict[int, str] = field(default_factory=dict)
    _required: dict[str, set[str]] = field(default_factory=dict)
    _live: dict[str, str] = field(default_factory=dict)
    _fenced: set[str] = field(default_factory=set)
    _acks: defaultdict[int, dict[tuple[str, str], dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, entry: Entry) -> None:
        """Plays one entry of the journal."""
        subject = entry.subject
        match entry.event:
            case "run.created":
                self.active = int(entry.detail()["version"])
                self.switched.add(self.active)
            case "policy.committed":
                self._committed[int(subject)] = entry.detail()["artifact_hash"]
            case "worker.registered":
                self._live[subject] = entry.detail()["incarnation"]
                self._fenced.discard(subject)
            case "worker.fenced":
                self._fenced.add(subject)
                for said in self._acks.values():
                    said.pop((subject, self._live.get(subject, "")), None)
            case "worker.unfenced":
                self._fenced.discard(subject)
            case "worker.deregistered":
                self._live.pop(subject, None)
            case "activation.opened":
                self._required[subject] = set(entry.detail()["required_workers"])
            case "activation.dropped":
                self._required[subject].discard(entry.detail()["worker_id"])
            case "worker.acked":
                detail = entry.detail()
                version = int(detail["version"])
                if version > self.active:
                    self._acks[version][subject, detail["incarnation"]] = detail
            case "policy.activated":
                self._switch(int(subject), entry.detail())

    def _say(self, version: int, what: str) -> None:
        self.found.append(Finding(f"version {version}", what))

    def _switch(self, version: int, detail: dict[str, Any]) -> None:
        activation_id, artifact_hash = detail["activation_id"], detail["artifact_hash"]
        if version <= self.active:
            self._say(version, f"the pointer went to it from {self.active}")
        if detail["retired"] != self.active:
            self._say(version, f"followed {self.active}, but {detail['retired']} was retired")
        if self._committed.get(version) != artifact_hash:
            self._say(version, "became active before its artifact was committed")
        required = self._required.pop(activation_id, set())
        if not required:
            self._say(version, "became active without a required worker")
        for worker_id in sorted(required):
            ack = self._acks[version].get((worker_id, self._live.get(worker_id, "")))
            matching = (
                ack is not None
                and ack["matching"]
                and ack["artifact_hash"] == artifact_hash
                and ack["activation_id"] == activation_id
            )
            if not matching or worker_id in self._fenced:
                self._say(version, f"became active without the ack of {worker_id}")
        self.active = version
        self.switched.add(version)
        for passed in [acked for acked in self._acks if acked <= version]:
            del self._acks[passed]


def checked(pointer: Pointer, numbering: Numbering) -> dict[str, int]:
    """How much there was to look at."""
    return {"switches": max(0, len(pointer.switched) - 1), "journal entries": numbering.entries}


async def check(ledger: Ledger, pointer: Pointer, numbering: Numbering) -> AsyncIterator[Finding]:
    """Each breach of the statement: in the journal itself, and where rows contradict it."""
    for finding in (*numbering.found, *pointer.found):
        yield finding
    if pointer.active != ledger.active_version:
        yield Finding("the pointer", f"is at {ledger.active_version}, the journal ends at version {pointer.active}")
    marked = {row.version: row.state async for row in ledger.rows(MARKED, version=pointer.active)}
    # The active version may have been withdrawn before another took its place.
    if set(marked) != {pointer.active} or marked[pointer.active] not in ("active", "withdrawn"):
        yield Finding("the pointer", f"the journal ends at version {pointer.active}, the versions are marked {marked}")
