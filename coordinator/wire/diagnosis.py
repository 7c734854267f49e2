"""Diagnosis: why training is not moving, in one answer."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from coordinator.wire.base import WireModel

BlockerCode = Literal[
    "active_withdrawn",
    "no_workers",
    "no_live_producers",
    "workers_fenced",
    "activation_open",
    "nothing_generated",
    "waiting_for_rewards",
    "groups_incomplete",
    "all_stale",
    "held_by_updates",
    "no_open_update",
]


class Blocker(WireModel):
    """One thing that training waits for."""

    code: BlockerCode
    detail: str
    since: datetime | None
    next_step: str


class Producers(WireModel):
    """Workers by what they are doing. A suspect or fenced one is also counted by its state."""

    live: int
    draining: int
    lost: int
    fenced: int
    suspect: list[str]
    last_heartbeat: datetime | None


class RewardsWaiting(WireModel):
    """Rollouts of open groups that have no good reward yet."""

    waiting: int
    oldest: datetime | None
    failed: int


class GroupsStanding(WireModel):
    """Open groups with rewarded members."""

    ready: int = Field(description="whole, fresh enough for the active version, and held by nobody")
    incomplete: int
    stale: int
    held: int
    oldest: datetime | None


class OpenUpdateStanding(WireModel):
    """An update that is under way."""

    update_id: str
    owner: str
    policy_version: int
    reserved: int
    opened_at: datetime
    lease_until: datetime


class ActivationStanding(WireModel):
    """The activation that is under way."""

    activation_id: str
    version: int
    artifact_committed: bool
    missing_workers: list[str]
    mismatched_workers: list[str]
    opened_at: datetime
    deadline_at: datetime


class Diagnosis(WireModel):
    """How the run stands, and what it waits for: the first blocker is the one to look at first."""

    at: datetime
    blockers: list[Blocker]
    producers: Producers
    rewards: RewardsWaiting
    groups: GroupsStanding
    refused: dict[str, int] = Field(description="rollouts refused by reason, over the last five minutes")
    updates: list[OpenUpdateStanding]
    activation: ActivationStanding | None
    tickets: int
    last_commit_no: int
    last_commit_at: datetime | None
