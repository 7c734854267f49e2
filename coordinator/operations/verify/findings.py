"""What a proof says, and what it may be told beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Finding(NamedTuple):
    """One contradiction, as the check of a statement reports it."""

    subject: str
    """The rollout, update, version or commit that is wrong."""
    what: str


@dataclass(frozen=True)
class Breach:
    """One contradiction of a statement in a run."""

    statement: int
    run_id: str
    subject: str
    what: str

    def __str__(self) -> str:
        return f"{self.statement}: {self.subject}: {self.what} (run {self.run_id})"


@dataclass(frozen=True)
class Verdict:
    """The end of one statement in a run: how much was looked at, and how many breaches were found."""

    statement: int
    run_id: str
    checked: Mapping[str, int]
    breaches: int


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
