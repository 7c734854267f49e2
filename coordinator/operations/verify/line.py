"""Statement 3: commits are dense, form a tree, and the surviving line is one path that uses each rollout once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import text

from coordinator.operations.verify.entries import Entry
from coordinator.operations.verify.findings import Finding
from coordinator.operations.verify.ledger import Ledger, Search


@dataclass(frozen=True)
class Commit:
    """One commit as the journal tells it."""

    number: int
    after: int
    update_id: str
    lease_until: datetime | None


@dataclass(frozen=True)
class Rewind:
    """One rewind as the journal tells it."""

    rewind_id: str
    to_commit_no: int
    consumed: str
    """'release' or 'spent': what became of the rollouts that the rewound updates had consumed."""


@dataclass
class Line:
    """The tree of commits and the path that survives, played from the journal. Memory: some words per update."""

    path: list[Commit] = field(default_factory=list)
    """The surviving line, oldest commit first."""
    commits: dict[str, Commit] = field(default_factory=dict)
    """Every commit ever made, by its update."""
    rewound: dict[str, Rewind] = field(default_factory=dict)
    """Updates that left the line, with the rewind that took them off it."""
    rewinds: dict[str, Rewind] = field(default_factory=dict)
    found: list[Finding] = field(default_factory=list)
    _made: int = 0
    _leases: dict[str, datetime] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)

    @property
    def head(self) -> int:
        """The last commit of the surviving line; 0: none."""
        return self.path[-1].number if self.path else 0

    def take(self, entry: Entry) -> None:
        """Plays one entry of the journal."""
        match entry.event:
            case "update.opened" | "update.renewed":
                self._leases[entry.subject] = datetime.fromisoformat(entry.detail()["lease_until"])
            case "update.aborted" | "update.expired" | "update.fenced":
                self._end(entry.subject)
            case "update.committed":
                self._commit(entry)
            case "line.rewound":
                self._rewind(entry)

    def _say(self, subject: str, what: str) -> None:
        self.found.append(Finding(subject, what))

    def _end(self, update_id: str) -> None:
        self._ended.add(update_id)
        self._leases.pop(update_id, None)

    def _commit(self, entry: Entry) -> None:
        detail = entry.detail()
        update_id, number, after = entry.subject, int(detail["commit_no"]), int(detail["after_commit_no"])
        if update_id in self._ended:
            self._say(update_id, f"commit {number} comes after its end")
        if number != self._made + 1:
            self._say(update_id, f"commit {number} follows commit {self._made}: the numbers are not dense")
        if after != self.head:
            self._say(update_id, f"commit {number} names {after} as its last commit, the line ended at {self.head}")
        commit = Commit(number, after, update_id, self._leases.get(update_id))
        self._made = number
        self.commits[update_id] = commit
        self.path.append(commit)
        self._end(update_id)

    def _rewind(self, entry: Entry) -> None:
        detail = entry.detail()
        rewind = Rewind(str(detail["rewind_id"]), int(detail["to_commit_no"]), str(detail["consumed"]))
        what = f"rewind {rewind.rewind_id}"
        if rewind.rewind_id in self.rewinds:
            self._say(what, "is in the journal twice")
        self.rewinds[rewind.rewind_id] = rewind
        if rewind.to_commit_no and all(commit.number != rewind.to_commit_no for commit in reversed(self.path)):
            self._say(what, f"goes back to commit {rewind.to_commit_no}, which is not on the line to {self.head}")
            return
        left: list[str] = []
        while self.path and self.path[-1].number != rewind.to_commit_no:
            left.append(self.path.pop().update_id)
        if sorted(left) != sorted(detail["rewound"]):
            self._say(what, f"names {sorted(detail['rewound'])}, the line loses {sorted(left)}")
        self.rewound.update(dict.fromkeys(left, rewind))


UPDATES = text("""
    SELECT update_id, state, commit_no, after_commit_no, ended_at, lease_until FROM updates
    WHERE run_no = :run_no AND (commit_no IS NOT NULL OR state IN ('committed', 'rewound'))
""")

REWINDS = text("SELECT rewind_id, to_commit_no, consumed FROM rewinds WHERE run_no = :run_no")

# An update that left the line does not count: what it consumed was released, or is spent.
USES = Search(
    """
    SELECT rollout_id AS subject, count(*) AS uses, string_agg(update_id, ', ' ORDER BY revision) AS updates
    FROM rollout_audit
    WHERE run_no = :run_no AND event = 'commit' AND update_id = ANY(CAST(:line AS text[]))
    GROUP BY rollout_id
    """,
    {"the surviving line consumes it {uses} times: by {updates}": "uses > 1"},
)

GROUPS = Search(
    """
    SELECT m.group_id AS subject, count(DISTINCT m.update_id) AS n,
           string_agg(DISTINCT m.update_id, ', ' ORDER BY m.update_id) AS updates
    FROM update_members m
    JOIN rollout_audit a ON a.run_no = m.run_no AND a.rollout_id = m.rollout_id AND a.revision = m.revision + 2
        AND a.event = 'commit' AND a.update_id = m.update_id
    WHERE m.run_no = :run_no AND m.verdict = 'reserved' AND m.update_id = ANY(CAST(:line AS text[]))
    GROUP BY m.group_id
    """,
    {"the group is split over {updates}": "n > 1"},
)


def checked(line: Line) -> dict[str, int]:
    """How much there was to look at."""
    return {"commits": len(line.commits), "rewinds": len(line.rewinds), "on the line": len(line.path)}


async def check(ledger: Ledger, line: Line) -> AsyncIterator[Finding]:
    """Each breach of the statement: in the journal itself, and where rows contradict it."""
    for finding in line.found:
        yield finding
    if (ledger.commits, ledger.last_commit_no) != (len(line.commits), line.head):
        yield Finding(
            "the run",
            f"counts {ledger.commits} commits and ends at {ledger.last_commit_no}; the journal has "
            f"{len(line.commits)} and ends at {line.head}",
        )
    async for finding in _updates(ledger, line):
        yield finding
    async for finding in _rewinds(ledger, line):
        yield finding
    on_line = [commit.update_id for commit in line.path]
    async for finding in USES.run(ledger, line=on_line):
        yield finding
    if ledger.settings["group_size"] is not None:
        async for finding in GROUPS.run(ledger, line=on_line):
            yield finding


async def _updates(ledger: Ledger, line: Line) -> AsyncIterator[Finding]:
    missing = set(line.commits)
    async for row in ledger.rows(UPDATES):
        commit = line.commits.get(row.update_id)
        if commit is None:
            yield Finding(row.update_id, f"is {row.state} as commit {row.commit_no}, the journal has no commit of it")
            continue
        missing.discard(row.update_id)
        if (row.commit_no, row.after_commit_no) != (commit.number, commit.after):
            yield Finding(
                row.update_id,
                f"is commit {row.commit_no} after {row.after_commit_no}; the journal has "
                f"{commit.number} after {commit.after}",
            )
        state = "rewound" if row.update_id in line.rewound else "committed"
        if row.state != state:
            yield Finding(row.update_id, f"is {row.state}, on the line of the journal it is {state}")
        lease = commit.lease_until
        if lease is None or row.ended_at is None or row.ended_at > lease or row.lease_until != lease:
            yield Finding(row.update_id, f"committed at {row.ended_at}, its lease ended at {lease}")
    for update_id in sorted(missing):
        yield Finding(update_id, f"is commit {line.commits[update_id].number} of the journal, but no such update")


async def _rewinds(ledger: Ledger, line: Line) -> AsyncIterator[Finding]:
    missing = set(line.rewinds)
    async for row in ledger.rows(REWINDS):
        missing.discard(row.rewind_id)
        if line.rewinds.get(row.rewind_id) != Rewind(row.rewind_id, row.to_commit_no, row.consumed):
            yield Finding(f"rewind {row.rewind_id}", f"to {row.to_commit_no}, {row.consumed}: not so in the journal")
    for rewind_id in sorted(missing):
        yield Finding(f"rewind {rewind_id}", "is in the journal only")
