"""Rollouts and their rewards as JSON. The same columns as Arrow are in `coordinator.wire.columns`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Base64Bytes, BeforeValidator, ConfigDict, Field, model_validator

from coordinator.rules.identity import canonical_json
from coordinator.wire.base import (
    LARGEST_BATCH,
    Flag,
    Identifier,
    Label,
    Message,
    Name,
    Real,
    Sha256,
    Version,
    WireModel,
)
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
RewardOutcome = Literal[
    "stored",
    "recorded_failure",
    "duplicate",
    "conflict",
    "missing_rollout",
    "ruleset_conflict",
    "rejected",
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

    seed: Annotated[int, Field(strict=True)] | None = None
    max_tokens: Annotated[int, Field(strict=True)] | None = None
    stop: Annotated[tuple[Message, ...], Field(fail_fast=True)] | None = None
    finish_reason: Label | None = None
    engine: Label | None = None
    engine_version: Label | None = None


def _few(components: Any) -> Any:
    # Before they are looked at one by one, since each that is wrong becomes an error of about 1.4 kB.
    if isinstance(components, dict) and len(components) > 1000:
        raise ValueError("more than 1000 components")
    return components


Components = Annotated[dict[Label, Real], Field(max_length=1000), BeforeValidator(_few)]


class ArrivalReward(WireModel):
    """A reward under a named ruleset. A timeout or an error has no value, never 0.0."""

    status: Literal["ok", "timeout", "error"]
    value: Real | None = None
    components: Components | None = None
    ruleset_id: Identifier
    ruleset_hash: Sha256
    message: Message | None = None


class RolloutIdentity(WireModel):
    """Everything that a rollout carries but its tokens and its side data."""

    rollout_id: Identifier
    task_id: Identifier
    task_source: Identifier
    group_id: Identifier = Field(description="the rollouts of one prompt; without effect in a run without group_size")
    sample_index: Index = Field(description="its place in the group, from 0")
    attempt: Index = Field(0, description="at this sample, from 0")
    spans: tuple[Span, ...] = Field(
        min_length=1,
        max_length=10_000,
        fail_fast=True,
        description="which version made which tokens: in order, without gap or overlap over the action tokens",
    )
    span_source: Literal["engine", "segmented", "dispatch"] = Field(
        description="who knows the spans. engine: it reported the version of each token itself; segmented: the agent "
        "cut the generation where it changed the weights; dispatch: one span, the version that served when the "
        "request was sent"
    )
    worker_id: Name
    incarnation: Identifier
    contract: GenerationContract
    generation: Generation = Generation()
    side_data_digest: Sha256 | None = Field(None, description="of side_data; given exactly when that is")
    row_starts: tuple[Index, ...] = Field(
        (0,),
        min_length=1,
        max_length=10_000,
        description="where each training row begins; a rollout that rewrites its context holds several, end to end",
    )
    reward: ArrivalReward | None = Field(None, description="only where the run has reward_on_arrival")

    def hashed(self) -> dict[str, Any]:
        """What takes part in the content hash: all but the reward, and nothing for what was left out."""
        fields = self.model_dump(mode="json", exclude={"reward"})
        if self.side_data_digest is None:
            del fields["side_data_digest"]
        if self.row_starts == (0,):
            del fields["row_starts"]
        return fields

    def hashed_json(self, nested: dict[int, str]) -> bytes:
        """The canonical JSON of `hashed()`, put together by hand: each arrival needs one.

        Identifiers, names and hashes hold nothing that JSON escapes. `nested` remembers the JSON of contracts and
        generations by their `id()`, for as long as the caller keeps them.
        """
        contract, generation = self.contract, self.generation
        for model in (contract, generation):
            if id(model) not in nested:
                nested[id(model)] = canonical_json(model.model_dump(mode="json")).decode()
        spans = ",".join(
            f'{{"artifact_hash":"{s.artifact_hash}","end":{s.end},"start":{s.start},"version":{s.version}}}'
            for s in self.spans
        )
        rows = "" if self.row_starts == (0,) else f'"row_starts":[{",".join(map(str, self.row_starts))}],'
        digest = f'"side_data_digest":"{self.side_data_digest}",' if self.side_data_digest is not None else ""
        return (
            f'{{"attempt":{self.attempt},"contract":{nested[id(contract)]},"generation":{nested[id(generation)]},'
            f'"group_id":"{self.group_id}","incarnation":"{self.incarnation}","rollout_id":"{self.rollout_id}",{rows}'
            f'"sample_index":{self.sample_index},{digest}"span_source":"{self.span_source}","spans":[{spans}],'
            f'"task_id":"{self.task_id}","task_source":"{self.task_source}","worker_id":"{self.worker_id}"}}'
        ).encode()


class Rollout(RolloutIdentity):
    """One trajectory with its whole identity.

    `token_ids`, `action_mask` and `behavior_log_probs` have one length; `behavior_log_probs[i]` scores
    `token_ids[i]` given everything before it; masked log-probs may be null.
    """

    token_ids: list[Annotated[int, Field(strict=True, ge=-(2**31), le=2**31 - 1)]] = Field(
        min_length=1, fail_fast=True, description="prompt and response, one sequence; each in [0, vocab_size)"
    )
    action_mask: list[Flag] = Field(
        fail_fast=True,
        description="whether the policy chose the token; false for prompts, tool output and where a row starts",
    )
    behavior_log_probs: list[Real | None] = Field(
        fail_fast=True,
        description="[i] scores token_ids[i] given all before it; finite where action_mask is true, else anything",
    )
    side_data: Base64Bytes | None = Field(None, description="one opaque blob, in base64: routed experts, image refs")


class RolloutBatch(WireModel):
    """Rollouts to be taken in; each is answered by itself."""

    rollouts: list[Rollout] = Field(min_length=1, max_length=LARGEST_BATCH, fail_fast=True)


class ArrivalVerdict(WireModel):
    """What became of one rollout of a batch.

    `reason` is a gate's reason when the rollout was stored but may not be used, else the fault. `detail` says more of
    the fault, or that a run without group_size took the rollout as a group of its own.
    """

    rollout_id: str | None
    verdict: Literal["accepted", "duplicate", "conflict", "rejected"]
    state: State | None = None
    revision: int | None = None
    reason: str | None = None
    detail: str | None = None
    reward: RewardOutcome | None = Field(None, description="what became of the reward that came with it")


class ArrivalAnswer(WireModel):
    """One verdict for each rollout, in the order sent."""

    verdicts: list[ArrivalVerdict]


class Reward(ArrivalReward):
    """A reward for one rollout under a named ruleset. A timeout or an error has no value, never 0.0."""

    rollout_id: Identifier


class RewardBatch(WireModel):
    """Rewards; each is answered by itself."""

    rewards: list[Reward] = Field(min_length=1, max_length=LARGEST_BATCH, fail_fast=True)


class RewardVerdict(WireModel):
    """What became of one reward."""

    rollout_id: str
    verdict: RewardOutcome
    state: State | None = None
    revision: int | None = None
    detail: str | None = None


class RewardAnswer(WireModel):
    """One verdict for each reward, in the order sent."""

    verdicts: list[RewardVerdict]


class RescoredReward(WireModel):
    """The new reward of one member: a finite value, or components whose sum it is."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"required": ["value"], "properties": {"value": {"type": "number"}}},
            "else": {
                "required": ["components"],
                "properties": {"components": {"type": "object", "minProperties": 1}},
            },
        }
    )

    rollout_id: Identifier
    value: Real | None = None
    components: Components | None = None


class Rescore(WireModel):
    """Replaces the rewards of a whole group that no update holds. Names every member that has a good reward."""

    group_id: Identifier
    ruleset_id: Identifier
    ruleset_hash: Sha256
    rewards: list[RescoredReward] = Field(min_length=1, max_length=4096)


class RescoreVerdict(WireModel):
    """What became of one member's reward."""

    rollout_id: str
    verdict: Literal["rescored", "duplicate"]
    state: State
    revision: int


class RescoreAnswer(WireModel):
    """One verdict for each member, in the order sent."""

    verdicts: list[RescoreVerdict]


class GenerationFailure(WireModel):
    """An attempt at a rollout that gave no tokens. It settles its member of the group at the last attempt."""

    rollout_id: Identifier
    task_id: Identifier
    task_source: Identifier
    group_id: Identifier
    sample_index: Index
    attempt: Index = 0
    worker_id: Name
    incarnation: Identifier
    kind: Label = Field("error", min_length=1, description="timeout, out_of_memory, aborted: the reporter's word")
    message: Message


class GenerationFailureBatch(WireModel):
    """Failed attempts; each is answered by itself."""

    failures: list[GenerationFailure] = Field(min_length=1, max_length=4096)


class Release(WireModel):
    """What to release from quarantine: by id, or everything that one update quarantined for one reason."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"required": ["rollout_ids"], "properties": {"rollout_ids": {"type": "array"}}},
            "then": {"properties": {"update_id": {"type": "null"}, "reason": {"type": "null"}}},
            "else": {
                "required": ["update_id", "reason"],
                "properties": {"update_id": {"type": "string"}, "reason": {"type": "string"}},
            },
        }
    )

    rollout_ids: list[Identifier] | None = Field(None, min_length=1, max_length=4096)
    update_id: Identifier | None = None
    reason: Label | None = Field(None, description="that they were quarantined for: policy_drift, update_aborted")

    @model_validator(mode="after")
    def _one_way(self) -> Release:
        if (self.rollout_ids is None) == (self.update_id is None) or (self.update_id is None) != (self.reason is None):
            raise ValueError("send rollout_ids, or update_id and reason")
        return self


class ReleaseVerdict(WireModel):
    """What became of one rollout. `stays`: an arrival check still refuses it, for `reason`."""

    rollout_id: str
    verdict: Literal["released", "set_aside", "stays", "not_releasable", "missing_rollout"]
    state: State | None = None
    revision: int | None = None
    reason: str | None = None


class ReleaseAnswer(WireModel):
    """One verdict for each rollout, sorted by id; siblings that were released with a refused member included."""

    verdicts: list[ReleaseVerdict]


class QuarantineEntry(WireModel):
    """Rollouts that are in quarantine for one reason, put there by one update or by none."""

    reason: str
    update_id: str | None = Field(description="release them by update_id and reason; none: by their ids")
    rollouts: int
    since: datetime = Field(description="when the first of them was quarantined")
    until: datetime = Field(description="when the last of them was")


class Quarantine(WireModel):
    """What is in quarantine, what was put there last first."""

    entries: list[QuarantineEntry]


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
    span_source: Literal["engine", "segmented", "dispatch"]
    generation: Generation
    tokens: int
    action_tokens: int
    contract_hash: Sha256 | None = Field(description="none where the generation failed")
    row_starts: tuple[int, ...]
    side_data_digest: Sha256 | None
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


class AuditEntry(Transition):
    """One change of one rollout's state."""

    rollout_id: str


class Audit(WireModel):
    """Changes of rollouts, oldest first. `next_after` continues; no entries: nothing newer is settled yet."""

    entries: list[AuditEntry]
    next_after: str


class RolloutHistory(WireModel):
    """Every change of a rollout's state, oldest first."""

    rollout_id: str
    transitions: list[Transition]


class RolloutEvidence(WireModel):
    """The tokens of a rollout; null where a masked token's log-prob was not finite."""

    rollout_id: str
    token_ids: list[int]
    action_mask: list[bool] = Field(description="whether the policy chose the token")
    behavior_log_probs: list[float | None] = Field(description="as stored, float32; null (in Arrow NaN) if not finite")
    row_starts: tuple[int, ...] = Field(description="where each training row begins")
    side_data: str | None = Field(None, description="in base64")
    side_data_digest: Sha256 | None = None


class MeasuredDifferences(WireModel):
    """How far each token's log-prob had moved, as an update measured it: d = log pi_current - log pi_behaviour.

    As stored, float16: right to one part in 2048, within -65504 and 65504.
    """

    update_id: str = Field(description="the update that measured it")
    revision: int = Field(description="the revision that it saw")
    verdict: str = Field(description="what became of the rollout in this update")
    drift: float = Field(description="mean |d| over action tokens, measured in float64")
    at: datetime
    differences: list[float | None] = Field(description="d of token_ids[i] at [i]; null where the token is masked")


class RolloutDifferences(WireModel):
    """What each update that measured the rollout found, the first one first; none: no update has measured it."""

    rollout_id: str
    measured: list[MeasuredDifferences] = Field(description="by update, and by the revision that it saw")


class EvidenceRequest(WireModel):
    """The rollouts whose tokens are wanted."""

    rollout_ids: list[Identifier] = Field(min_length=1, max_length=4096)


class EvidenceAnswer(WireModel):
    """The tokens of those that are stored, in the order asked; `missing` have no tokens here, or no more."""

    rollouts: list[RolloutEvidence]
    missing: list[str]
