"""The journal of a run, read once in its order and played to all who follow it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sqlalchemy import text

from coordinator.operations.verify.findings import Finding
from coordinator.operations.verify.ledger import Ledger

JOURNAL = text("""
    SELECT event_no, event, subject, CAST(detail AS text) AS detail FROM journal
    WHERE run_no = :run_no ORDER BY event_no
""")


@dataclass(frozen=True)
class Entry:
    """One entry. Its detail is parsed when somebody asks."""

    event: str
    subject: str
    text: str

    def detail(self) -> dict[str, Any]:
        """What the event says beyond its subject."""
        parsed: dict[str, Any] = json.loads(self.text)
        return parsed


class Follower(Protocol):
    """Who plays the journal."""

    found: list[Finding]

    def take(self, entry: Entry) -> None:
        """Plays one entry. KeyError, TypeError or ValueError: the entry does not have what its event needs."""


@dataclass
class Numbering:
    """That the entries are numbered without holes, up to what the run has counted."""

    entries: int = 0
    found: list[Finding] = field(default_factory=list)

    def see(self, number: int) -> None:
        """The next entry has this number."""
        self.entries += 1
        if number != self.entries:
            self.found.append(Finding("the journal", f"entry {number} follows {self.entries - 1}"))
            self.entries = number

    def end(self, counted: int) -> None:
        """The run has counted so many entries."""
        if self.entries != counted:
            self.found.append(Finding("the journal", f"ends at {self.entries}, the run counts {counted}"))


async def play(ledger: Ledger, numbering: Numbering, followers: Sequence[Follower]) -> None:
    """Plays the whole journal. An entry that a follower cannot read is a finding of that follower."""
    async for row in ledger.rows(JOURNAL):
        numbering.see(row.event_no)
        entry = Entry(row.event, row.subject, row.detail)
        for follower in followers:
            try:
                follower.take(entry)
            except (KeyError, TypeError, ValueError) as error:
                follower.found.append(
                    Finding(row.subject, f"entry {row.event_no} of the journal, {row.event}, is broken: {error!r}")
                )
    numbering.end(ledger.event_no)
