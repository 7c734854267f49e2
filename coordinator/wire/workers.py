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


class Heartbeat(WireModel):
    """Says that this incarnation lives."""

    incarnation: Identifier


class WorkerView(WireModel):
    """A worker as it stands."""

    worker_id: str
    incarnation: str
    state: Literal["live", "lost", "draining", "deregistered"]
    fenced: bool
    fenced_reason: str | None
    suspect_reason: str | None
    engine: str
    engine_version: str
    registered_at: datetime
    heartbeat_at: datetime
    heartbeat_seconds: float = Field(description="how often to send a heartbeat")


class WorkerList(WireModel):
    """Workers of a run, by id."""

    workers: list[WorkerView]


class Ack(WireModel):
    """A worker's word, given after it verified the files and its engine serves them."""

    incarnation: Identifier
    version: Version
    artifact_hash: Sha256
    digest: Text | None = Field(None, max_length=200, description="of the weights in the engine's memory")
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
