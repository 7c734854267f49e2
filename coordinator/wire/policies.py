"""Policy versions, their artifacts, and the activations that make one of them active."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from coordinator.wire.base import Count, Identifier, Label, Name, Sha256, Text, Version, WireModel

Kind = Literal["base", "lora", "full", "stream"]

_INNER = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\\/]"
_OUTER = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\\/\s.]"
_PART = rf"{_OUTER}({_INNER}*{_OUTER})?"
_FILE_NAME = rf"^(?![A-Za-z]:){_PART}(/{_PART})*$"
"""What `check_file_name` of the manifest's rules takes, for those who read the schema: it is the judge."""


class BaseModelIdentity(WireModel):
    """The model that a policy builds on; sha256 is over its weights."""

    name: Text = Field(min_length=1, max_length=300)
    revision: Text = Field(min_length=1, max_length=200)
    sha256: Sha256


class PolicyRef(WireModel):
    """A policy version together with the hash that proves which weights it means."""

    version: Version
    artifact_hash: Sha256


class ArtifactFile(WireModel):
    """One file of an artifact."""

    name: str = Field(
        min_length=1,
        max_length=255,
        description="with forward slashes for folders; no part begins or ends with a space or a dot",
        json_schema_extra={"pattern": _FILE_NAME},
    )
    size: Annotated[int, Field(strict=True, ge=0, le=2**53)]
    sha256: Sha256


Digests = Annotated[
    dict[Label, Sha256],
    Field(
        max_length=16,
        description="by layout of an engine's weights, the digest that its `registered` weights must have",
        # The pattern of a layout alone would say nothing of keys that do not match it.
        json_schema_extra={"additionalProperties": False},
    ),
]


class PreparePolicy(WireModel):
    """A new policy version with the manifest of its artifact."""

    version: Version
    parent_version: Version | None = Field(
        description="null: it begins a line of its own, and its lag clock is its number, as after every version before "
        "was withdrawn. Else the version that the updates began from, as a rule the one published last: lag counts on "
        "from it, "
        "and whatever withdraws it withdraws this one. Taken at the trainer's word, not compared with the versions "
        "that the updates were opened on"
    )
    rollback_version: Version | None = Field(
        None,
        description="the version to go back to should this one go bad, durable and committed; its files are kept as "
        "long as this one may be active. Left out: the nearest durable ancestor",
    )
    updates: tuple[Identifier, ...] = Field(
        (),
        fail_fast=True,
        description="the committed updates that made this version out of its parent: a rewind of one withdraws it",
    )
    kind: Literal["lora", "full", "stream"] = Field(
        "lora",
        description="stream: pushed to the engines without leaving files; nothing can roll back to it",
    )
    base_model: BaseModelIdentity
    files: tuple[ArtifactFile, ...] = Field(
        (), max_length=10_000, fail_fast=True, description="at least one, but for kind stream, which has none"
    )
    artifact_hash: Sha256 | None = Field(
        None, description="for kind stream only: over its tensors; the hash of files is that of their manifest"
    )
    digests: Digests = Field(default_factory=dict)
    uri: Text | None = Field(
        None,
        max_length=2000,
        description="a folder that coordinator and workers can read, file:///... or what fsspec opens; nothing is "
        "uploaded then. Left out: the files are uploaded",
    )

    @model_validator(mode="after")
    def _named_by_its_content(self) -> PreparePolicy:
        if self.kind == "stream" and (self.files or self.uri is not None or self.artifact_hash is None):
            raise ValueError("a version of kind stream has an artifact_hash, no files and no uri")
        if self.kind != "stream" and (not self.files or self.artifact_hash is not None):
            raise ValueError(f"a version of kind {self.kind} has files, and its hash is that of their manifest")
        return self


class Verification(WireModel):
    """How far the coordinator is with reading the files of a large artifact again, which its commit needs."""

    state: Literal["running", "refused", "passed"]
    bytes_done: int = Field(description="read so far; begins anew when another coordinator takes it up")
    bytes_total: int
    faulty: tuple[str, ...] = Field(description="files that are missing or changed: commit again once they are there")
    asked_at: datetime
    ended_at: datetime | None


class FileUpload(WireModel):
    """How much of a file is here."""

    name: str
    size: int
    received: int = Field(description="bytes that are on disk: go on from here")
    stored: bool = Field(description="the whole file is here with the right sha256; nothing need be sent")
    busy: bool = Field(False, description="another request is sending it at this moment: ask again in a second")


class PolicyView(WireModel):
    """A policy version as it stands."""

    version: int
    artifact_hash: Sha256
    kind: Kind
    state: Literal["prepared", "committed", "active", "retired", "abandoned", "withdrawn"]
    parent_version: int | None
    rollback_version: int | None = Field(description="named when it was prepared")
    lag_clock: int
    base_model: BaseModelIdentity
    files: tuple[ArtifactFile, ...]
    uri: str | None = Field(None, description="where the files lie; none: in the coordinator's artifact store")
    updates: tuple[str, ...]
    digests: Digests
    prepared_at: datetime
    committed_at: datetime | None
    activated_at: datetime | None
    ended_at: datetime | None
    files_removed_at: datetime | None = Field(None, description="when retention removed the files")
    verification: Verification | None = Field(None, description="of a large artifact, once its commit was asked for")


class PolicyList(WireModel):
    """Policy versions, lowest number first."""

    policies: list[PolicyView]


class OpenActivation(WireModel):
    """Freezes the workers that must confirm a version before it becomes active."""

    activation_id: Identifier
    required_workers: tuple[Name, ...] | None = Field(
        None, fail_fast=True, description="by name; left out: every live worker that is neither draining nor fenced"
    )
    supersede: bool = Field(
        False,
        strict=True,
        description="end the activation that is open, and abandon its version, rather than wait for its end",
    )


class RequiredWorker(WireModel):
    """One worker that an activation waits for, and what it said."""

    worker_id: str
    incarnation: str
    ack: Literal["missing", "matching", "mismatched"]
    acked_at: datetime | None
    detail: str | None


class DroppedWorker(WireModel):
    """A worker that an activation no longer waits for."""

    worker_id: str
    dropped_at: datetime
    reason: str


class ActivationView(WireModel):
    """An activation as it stands."""

    activation_id: str
    version: int
    artifact_hash: Sha256
    state: Literal["waiting", "open", "succeeded", "failed", "given_up", "superseded"]
    required: tuple[RequiredWorker, ...] = Field(description="who must confirm; none while it waits")
    dropped: tuple[DroppedWorker, ...] = Field(description="who was required and left, or was dropped")
    reason: str | None
    asked_at: datetime
    opened_at: datetime | None = Field(description="none: it waits for the open activation to end")
    deadline_at: datetime | None
    ended_at: datetime | None


class ActivationList(WireModel):
    """Activations, oldest first."""

    activations: list[ActivationView]


class ActivationVerdict(WireModel):
    """Whether the switch was made; the first reason that holds, and the workers that hold it back."""

    activated: bool = Field(description="whether the version is active now")
    reason: Literal[
        "artifact_not_committed",
        "non_monotonic_version",
        "missing_worker_ack",
        "worker_mismatch",
        "activated",
    ] = Field(description="the first that stands in the way; activated: none does")
    waits_for_hand: bool = Field(
        False, description="nothing stands in the way, and the run switches by_hand: call activate"
    )
    missing_workers: tuple[str, ...]
    mismatched_workers: tuple[str, ...]
    active: PolicyRef


class GiveUp(WireModel):
    """Ends an activation; its version is abandoned."""

    reason: Text = Field(min_length=1, max_length=500)


class Candidate(WireModel):
    """A version that workers are asked to load and confirm."""

    activation_id: str
    version: int
    artifact_hash: Sha256
    kind: Kind
    deadline_at: datetime


class Watch(WireModel):
    """What a worker needs to know: the active version and the one that is to follow it."""

    event_no: Count
    active: PolicyRef
    candidate: Candidate | None
