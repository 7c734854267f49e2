"""Workers: registration, heartbeats, acks, failures and capacity tickets."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from coordinator.wire.base import Identifier, Label, Message, Sha256, Text, Version, WireModel
from coordinator.wire.policies import ActivationVerdict


class RegisterWorker(WireModel):
    """One life of a worker process. A new incarnation voids the acks of the one before."""

    incarnation: Identifier
    engine: Text = Field(min_length=1, max_length=100)
    engine_version: Text = Field(min_length=1, max_length=100)


class Incarnation(WireModel):
    """Names the life of the worker that calls."""

    incarnation: Identifier


class Heartbeat(WireModel):
    """Says that this incarnation lives."""

    incarnation: Identifier
    asleep_seconds: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="the engine gives its GPU away for so long: until then silence is no loss, and no ticket is given",
    )


class WorkerView(WireModel):
    """A worker as it stands."""

    worker_id: str
    incarnation: str
    state: Literal["live", "asleep", "lost", "draining", "deregistered"]
    asleep_until: datetime | None
    fenced: bool
    fenced_reason: str | None
    suspect_reason: str | None
    version: int | None = Field(description="the policy version that this incarnation confirmed last")
    drift: float | None = Field(description="mean drift of its rollouts that were measured at lag 0; none: of none yet")
    drift_rollouts: int = Field(description="how many those are")
    engine: str
    engine_version: str
    registered_at: datetime
    heartbeat_at: datetime
    heartbeat_seconds: float = Field(description="how often to send a heartbeat")


class WorkerList(WireModel):
    """Workers of a run, by id."""

    workers: list[WorkerView]


class WeightDigest(WireModel):
    """What an engine holds in memory. Engines of the same layout must give the same digests for the same artifact."""

    layout: Label = Field(
        min_length=1,
        description="how the tensors lie and what is hashed: engine, dtype, parallelism",
    )
    registered: Sha256 = Field(description="over the weights that the engine has taken up")
    active: Sha256 | None = Field(None, description="over the weights that the forward pass really multiplies with")


class WorkerStage(WireModel):
    """How far a worker has come with a version, for those who watch."""

    incarnation: Identifier
    version: Version
    stage: Literal["downloading", "verifying", "loading"]


class Ack(WireModel):
    """A worker's word, given after it verified the files and its engine serves them."""

    incarnation: Identifier
    version: Version
    artifact_hash: Sha256
    digest: WeightDigest | None = Field(None, description="of the weights in the engine's memory, where it can tell")
    caches_reset: tuple[Label, ...] = Field((), fail_fast=True)


class AckVerdict(WireModel):
    """What an ack counted for. `activation` is there while one is open for this version."""

    matching: bool
    reason: Literal["ok", "worker_mismatch", "policy_withdrawn", "caches_not_reset"]
    detail: str | None
    activation: ActivationVerdict | None


class WorkerFailure(WireModel):
    """A worker could not download, verify or load a version. It is fenced until it loads one whole."""

    incarnation: Identifier
    version: Version
    stage: Literal["download", "verify", "load"]
    message: Message


class FenceWorker(WireModel):
    """Takes a worker out until it loads and acks a version whole."""

    reason: Text = Field(min_length=1, max_length=500)


class TicketRequest(WireModel):
    """Groups that a worker would like to generate."""

    incarnation: Identifier
    group_ids: tuple[Identifier, ...] = Field(min_length=1, max_length=1000, fail_fast=True)


class TicketAnswer(WireModel):
    """The groups that may be generated now, in the order asked; the rest should wait."""

    granted: tuple[str, ...]
    capacity: int | None = Field(description="groups that may still be ticketed; none: unlimited")
    expires_at: datetime | None
