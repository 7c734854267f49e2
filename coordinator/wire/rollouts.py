"""Rollouts and their rewards as JSON. The same columns as Arrow are in `coordinator.wire.columns`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from coordinator.wire.base import Identifier, Label, Message, Name, Sha256, Version, WireModel
from coordinator.wire.runs import GenerationContract

State = Literal[
    "generated",
    "rewarded",
    "reserved",
    "consumed",
    "generation_failed",
    "reward_failed",
    "quarantined",
    "offline",
]
Index = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]


class Span(WireModel):
    """Tokens [start, end) came from this policy version."""

    version: Version
    artifact_hash: Sha256
    start: Index
    end: Index


class Generation(WireModel):
    """Recorded beside the contract; not part of it."""

    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[Message, ...] | None = None
    finish_reason: Label | None = None
    engine: Label | None = None
    engine_version: Label | None = None


class RolloutIdentity(WireModel):
    """Everything that a rollout carries but its tokens."""

    rollout_id: Identifier
    task_id: Identifier
    task_source: Identifier
    group_id: Identifier
    sample_index: Index
    attempt: Index = 0
    spans: tuple[Span, ...] = Field(min_length=1, max_length=10_000)
    span_source: Literal["engine", "segmented", "dispatch"]
    worker_id: Name
    incarnation: Identifier
    contract: GenerationContract
    generation: Generation = Generation()


class Rollout(RolloutIdentity):
    """One trajectory with its whole identity.

    `token_ids`, `action_mask` and `behavior_log_probs` have one length; `behavior_log_probs[i]` scores
    `token_ids[i]` given everything before it; masked log-probs may be null.
    """

    token_ids: list[Annotated[int, Field(strict=True, ge=-(2**31), le=2**31 - 1)]] = Field(min_length=1)
    action_mask: list[Annotated[bool, Field(strict=True)]]
    behavior_log_probs: list[float | None]


class RolloutBatch(WireModel):
    """Rollouts to be taken in; each is answered by itself."""

    rollouts: list[Rollout] = Field(min_length=1, max_length=4096)


class ArrivalVerdict(WireModel):
    """What became of one rollout of a batch.

    `reason` is a gate's reason when the rollout was stored but may not be used, else the fault.
    """

    rollout_id: str | None
    verdict: Literal["accepted", "duplicate", "conflict", "rejected"]
    state: State | None = None
    revision: int | None = None
    reason: str | None = None
    detail: str | None = None


class ArrivalAnswer(WireModel):
    """One verdict for each rollout, in the order sent."""

    verdicts: list[ArrivalVerdict]


class Reward(WireModel):
    """A reward for one rollout under a named ruleset. A timeout or an error has no value, never 0.0."""

    rollout_id: Identifier
    status: Literal["ok", "timeout", "error"]
    value: float | None = None
    components: dict[Label, float] | None = None
    ruleset_id: Identifier
    ruleset_hash: Sha256
    message: Message | None = None


class RewardBatch(WireModel):
    """Rewards; each is answered by itself."""

    rewards: list[Reward] = Field(min_length=1, max_length=4096)


class RewardVerdict(WireModel):
    """What became of one reward."""

    rollout_id: str
    verdict: Literal[
        "stored",
        "recorded_failure",
        "duplicate",
        "conflict",
        "missing_rollout",
        "ruleset_conflict",
        "rejected",
    ]
    state: State | None = None
    revision: int | None = None
    detail: str | None = None


class RewardAnswer(WireModel):
    """One verdict for each reward, in the order sent."""

    verdicts: list[RewardVerdict]


class RolloutView(WireModel):
    """A rollout as it stands, without its tokens."""

    rollout_id: str
    task_id: str
    task_source: str
    group_id: str
    sample_index: int
    attempt: int
    state: State
    revision: int
    reason: str | None
    update_id: str | None
    worker_id: str
    incarnation: str
    spans: tuple[Span, ...]
    tokens: int
    action_tokens: int
    reward: float | None
    reward_status: Literal["ok", "timeout", "error"] | None
    ruleset_id: str | None
    content_hash: Sha256
    flags: tuple[str, ...]
    arrived_at: datetime


class RolloutList(WireModel):
    """Rollouts by id; `next_after` continues the list, none: it ended."""

    rollouts: list[RolloutView]
    next_after: str | None


class Transition(WireModel):
    """One change of a rollout's state."""

    revision: int
    event: str
    from_state: State | None
    to_state: State
    reason: str | None
    actor: str
    update_id: str | None
    lag: int | None
    drift: float | None
    max_lag: int | None
    max_drift: float | None
    at: datetime


class RolloutHistory(WireModel):
    """Every change of a rollout's state, oldest first."""

    rollout_id: str
    transitions: list[Transition]


class RolloutEvidence(WireModel):
    """The tokens of a rollout; null where a masked token's log-prob was not finite."""

    rollout_id: str
    token_ids: list[int]
    action_mask: list[bool]
    behavior_log_probs: list[float | None]
