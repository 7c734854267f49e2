"""The ways back: rewinds of the line of commits, rollbacks of the policy, withdrawn versions."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from coordinator.wire.base import Count, Identifier, Message, Version, WireModel
from coordinator.wire.policies import PolicyView


class Rewind(WireModel):
    """Goes back to the commit that a restored checkpoint contains."""

    to_commit_no: Count = Field(description="the last surviving commit; 0: none survives")
    consumed: Literal["release", "spent"] = Field(
        "release", description="what later updates had consumed: released to be used again, or left as spent"
    )
    reason: Message = Field(min_length=1)
    restoring_version: Version | None = Field(
        None, description="the number for a restoring version, should one be needed; left out: the next one"
    )


class RewindView(WireModel):
    """What a rewind came to."""

    rewind_id: str
    to_commit_no: int
    consumed: Literal["release", "spent"]
    reason: str
    actor: str
    at: datetime
    rewound_updates: list[str] = Field(description="commits that no longer are on the line")
    fenced_updates: list[str] = Field(description="updates that were open")
    withdrawn_versions: list[int] = Field(description="versions that the rewound updates led to")
    released: int = Field(description="rollouts that came back from consumed, offline or quarantined")
    quarantined: int = Field(
        description="rollouts with tokens of withdrawn versions that went into quarantine, of those that came back too"
    )
    restoring: PolicyView | None = Field(
        None, description="prepared when the active version was withdrawn: open its activation"
    )
    no_restorable_version: bool = Field(
        False,
        description="the active version was withdrawn and no durable ancestor is left, or no number: prepare the next "
        "version, or begin another run",
    )


class RewindList(WireModel):
    """Rewinds, oldest first."""

    rewinds: list[RewindView]


class Rollback(WireModel):
    """Brings an earlier artifact back under a new version number."""

    to_version: Version | None = Field(
        None,
        description="the version whose artifact comes back; it must be durable. Left out: the active version's "
        "rollback_version, or its nearest durable ancestor",
    )
    version: Version | None = Field(None, description="the new version's number; left out: the next one")
    reason: Message = Field(min_length=1)
    activation_id: Identifier | None = Field(
        None, description="opens the new version's activation at once, in place of any that is open"
    )


class RollbackView(WireModel):
    """What a rollback came to."""

    rollback_id: str
    to_version: int
    reason: str
    actor: str
    at: datetime
    restoring: PolicyView = Field(description="the new version: an activation makes it active")
    activation_id: str | None
    withdrawn_versions: list[int] = Field(description="every version that is not an ancestor of the restored one")
    fenced_updates: list[str] = Field(description="open updates that stood on a withdrawn version")
    released: int = Field(description="rollouts that came back from offline or quarantined")
    quarantined: int = Field(description="rollouts with tokens of withdrawn versions that went into quarantine")


class RollbackList(WireModel):
    """Rollbacks, oldest first."""

    rollbacks: list[RollbackView]


class WithdrawPolicy(WireModel):
    """Takes a version, and those made from it, out of use."""

    reason: Message = Field(min_length=1)
    restoring_version: Version | None = Field(
        None, description="the number for a restoring version, should one be needed; left out: the next one"
    )


class WithdrawView(WireModel):
    """What a withdrawal came to; it is empty where the version had been withdrawn with another one."""

    withdrawn_versions: list[int]
    fenced_updates: list[str] = Field(description="open updates that stood on a withdrawn version")
    released: int = Field(description="rollouts that came back from offline or quarantined")
    quarantined: int = Field(description="rollouts with tokens of withdrawn versions that went into quarantine")
    restoring: PolicyView | None = Field(
        None, description="prepared when the active version was withdrawn: open its activation"
    )
    no_restorable_version: bool = Field(
        False,
        description="the active version was withdrawn and no durable ancestor is left, or no number: prepare the next "
        "version, or begin another run",
    )
