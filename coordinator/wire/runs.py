"""Runs: one experiment, one line of policy versions, one admission rule."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from coordinator.wire.base import Label, Name, Real, Sha256, Version, WireModel
from coordinator.wire.policies import BaseModelIdentity, PolicyRef

Gate = Literal["enforce", "observe"]
Seconds = Annotated[Real, Field(gt=0, le=7 * 24 * 3600)]
Retention = Annotated[Real, Field(gt=0, le=10 * 366 * 24 * 3600)]


class RunSettings(WireModel):
    """The admission rule and the clocks of a run, fixed at its creation. Durations are seconds."""

    max_lag: int = Field(4, strict=True, ge=0, le=1_000_000, description="greatest admissible lag, in policy versions")
    max_drift: Real = Field(0.2, ge=0, description="greatest admissible mean |d log-prob| over action tokens")
    lag_gate: Gate = Field("enforce", description="observe: a stale rollout is recorded as would_refuse, not refused")
    drift_gate: Literal["enforce", "observe", "off"] = Field(
        "enforce", description="observe: recorded as would_refuse; off: no current log-probs are asked for"
    )
    stale_to: Literal["offline", "quarantined"] = Field("offline", description="where a stale rollout goes")
    group_size: int | None = Field(
        None,
        strict=True,
        ge=1,
        le=4096,
        description="members of a group; none: every rollout is a group of its own under its rollout_id, whatever "
        "group_id it names",
    )
    max_attempts: int = Field(1, strict=True, ge=1, le=1000, description="attempts at one member of a group")
    min_usable: Annotated[int, Field(strict=True)] | Literal["all"] | None = Field(
        None, description="members that must be admissible; default 2, or the group size if smaller"
    )
    groups_per_update: int | None = Field(
        None, strict=True, ge=1, description="groups that one update takes; sets the capacity for tickets"
    )
    required_caches: tuple[Label, ...] = Field(
        (), fail_fast=True, description="caches that every ack must say it reset"
    )
    activation: Literal["last_ack", "by_hand"] = Field(
        "last_ack",
        description="what makes the switch. last_ack: the ack (or the artifact's commit) that completes what it needs; "
        "by_hand: the call activate, for which a complete set waits",
    )
    on_lost: Literal["block", "drop"] = Field(
        "block",
        description="a required worker that is lost blocks the activation until its deadline, or is dropped with a "
        "record, as are fenced ones, and at the deadline all that did not confirm",
    )
    min_workers: int = Field(
        1, strict=True, ge=1, le=1_000_000, description="with on_lost drop: how many must remain, or have confirmed"
    )
    on_expiry: Literal["release", "quarantine"] = Field("release", description="what an expired lease does")
    other_contract: Literal["reject", "keep_apart"] = Field(
        "reject", description="keep_apart: rollouts of another generation contract are stored under their own hash"
    )
    mix_rulesets: bool = Field(True, strict=True, description="false: an update holds rewards of one ruleset only")
    reward_on_arrival: bool = Field(False, strict=True, description="a worker may send the reward with the rollout")
    storage_limit_bytes: int | None = Field(
        None, strict=True, ge=1, le=2**53, description="stored evidence beyond which arrivals are answered 429"
    )
    evidence_retention_seconds: Retention | None = Field(
        None, description="how long what is consumed, quarantined or offline keeps its tokens; none: for ever"
    )
    rollout_retention_seconds: Retention | None = Field(
        None, description="how long it keeps its row, before only the tombstone of its id is left; none: for ever"
    )
    artifact_retention_seconds: Retention | None = Field(
        None,
        description="how long after its end a policy version keeps its files, unless something still needs them; "
        "none: for ever",
    )
    rewind_commits: int = Field(
        100, strict=True, ge=0, le=1_000_000, description="commits back that a rewind may go, kept from retention"
    )
    update_lease_seconds: Seconds = Field(
        120,
        description="how long an update stays open after it was opened or last renewed; then it is expired, and what "
        "it holds fares as on_expiry says",
    )
    hold_seconds: Seconds = Field(
        60, description="how long candidates stay hidden from other updates after they were offered to one"
    )
    heartbeat_seconds: Seconds = Field(15, description="how often a worker is asked to send a heartbeat")
    lost_after_seconds: Seconds = Field(
        60,
        description="silence after which a worker counts as lost: it is not required by activations that open then, "
        "and does not count as a live producer",
    )
    activation_deadline_seconds: Seconds = Field(
        300, description="how long an activation may stay open before it fails and the old version stays active"
    )
    group_deadline_seconds: Seconds = Field(
        900, description="from a group's first arrival, after which it is ready without the members that are missing"
    )
    ticket_seconds: Seconds = Field(
        600, description="how long a ticket counts as capacity taken unless a rollout of its group arrives"
    )
    longest_wait_seconds: Seconds = Field(
        60, description="the most that a waiting call (watch, candidates) waits, whatever it asks for"
    )

    @model_validator(mode="after")
    def _usable_within_group(self) -> RunSettings:
        size = self.group_size or 1
        if isinstance(self.min_usable, int) and not 1 <= self.min_usable <= size:
            raise ValueError(f"min_usable must be between 1 and the group size {size}")
        rows, evidence = self.rollout_retention_seconds, self.evidence_retention_seconds
        if rows is not None and evidence is not None and evidence > rows:
            raise ValueError("evidence_retention_seconds must not be longer than rollout_retention_seconds")
        return self

    @property
    def usable_needed(self) -> int:
        """Members of a group that must be admissible for it to enter an update."""
        size = self.group_size or 1
        if self.min_usable == "all":
            return size
        return self.min_usable if self.min_usable is not None else min(2, size)


class GenerationContract(WireModel):
    """How the tokens were made. Two rollouts of one update share one contract."""

    tokenizer_hash: Sha256
    chat_template_hash: Sha256
    temperature: Real = Field(ge=0, description="of the sampling; 0: greedy")
    top_p: Real = Field(gt=0, le=1, description="1: off")
    top_k: int = Field(0, strict=True, ge=0, description="0: off")
    min_p: Real = Field(0.0, ge=0, le=1, description="0: off")
    logprobs_mode: Literal["raw", "processed"] = Field(
        description="which distribution the log-probs are of. raw: the model's own logits, before temperature, top_p, "
        "top_k and min_p (vLLM's default); processed: the one that was sampled from, after them (verl's)"
    )
    dtype: Literal["float32", "bfloat16", "float16", "float8"] = Field(
        description="of the weights in the engine that generated"
    )


class FirstPolicy(WireModel):
    """The version that a run begins with: the base model itself, without files."""

    version: Version = 0
    base_model: BaseModelIdentity


class CreateRun(WireModel):
    """A new run with its admission rule, generation contract and first policy version."""

    run_id: Name
    settings: RunSettings = RunSettings()
    contract: GenerationContract
    vocab_size: int = Field(strict=True, ge=1, le=2**31 - 1, description="token ids lie in [0, vocab_size)")
    policy: FirstPolicy


class RunView(WireModel):
    """A run as it stands."""

    run_id: str
    settings: RunSettings
    contract: GenerationContract
    contract_hash: Sha256
    vocab_size: int
    active: PolicyRef
    last_commit_no: int = Field(description="the last commit of the surviving line; 0: none")
    event_no: int = Field(description="the number of the newest event of the run")
    created_at: datetime


class RunList(WireModel):
    """Runs in the order of their creation."""

    runs: list[RunView]


class RunCounts(WireModel):
    """How many rollouts are in each state."""

    rollouts: dict[str, int]
    evidence_bytes: int = Field(description="bytes of stored tokens, masks, log-probs and side data")


class JournalEntry(WireModel):
    """One change of a run that is not a rollout's, numbered without holes."""

    event_no: int
    event: str
    subject: str
    actor: str
    at: datetime
    detail: dict[str, object]


class Journal(WireModel):
    """Entries after the one that was asked for, oldest first."""

    entries: list[JournalEntry]
    next_after: int


Stage = Literal["generation", "reward", "update", "artifact", "distribution", "activation"]


class FailureView(WireModel):
    """One recorded failure; attempts add up and never overwrite."""

    failure_no: int
    stage: Stage
    kind: str
    message: str
    actor: str
    at: datetime
    rollout_id: str | None = None
    update_id: str | None = None
    version: int | None = None
    worker_id: str | None = None


class FailureList(WireModel):
    """Failures of a run in the order that was asked for."""

    failures: list[FailureView]
    next_after: int
