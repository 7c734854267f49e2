"""What the experiment writes: one file per arm and one of the coordinator, each written once.

Their JSON schemas are published in docs/closure. A number that is not finite is null.
"""

from __future__ import annotations

import json
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker_agent.closure.profile import ClosureError

SCHEMA_VERSION = 1


class Part(BaseModel):
    """A part of a result."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Part):
    """The base model, by its contents."""

    name: str
    revision: str
    sha256: str
    device: Literal["cpu", "cuda"]
    engine_dtype: str
    learner_dtype: str


class Stage(Part):
    """One stage: how long it took, and memory at its end. MiB are 2**20 bytes."""

    name: str
    seconds: float
    rss_mib: float = Field(description="resident memory of the arm's process")
    peak_rss_mib: float = Field(description="the most that it ever was")
    device_mib: float | None = Field(description="memory in use on the whole GPU; none on a CPU")


class Initialization(Part):
    """The adapter before the update."""

    seed: int
    adapter_sha256: str = Field(description="of adapter_model.safetensors as exported")


class Update(Part):
    """The one optimizer step, on verl's supervised loss."""

    optimizer_steps: Literal[1] = 1
    samples: int
    supervised_tokens: int
    learning_rate: float
    loss: float | None
    grad_norm: float | None = Field(description="L2 norm before clipping at 1.0")
    delta_l2: float | None = Field(description="L2 norm of the adapter's change")
    changed_tensors: int
    tensors: int
    after_sha256: str


class Comparison(Part):
    """Log-probs of the same tokens from two sides, in nats."""

    tokens: int
    max_abs_error: float | None
    mean_abs_error: float | None
    max_limit: float
    mean_limit: float
    passed: bool


class Comparisons(Part):
    """Engine against learner."""

    same_version_before: Comparison = Field(description="both on version 0")
    same_version_after: Comparison = Field(description="both on version 1")
    change: Comparison = Field(description="log-prob after minus before, of the engine against the learner")


class Sync(Part):
    """How version 1 came into the engine. The digests are of the weights in the engine's memory."""

    passed: bool
    memory_released: bool = Field(description="whether the engine had given its memory back since before the update")
    version_before: int
    version_after: int
    artifact_hash_before: str
    artifact_hash_after: str
    engine_digest_layout: str | None
    engine_digest_before: str | None
    engine_digest_after: str | None
    engine_active_digest_after: str | None = Field(description="of what its forward pass multiplies with")
    expected_digest_after: str = Field(description="computed from the learner's exported adapter")
    caches_reset: tuple[str, ...]
    seconds: float


class Admission(Part):
    """What the admission rule says of one rollout of version 0 at version 1."""

    rollout_id: str
    task_id: str
    accepted: bool
    reason: str
    freshness: str | None
    drift: float | None = Field(description="mean |log-prob of version 1 - log-prob in the fixture|, in nats")
    behavior_version: int
    current_version: int
    max_lag: int
    max_drift: float


class Decision(Part):
    """Everything that is judged. `passed`: gradient, change, comparisons and sync; admission is no part of it."""

    finite_gradient: bool
    changed: bool
    comparisons: Comparisons
    sync_rpc_and_version: Sync
    admission: tuple[Admission, ...]
    passed: bool


class Answer(Part):
    """What the engine answers, drawn greedily."""

    task_id: str
    text: str
    finish_reason: str


class LogProbs(Part):
    """One rollout's answer: log-probs of its tokens from every side, in nats."""

    rollout_id: str
    behavior: tuple[float | None, ...] = Field(description="as the fixture has them")
    engine_before: tuple[float | None, ...]
    learner_before: tuple[float | None, ...]
    engine_after: tuple[float | None, ...]
    learner_after: tuple[float | None, ...]


class ArmResult(Part):
    """One arm. `done`: everything is there. `stopped`: its adapter was not the other arm's, so nothing was trained.

    `skipped`: the other arm had not passed.
    """

    schema_version: Literal[1] = 1
    run_label: str
    arm: Literal["release", "retain"]
    status: Literal["done", "stopped", "skipped"]
    reason: str | None = None
    created_at: datetime
    model: Model
    packages: dict[str, str]
    fixture_sha256: str
    initialization: Initialization | None = None
    update: Update | None = None
    decision: Decision | None = None
    generation_before: tuple[Answer, ...] = ()
    generation_after: tuple[Answer, ...] = ()
    log_probs: tuple[LogProbs, ...] = ()
    stages: tuple[Stage, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the arm was made and every check of it passed."""
        return self.decision is not None and self.decision.passed


class WorkerAck(Part):
    """One worker's word for one version."""

    worker_id: str
    version: int
    artifact_hash: str
    matching: bool
    digest: str | None


class Verdict(Part):
    """What the coordinator decided about one rollout of version 0 when version 1 was the update's."""

    rollout_id: str
    worker_id: str
    reward: float | None
    verdict: str
    state: str
    lag: int | None
    drift: float | None
    agrees_with_arm: bool = Field(description="whether the release arm's own admission says the same")


class CoordinatorResult(Part):
    """The release arm's version 1 and the eight rollouts, through a coordinator with two workers."""

    schema_version: Literal[1] = 1
    run_label: str
    arm: Literal["coordinator"] = "coordinator"
    status: Literal["done", "skipped"]
    reason: str | None = None
    created_at: datetime
    adapter_sha256: str | None = None
    acks: tuple[WorkerAck, ...] = ()
    activation_state: str | None = None
    activation_seconds: float | None = None
    active_version: int | None = None
    active_artifact_hash: str | None = None
    rollouts: tuple[Verdict, ...] = ()
    passed: bool = Field(
        False, description="both workers acked the one digest, the switch was made, all verdicts agree"
    )
    seconds: float | None = None


Result = TypeVar("Result", ArmResult, CoordinatorResult)


def now() -> datetime:
    """The time, for `created_at`."""
    return datetime.now(UTC).replace(microsecond=0)


def read_result(path: Path, kind: type[Result], label: str, arm: str) -> Result | None:
    """The result at `path`, None where there is none.

    Raises `ClosureError` for one of another schema version, label or arm, and for what is no result.
    """
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ClosureError(f"{path} is no result: {error}") from error
    for name, wanted in (("schema_version", SCHEMA_VERSION), ("run_label", label), ("arm", arm)):
        found = fields.get(name) if isinstance(fields, dict) else None
        if found != wanted:
            raise ClosureError(f"{path} has {name} {found!r}, not {wanted!r}: name another --label, or move it away")
    try:
        return kind.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise ClosureError(f"{path} is no result of schema version {SCHEMA_VERSION}: {error}") from error


def write_once(path: Path, result: ArmResult | CoordinatorResult) -> None:
    """Write a result where there is none; whole or not at all. Raises `ClosureError` if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", encoding="utf-8") as scratch:
        # By way of pydantic's own JSON, which writes null for what is not finite.
        scratch.write(json.dumps(json.loads(result.model_dump_json()), indent=1) + "\n")
        scratch.flush()
        os.fsync(scratch.fileno())
        os.chmod(scratch.name, 0o644)
        try:
            os.link(scratch.name, path)
        except FileExistsError as error:
            raise ClosureError(f"{path} exists: a result is never overwritten, name another --label") from error


def schema(kind: type[ArmResult] | type[CoordinatorResult]) -> str:
    """The JSON schema of a result, as docs/closure publishes it."""
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | kind.model_json_schema(), indent=1)
