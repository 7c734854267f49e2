"""Statistics: what flowed through a run in a window of time, how old what waits is, and how it lies to the limits."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from coordinator.wire.base import WireModel
from coordinator.wire.rollouts import State


class FlowBucket(WireModel):
    """Changes of rollouts within one stretch of the window."""

    begin: datetime = Field(description="when the stretch begins")
    arrived: int = Field(description="stored, into whichever state")
    generation_failed: int = Field(description="attempts that gave no tokens")
    rewarded: int = Field(description="got a good reward")
    reward_failed: int = Field(description="a reward that timed out or failed")
    reserved: int = Field(description="bound to an update")
    consumed: int = Field(description="used by a commit")
    released: int = Field(description="given back by an update that ended without a commit")
    quarantined: int = Field(description="kept apart, for an operator to release")
    set_aside: int = Field(description="stale, or of a group that was refused or spent")
    discarded: int = Field(description="not used after all, as the commit said")


class Refused(WireModel):
    """Rollouts that were taken out of the way to training, for one reason."""

    event: Literal["quarantine", "set_aside", "discard"] = Field(description="what was done with them")
    reason: str
    rollouts: int = Field(description="how many")


class RejectedArrivals(WireModel):
    """What one life of a worker sent and got back; none of it was stored."""

    worker_id: str
    incarnation: str
    reason: str
    rollouts: int = Field(description="over this whole life")
    last_detail: str = Field(description="what was wrong with the last of them")
    last_at: datetime = Field(description="when that was")


class StateAge(WireModel):
    """How long rollouts of one state have been here, since their arrival."""

    state: State
    rollouts: int = Field(description="of open groups, the 10000 that are next in line")
    oldest_at: datetime = Field(description="when the oldest arrived")
    oldest_seconds: float = Field(description="its age")
    median_seconds: float = Field(description="the age that half of them have not reached")


class VersionStatistics(WireModel):
    """Rollouts by the policy version that made them: what arrived, and how what was judged lies to the limits."""

    version: int = Field(description="of the newest token of what arrived, of the oldest of what was judged")
    arrived: int = Field(description="within the window")
    states: dict[str, int] = Field(description="in which state those are now")
    judged: int = Field(description="reserved, stale_policy or policy_drift within the window, each time it was judged")
    lags: dict[str, int] = Field(description="how many were judged at this lag")
    drifts: list[int] = Field(description="how many between drift_edges[i] and the next one; the last: beyond the last")
    drift_mean: float | None = Field(description="of those that were measured")
    drift_max: float | None = Field(description="the largest of those")


class Statistics(WireModel):
    """How a run moves, over the last so many seconds."""

    at: datetime = Field(description="when it was read, by the database's clock")
    bucket_seconds: float = Field(description="how long each stretch is")
    buckets: list[FlowBucket] = Field(description="oldest first; the last one is not over yet")
    refused: list[Refused] = Field(description="within the window, the most frequent first; 50 at most")
    rejected: list[RejectedArrivals] = Field(
        description="by those that were sent back within the window, the latest first; 50 at most"
    )
    ages: list[StateAge] = Field(description="of what may still be used, in the order of the lifecycle")
    versions: list[VersionStatistics] = Field(description="newest first; 32 at most")
    max_lag: int = Field(description="the run's limit")
    max_drift: float = Field(description="the run's limit")
    lag_gate: Literal["enforce", "observe"] = Field(description="observe: what is stale is only marked")
    drift_gate: Literal["enforce", "observe", "off"] = Field(description="off: drift is not measured")
    drift_edges: list[float] = Field(description="where the bins of drift begin, the first 0; the limit is one of them")
