"""Statistics: what flowed through a run in a window of time, how old what waits is, and how it lies to the limits."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from coordinator.wire.base import WireModel
from coordinator.wire.rollouts import State


class FlowBucket(WireModel):
    """Changes of rollouts within one stretch of the window."""

    begin: datetime
    arrived: int
    generation_failed: int
    rewarded: int = Field(description="got a good reward")
    reward_failed: int
    reserved: int
    consumed: int
    released: int = Field(description="given back by an update that ended without a commit")
    quarantined: int
    set_aside: int
    discarded: int = Field(description="not used after all, as the commit said")


class Refused(WireModel):
    """Rollouts that were taken out of the way to training, for one reason."""

    event: Literal["quarantine", "set_aside", "discard"]
    reason: str
    rollouts: int


class RejectedArrivals(WireModel):
    """What one life of a worker sent and got back; none of it was stored."""

    worker_id: str
    incarnation: str
    reason: str
    rollouts: int = Field(description="over this whole life")
    last_detail: str
    last_at: datetime


class StateAge(WireModel):
    """How long rollouts of one state have been here, since their arrival."""

    state: State
    rollouts: int = Field(description="of open groups, the 10000 that are next in line")
    oldest_at: datetime
    oldest_seconds: float
    median_seconds: float


class VersionStatistics(WireModel):
    """Rollouts by the policy version that made them: what arrived, and how what was judged lies to the limits."""

    version: int = Field(description="of the newest token of what arrived, of the oldest of what was judged")
    arrived: int = Field(description="within the window")
    states: dict[str, int] = Field(description="in which state those are now")
    judged: int = Field(description="reserved, stale_policy or policy_drift within the window, each time it was judged")
    lags: dict[str, int] = Field(description="how many were judged at this lag")
    drifts: list[int] = Field(description="how many between drift_edges[i] and the next one; the last: beyond the last")
    drift_mean: float | None = Field(description="of those that were measured")
    drift_max: float | None


class Statistics(WireModel):
    """How a run moves, over the last so many seconds."""

    at: datetime
    bucket_seconds: float
    buckets: list[FlowBucket] = Field(description="oldest first; the last one is not over yet")
    refused: list[Refused] = Field(description="within the window, the most frequent first; 50 at most")
    rejected: list[RejectedArrivals] = Field(
        description="by those that were sent back within the window, the latest first; 50 at most"
    )
    ages: list[StateAge] = Field(description="of what may still be used, in the order of the lifecycle")
    versions: list[VersionStatistics] = Field(description="newest first; 32 at most")
    max_lag: int = Field(description="the run's limit")
    max_drift: float = Field(description="the run's limit")
    lag_gate: Literal["enforce", "observe"]
    drift_gate: Literal["enforce", "observe", "off"]
    drift_edges: list[float] = Field(description="where the bins of drift begin, the first 0; the limit is one of them")
