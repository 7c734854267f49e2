"""Updates: one training step over one set of reserved rollouts."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from coordinator.wire.base import LARGEST_RESERVATION, Count, Flag, Identifier, Real, Sha256, Text, Version, WireModel

Owner = Annotated[Identifier, Field(description="the incarnation of the trainer process that owns the update")]


class OpenUpdate(WireModel):
    """Opens an update for weights that come from this policy version; the same call again may restate it.

    Without a version it is the active one at the first such call; the same call again leaves it as it is.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"required": ["policy_version"], "properties": {"policy_version": {"type": "integer"}}},
            "then": {"required": ["artifact_hash"], "properties": {"artifact_hash": {"type": "string"}}},
            "else": {"properties": {"artifact_hash": {"type": "null"}}},
        }
    )

    owner: Owner
    policy_version: Version | None = Field(
        None, description="the newest version that the weights come from; left out: the active one"
    )
    artifact_hash: Sha256 | None = Field(None, description="of policy_version; given exactly when that is")

    @model_validator(mode="after")
    def _whole_policy(self) -> OpenUpdate:
        if (self.policy_version is None) != (self.artifact_hash is None):
            raise ValueError("send policy_version and artifact_hash, or neither")
        return self


UpdateState = Literal["open", "committed", "aborted", "expired", "fenced", "rewound"]


class UpdateView(WireModel):
    """An update as it stands."""

    update_id: str
    state: UpdateState
    owner: str
    policy_version: int
    artifact_hash: Sha256
    after_commit_no: int | None
    commit_no: int | None
    reserved: int = Field(description="rollouts that it holds now")
    reason: str | None
    opened_at: datetime
    lease_until: datetime
    lease_seconds: float = Field(description="how long the lease is from its beginning and from each renewal")
    ended_at: datetime | None
    last_commit_no: int = Field(description="the last commit of the run's surviving line; 0: none")


class UpdateList(WireModel):
    """Updates in the order of their opening; `next_after` continues the list, none: it ended."""

    updates: list[UpdateView]
    next_after: str | None


class CandidatesRequest(WireModel):
    """Asks for whole groups that this update could reserve, and holds them for it."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"required": ["groups"], "properties": {"groups": {"type": "integer"}}},
            "then": {"properties": {"rollouts": {"type": "null"}}},
            "else": {"required": ["rollouts"], "properties": {"rollouts": {"type": "integer"}}},
            "allOf": [
                {
                    "if": {"required": ["reserve"], "properties": {"reserve": {"const": True}}},
                    "then": {"required": ["after_commit_no"], "properties": {"after_commit_no": {"type": "integer"}}},
                    "else": {"properties": {"after_commit_no": {"type": "null"}}},
                }
            ],
        }
    )

    owner: Owner
    groups: int | None = Field(None, strict=True, ge=1, le=4096, description="how many whole groups")
    rollouts: int | None = Field(
        None, strict=True, ge=1, le=16_384, description="in place of groups: whole groups until this many are reached"
    )
    wait_seconds: Real = Field(0, ge=0, le=3600, description="how long to wait for that many")
    reserve: bool = Field(
        False,
        strict=True,
        description="bind them in this call; for runs with drift_gate off. What the update already holds comes first, "
        "so that the call may be sent again",
    )
    after_commit_no: Count | None = Field(None, description="with reserve: the last commit that the weights contain")

    @model_validator(mode="after")
    def _one_measure(self) -> CandidatesRequest:
        if (self.groups is None) == (self.rollouts is None):
            raise ValueError("send groups or rollouts, one of the two")
        if self.reserve != (self.after_commit_no is not None):
            raise ValueError("reserve needs after_commit_no, and the other way round")
        return self


class CandidateRollout(WireModel):
    """A rollout that an update may reserve, with its evidence."""

    rollout_id: str
    revision: int = Field(description="name it in the reservation")
    group_id: str
    task_id: str
    task_source: str
    sample_index: int
    attempt: int
    policy_version: int = Field(description="of the oldest action token")
    lag: int = Field(description="of the oldest action token, to the update's policy version")
    reward: float
    token_ids: list[int]
    action_mask: list[bool] = Field(description="whether the policy chose the token")
    behavior_log_probs: list[float | None] = Field(description="as stored, float32; null (in Arrow NaN) if not finite")
    row_starts: list[int] = Field(description="where each training row begins")
    side_data: str | None = Field(description="in base64")


class EmptyReason(WireModel):
    """Why no candidate was there, and since when."""

    reason: Literal[
        "no_live_producers",
        "nothing_rewarded",
        "all_stale",
        "held_by_others",
        "groups_incomplete",
        "ahead_of_update",
        "other_contract",
        "other_ruleset",
    ]
    since: datetime | None


class ReserveVerdict(WireModel):
    """What became of one rollout."""

    rollout_id: str
    verdict: Literal[
        "missing_rollout",
        "idempotent_retry",
        "update_fenced",
        "revision_conflict",
        "not_rewarded",
        "contract_mismatch",
        "policy_withdrawn",
        "candidate_not_active",
        "future_policy",
        "stale_policy",
        "policy_drift",
        "group_refused",
        "reserved",
    ]
    state: str | None
    revision: int | None
    lag: int | None
    drift: float | None
    would_refuse: str | None = None


class Candidates(WireModel):
    """Whole groups, the oldest admissible first; `empty` says why there is none."""

    rollouts: list[CandidateRollout]
    groups: list[str]
    empty: EmptyReason | None
    contract_hash: Sha256 | None = Field(None, description="of the one generation contract that all of them share")
    reserved: list[ReserveVerdict] | None = Field(None, description="with reserve: one verdict for each, in order")


class ReserveItem(WireModel):
    """One rollout to bind: the revision seen, and the current policy's log-probs, as long as token_ids."""

    rollout_id: Identifier
    revision: Count = Field(description="the one that the candidates answer named")
    current_log_probs: Annotated[list[Real | None], Field(fail_fast=True)] | None = Field(
        None,
        description="of the update's weights before its first optimizer step: [i] scores token_ids[i]; "
        "finite where action_mask is true, else anything; left out only where the run's drift_gate is off",
    )
    use: Text | None = Field(None, max_length=100, description="kept for lineage: chosen, rejected, a pair id")


class ReserveRequest(WireModel):
    """Rollouts to bind to this update. Names every rewarded member of each group."""

    owner: Owner
    after_commit_no: Count = Field(description="the last commit that the weights contain; 0: none")
    confirm_drift: Flag = False
    rollouts: list[ReserveItem] = Field(min_length=1, max_length=LARGEST_RESERVATION, fail_fast=True)


class GroupVerdict(WireModel):
    """How many members of a group the update got, and the rewards of those that it did not."""

    group_id: str
    usable: int
    refused_rewards: dict[str, float]


class ReserveAnswer(WireModel):
    """One verdict for each rollout, in the order sent, and one for each group."""

    verdicts: list[ReserveVerdict]
    groups: list[GroupVerdict]


class Renew(WireModel):
    """Extends the lease by the run's lease time, from now."""

    owner: Owner


class Discard(WireModel):
    """A reserved rollout that was not used after all."""

    rollout_id: Identifier
    reason: Text = Field(min_length=1, max_length=200)


class CommitUpdate(WireModel):
    """Consumes everything that the update holds, once. One that holds nothing takes a number too: an optimizer step
    without rollouts is a place in the line like any other, and a checkpoint may name it."""

    owner: Owner
    after_commit_no: Count
    discards: list[Discard] = Field(default_factory=list, max_length=LARGEST_RESERVATION, fail_fast=True)


class AbortUpdate(WireModel):
    """Ends the update without consuming anything."""

    owner: Owner
    reason: Text = Field(min_length=1, max_length=500)
    quarantine: Flag = Field(False, description="quarantine what it holds instead of releasing it")


class LineageSpan(WireModel):
    """A policy version that produced tokens of a member."""

    version: int
    artifact_hash: Sha256


class LineageMember(WireModel):
    """A rollout that the update consumed or discarded, with everything that it came from."""

    rollout_id: str
    group_id: str
    outcome: Literal["reserved", "consumed", "discarded", "released", "quarantined"]
    use: str | None
    revision: int
    policies: tuple[LineageSpan, ...]
    worker_id: str | None = Field(description="none once retention left only the rollout's id")
    incarnation: str | None
    ruleset_id: str | None
    ruleset_hash: str | None
    reward: float | None
    lag: int
    drift: float | None = Field(description="mean |d log-prob| over action tokens")
    drift_max: float | None = Field(description="greatest |d log-prob|")
    drift_k3: float | None = Field(description="the k3 estimate of KL(behaviour, current)")
    drift_outside_share: float | None = Field(description="share of probability ratios outside [0.5, 2]")
    drift_sample_size: float | None = Field(description="effective sample size of the ratios, normalised to (0, 1]")
    would_refuse: str | None = Field(description="what a gate on observe would have refused it for")


class LineageRefusal(WireModel):
    """A rollout that the update asked for and did not get."""

    rollout_id: str
    group_id: str
    verdict: str
    lag: int | None
    drift: float | None


class Lineage(WireModel):
    """Where an update came from and what it led to."""

    update: UpdateView
    members: list[LineageMember]
    refusals: list[LineageRefusal]
    made_versions: list[int] = Field(description="policy versions that name this update")


class LineageUse(WireModel):
    """One update that bound rollouts of what was asked for."""

    update_id: str
    state: Literal["open", "committed", "rewound"]
    commit_no: int | None
    policy_version: int
    rollouts: int


class LineageUses(WireModel):
    """Updates, oldest first."""

    uses: list[LineageUse]
