"""Every table. Each key begins with the run, so that the tables can be partitioned by it.

Hot rows (`rollouts`, `groups`) are narrow and are updated; evidence, audit and bindings are only ever inserted.
There is no foreign key from rollouts to parent rows that others lock. Triggers on `rollouts` write what changed in
the number of rollouts by state to `count_deltas` (see the migrations); a sweeper folds these into `counts`.
"""

from __future__ import annotations

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from coordinator.rules.lifecycle import State

metadata = MetaData(
    naming_convention={
        "ix": "%(table_name)s_%(column_0_N_name)s",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s",
        "pk": "%(table_name)s_pkey",
    }
)


def _one_of(column: str, *values: str) -> str:
    return f"{column} IN ({', '.join(repr(v) for v in values)})"


def _at(name: str, *, nullable: bool = False, now: bool = False) -> Column[object]:
    default = func.clock_timestamp() if now else None
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=default)


STATES = tuple(str(state.value) for state in State)

tokens = Table(
    "tokens",
    metadata,
    Column("token_id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("role", Text, nullable=False),
    Column("run_id", Text),
    Column("worker_id", Text),
    Column("secret_hash", LargeBinary, nullable=False),
    _at("created_at", now=True),
    _at("expires_at", nullable=True),
    _at("revoked_at", nullable=True),
    _at("last_used_at", nullable=True),
    CheckConstraint(_one_of("role", "admin", "trainer", "worker", "reward", "viewer"), name="role"),
    CheckConstraint("(role = 'worker') = (worker_id IS NOT NULL)", name="worker_bound"),
)

runs = Table(
    "runs",
    metadata,
    Column("run_no", Integer, Identity(always=True), primary_key=True),
    Column("run_id", Text, nullable=False, unique=True),
    Column("settings", JSONB, nullable=False),
    Column("contract", JSONB, nullable=False),
    Column("contract_hash", Text, nullable=False),
    Column("vocab_size", Integer, nullable=False),
    Column("active_version", Integer, nullable=False),
    Column("commits", Integer, nullable=False, server_default=text("0")),
    Column("last_commit_no", Integer, nullable=False, server_default=text("0")),
    Column("event_no", BigInteger, nullable=False, server_default=text("0")),
    _at("created_at", now=True),
    CheckConstraint("last_commit_no <= commits", name="line"),
)

journal = Table(
    "journal",
    metadata,
    Column("run_no", Integer),
    Column("event_no", BigInteger),
    Column("event", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("detail", JSONB, nullable=False),
    _at("at", now=True),
    PrimaryKeyConstraint("run_no", "event_no"),
    Index("journal_subject", "run_no", "subject", "event_no"),
)

failures = Table(
    "failures",
    metadata,
    Column("run_no", Integer),
    Column("failure_no", BigInteger, Identity(always=True)),
    Column("stage", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("rollout_id", Text),
    Column("update_id", Text),
    Column("version", Integer),
    Column("worker_id", Text),
    _at("at", now=True),
    PrimaryKeyConstraint("run_no", "failure_no"),
    CheckConstraint(
        _one_of("stage", "generation", "reward", "update", "artifact", "distribution", "activation"),
        name="stage",
    ),
)

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("run_no", Integer),
    Column("version", Integer),
    Column("artifact_hash", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("parent_version", Integer),
    Column("rollback_version", Integer),
    Column("lag_clock", Integer, nullable=False),
    Column("base_model", JSONB, nullable=False),
    Column("files", JSONB, nullable=False),
    Column("uri", Text),
    Column("updates", ARRAY(Text), nullable=False),
    Column("digests", JSONB, nullable=False, server_default=text("'{}'")),
    _at("prepared_at", now=True),
    _at("committed_at", nullable=True),
    _at("activated_at", nullable=True),
    _at("ended_at", nullable=True),
    # Removed for whoever asks; gone from the store, as far as no other version has the same bytes.
    _at("files_removed_at", nullable=True),
    Column("files_gone", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("run_no", "version"),
    CheckConstraint(
        _one_of("state", "prepared", "committed", "active", "retired", "abandoned", "withdrawn"), name="state"
    ),
    CheckConstraint("state NOT IN ('active', 'retired') OR activated_at IS NOT NULL", name="activated"),
    CheckConstraint("state = 'prepared' OR committed_at IS NOT NULL OR ended_at IS NOT NULL", name="committed"),
    CheckConstraint("files_removed_at IS NULL OR state NOT IN ('prepared', 'active')", name="files_kept"),
    Index("policy_versions_one_active", "run_no", unique=True, postgresql_where=text("state = 'active'")),
    # Who else has a file of this hash?
    Index("policy_versions_files", "files", postgresql_using="gin", postgresql_ops={"files": "jsonb_path_ops"}),
    Index(
        "policy_versions_files_going",
        "run_no",
        "version",
        postgresql_where=text("files_removed_at IS NOT NULL AND NOT files_gone"),
    ),
)

# The wish to commit a large artifact. Whoever reads its files holds the claim and renews it.
verifications = Table(
    "verifications",
    metadata,
    Column("run_no", Integer),
    Column("version", Integer),
    Column("state", Text, nullable=False, server_default=text("'running'")),
    Column("actor", Text, nullable=False),
    Column("bytes_done", BigInteger, nullable=False, server_default=text("0")),
    Column("bytes_total", BigInteger, nullable=False),
    Column("faulty", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("claimed_by", Text),
    _at("claimed_until", nullable=True),
    _at("asked_at", now=True),
    _at("ended_at", nullable=True),
    PrimaryKeyConstraint("run_no", "version"),
    CheckConstraint(_one_of("state", "running", "refused", "passed"), name="state"),
    CheckConstraint("(state = 'running') = (ended_at IS NULL)", name="ended"),
    CheckConstraint("(claimed_by IS NULL) = (claimed_until IS NULL)", name="claimed"),
    Index("verifications_running", "claimed_until", postgresql_where=text("state = 'running'")),
)

activations = Table(
    "activations",
    metadata,
    Column("run_no", Integer),
    Column("activation_id", Text),
    Column("version", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("asked_workers", ARRAY(Text)),
    Column("reason", Text),
    _at("asked_at", now=True),
    _at("opened_at", nullable=True),
    _at("deadline_at", nullable=True),
    _at("ended_at", nullable=True),
    PrimaryKeyConstraint("run_no", "activation_id"),
    CheckConstraint(_one_of("state", "waiting", "open", "succeeded", "failed", "given_up", "superseded"), name="state"),
    CheckConstraint("(state IN ('waiting', 'open')) = (ended_at IS NULL)", name="ended"),
    CheckConstraint("(opened_at IS NULL) = (deadline_at IS NULL)", name="deadline"),
    CheckConstraint("state NOT IN ('open', 'succeeded') OR opened_at IS NOT NULL", name="opened"),
    Index("activations_one_open", "run_no", unique=True, postgresql_where=text("state = 'open'")),
    Index("activations_one_waiting", "run_no", unique=True, postgresql_where=text("state = 'waiting'")),
)

rollbacks = Table(
    "rollbacks",
    metadata,
    Column("run_no", Integer),
    Column("rollback_id", Text),
    Column("to_version", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("answer", JSONB, nullable=False),
    _at("at", now=True),
    PrimaryKeyConstraint("run_no", "rollback_id"),
)

activation_workers = Table(
    "activation_workers",
    metadata,
    Column("run_no", Integer),
    Column("activation_id", Text),
    Column("worker_id", Text),
    Column("incarnation", Text, nullable=False),
    _at("dropped_at", nullable=True),
    Column("dropped_reason", Text),
    Column("ended_as", JSONB),
    PrimaryKeyConstraint("run_no", "activation_id", "worker_id"),
)

workers = Table(
    "workers",
    metadata,
    Column("run_no", Integer),
    Column("worker_id", Text),
    Column("incarnation", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("engine_version", Text, nullable=False),
    Column("draining", Boolean, nullable=False, server_default=text("false")),
    Column("fenced_reason", Text),
    _at("registered_at", now=True),
    _at("heartbeat_at", now=True),
    _at("asleep_until", nullable=True),
    Column("must_ack_active", Boolean, nullable=False, server_default=text("false")),
    _at("deregistered_at", nullable=True),
    PrimaryKeyConstraint("run_no", "worker_id"),
)

incarnations = Table(
    "incarnations",
    metadata,
    Column("run_no", Integer),
    Column("worker_id", Text),
    Column("incarnation", Text),
    _at("registered_at", now=True),
    PrimaryKeyConstraint("run_no", "worker_id", "incarnation"),
)

acks = Table(
    "acks",
    metadata,
    Column("run_no", Integer),
    Column("worker_id", Text),
    Column("incarnation", Text),
    Column("version", Integer),
    Column("artifact_hash", Text, nullable=False),
    Column("matching", Boolean, nullable=False),
    Column("detail", Text),
    Column("digest_layout", Text),
    Column("digest_registered", Text),
    Column("digest_active", Text),
    Column("caches_reset", ARRAY(Text), nullable=False),
    Column("activation_id", Text),
    _at("acked_at", now=True),
    PrimaryKeyConstraint("run_no", "worker_id", "incarnation", "version"),
)

rulesets = Table(
    "rulesets",
    metadata,
    Column("run_no", Integer),
    Column("ruleset_no", Integer, Identity(always=True)),
    Column("ruleset_id", Text, nullable=False),
    Column("ruleset_hash", Text, nullable=False),
    PrimaryKeyConstraint("run_no", "ruleset_no"),
    UniqueConstraint("run_no", "ruleset_id", "ruleset_hash"),
)

contracts = Table(
    "contracts",
    metadata,
    Column("run_no", Integer),
    Column("contract_no", Integer, Identity(always=True)),
    Column("contract_hash", Text, nullable=False),
    Column("contract", JSONB, nullable=False),
    PrimaryKeyConstraint("run_no", "contract_no"),
    UniqueConstraint("run_no", "contract_hash"),
)

groups = Table(
    "groups",
    metadata,
    Column("run_no", Integer),
    Column("group_id", Text),
    Column("state", Text, nullable=False, server_default=text("'open'")),
    Column("contract_no", Integer),
    Column("ruleset_no", Integer),
    Column("rewarded", Integer, nullable=False, server_default=text("0")),
    Column("settled", Boolean, nullable=False, server_default=text("false")),
    Column("bound", Boolean, nullable=False, server_default=text("false")),
    Column("oldest_clock", Integer),
    Column("freshest_clock", Integer),
    Column("newest_clock", Integer),
    Column("held_by", Text),
    _at("held_until", nullable=True),
    _at("first_arrival_at", now=True),
    _at("deadline_at"),
    PrimaryKeyConstraint("run_no", "group_id"),
    CheckConstraint(_one_of("state", "open", "refused", "spent"), name="state"),
    Index("groups_open", "run_no", "oldest_clock", "first_arrival_at", postgresql_where=text("state = 'open'")),
    postgresql_with={"fillfactor": "70"},
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("run_no", Integer),
    Column("rollout_id", Text),
    Column("group_id", Text, nullable=False),
    Column("sample_index", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("reason", Text),
    Column("update_id", Text),
    Column("worker_id", Text, nullable=False),
    Column("incarnation", Text, nullable=False),
    Column("contract_no", Integer),
    Column("versions", ARRAY(Integer), nullable=False),
    Column("oldest_clock", Integer),
    Column("newest_clock", Integer),
    Column("newest_version", Integer),
    Column("reward", Double),
    Column("reward_status", Text),
    Column("ruleset_no", Integer),
    Column("content_hash", LargeBinary, nullable=False),
    _at("arrived_at", now=True),
    PrimaryKeyConstraint("run_no", "rollout_id"),
    UniqueConstraint("run_no", "group_id", "sample_index", "attempt"),
    CheckConstraint(_one_of("state", *STATES), name="state"),
    CheckConstraint("(state IN ('reserved', 'consumed')) = (update_id IS NOT NULL)", name="bound"),
    CheckConstraint(
        "state NOT IN ('rewarded', 'reserved', 'consumed') OR (reward IS NOT NULL AND reward_status = 'ok')",
        name="rewarded",
    ),
    CheckConstraint("state <> 'generated' OR reward_status IS NULL", name="unrewarded"),
    CheckConstraint(
        "(reward IS NOT NULL) = (reward_status IS NOT NULL AND reward_status = 'ok')",
        name="no_value_without_ok",
    ),
    CheckConstraint(_one_of("reward_status", "ok", "timeout", "error"), name="reward_status"),
    CheckConstraint("state NOT IN ('quarantined', 'offline') OR reason IS NOT NULL", name="reason"),
    CheckConstraint("(contract_no IS NULL) = (state = 'generation_failed')", name="contract"),
    # On columns that never change, so that a change of state stays a heap-only update.
    Index("rollouts_arrived", "run_no", "arrived_at"),
    postgresql_with={"fillfactor": "70"},
)

rollout_evidence = Table(
    "rollout_evidence",
    metadata,
    Column("run_no", Integer),
    Column("rollout_id", Text),
    Column("task_id", Text, nullable=False),
    Column("task_source", Text, nullable=False),
    Column("span_versions", ARRAY(Integer), nullable=False),
    Column("span_hashes", ARRAY(Text), nullable=False),
    Column("span_starts", ARRAY(Integer), nullable=False),
    Column("span_ends", ARRAY(Integer), nullable=False),
    Column("span_source", Text, nullable=False),
    Column("generation", JSONB, nullable=False),
    Column("flags", ARRAY(Text), nullable=False),
    Column("action_tokens", Integer, nullable=False),
    Column("token_ids", LargeBinary),
    Column("action_mask", LargeBinary),
    Column("behavior_log_probs", LargeBinary),
    Column("side_data", LargeBinary),
    Column("side_data_digest", Text),
    Column("row_starts", ARRAY(Integer)),
    Column("tokens", Integer, nullable=False),
    _at("arrived_at", now=True),
    PrimaryKeyConstraint("run_no", "rollout_id"),
    CheckConstraint(
        "(token_ids IS NULL) = (action_mask IS NULL) AND (token_ids IS NULL) = (behavior_log_probs IS NULL)",
        name="whole",
    ),
    # Retention walks this: what still has its tokens, oldest first.
    Index("rollout_evidence_kept", "run_no", "arrived_at", postgresql_where=text("token_ids IS NOT NULL")),
    # Rows up to a page stay whole, which is faster than TOAST at 2 to 8 KB. Longer columns are not compressed (the
    # migration sets their storage): token ids and log-probs hardly shrink, and the trying costs more than the rest.
    postgresql_with={"toast_tuple_target": "8160"},
)

tombstones = Table(
    "tombstones",
    metadata,
    Column("run_no", Integer),
    Column("rollout_id", Text),
    Column("group_id", Text, nullable=False),
    Column("sample_index", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("content_hash", LargeBinary, nullable=False),
    _at("dropped_at", now=True),
    PrimaryKeyConstraint("run_no", "rollout_id"),
    UniqueConstraint("run_no", "group_id", "sample_index", "attempt"),
)

counts = Table(
    "counts",
    metadata,
    Column("run_no", Integer),
    Column("name", Text),
    Column("n", BigInteger, nullable=False),
    PrimaryKeyConstraint("run_no", "name"),
)

# Inserted by whoever changes a number, so that nobody waits for a common row; the sweeper folds them.
count_deltas = Table(
    "count_deltas",
    metadata,
    Column("run_no", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("delta", BigInteger, nullable=False),
)

rewards = Table(
    "rewards",
    metadata,
    Column("run_no", Integer),
    Column("rollout_id", Text),
    Column("reward_no", BigInteger, Identity(always=True)),
    Column("value", Double, nullable=False),
    Column("components", JSONB),
    Column("ruleset_no", Integer, nullable=False),
    Column("actor", Text, nullable=False),
    _at("at", now=True),
    PrimaryKeyConstraint("run_no", "rollout_id", "reward_no"),
)

rollout_audit = Table(
    "rollout_audit",
    metadata,
    Column("run_no", Integer),
    Column("rollout_id", Text),
    Column("revision", Integer),
    Column("event", Text, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text, nullable=False),
    Column("reason", Text),
    Column("actor", Text, nullable=False),
    Column("update_id", Text),
    Column("contract_hash", Text),
    Column("lag", Integer),
    Column("drift", Double),
    Column("max_lag", Integer),
    Column("max_drift", Double),
    Column("judged_version", Integer),
    _at("at", now=True),
    PrimaryKeyConstraint("run_no", "rollout_id", "revision"),
    CheckConstraint("(revision = 0) = (from_state IS NULL)", name="first"),
    Index("rollout_audit_at", "at", postgresql_using="brin"),
)

tickets = Table(
    "tickets",
    metadata,
    Column("run_no", Integer),
    Column("group_id", Text),
    Column("worker_id", Text, nullable=False),
    Column("incarnation", Text, nullable=False),
    _at("expires_at"),
    PrimaryKeyConstraint("run_no", "group_id"),
)

updates = Table(
    "updates",
    metadata,
    Column("run_no", Integer),
    Column("update_id", Text),
    Column("state", Text, nullable=False, server_default=text("'open'")),
    Column("owner", Text, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("artifact_hash", Text, nullable=False),
    Column("lag_clock", Integer, nullable=False),
    Column("after_commit_no", Integer),
    Column("contract_no", Integer),
    Column("commit_no", Integer),
    Column("reason", Text),
    _at("opened_at", now=True),
    _at("lease_until"),
    _at("ended_at", nullable=True),
    PrimaryKeyConstraint("run_no", "update_id"),
    CheckConstraint(_one_of("state", "open", "committed", "aborted", "expired", "fenced", "rewound"), name="state"),
    CheckConstraint("(state = 'open') = (ended_at IS NULL)", name="ended"),
    CheckConstraint("(commit_no IS NOT NULL) = (state IN ('committed', 'rewound'))", name="numbered"),
    CheckConstraint("commit_no IS NULL OR ended_at <= lease_until", name="within_lease"),
    Index(
        "updates_commit_no",
        "run_no",
        "commit_no",
        unique=True,
        postgresql_where=text("commit_no IS NOT NULL"),
    ),
    Index("updates_open", "run_no", "lease_until", postgresql_where=text("state = 'open'")),
)

update_members = Table(
    "update_members",
    metadata,
    Column("run_no", Integer),
    Column("update_id", Text),
    Column("rollout_id", Text),
    Column("revision", Integer),
    Column("verdict", Text, nullable=False),
    Column("would_refuse", Text),
    Column("use", Text),
    Column("group_id", Text, nullable=False),
    Column("versions", ARRAY(Integer), nullable=False),
    Column("ruleset_no", Integer),
    Column("lag", Integer),
    Column("drift", Double),
    Column("drift_max", Double),
    Column("drift_k3", Double),
    Column("drift_outside_share", Double),
    Column("drift_sample_size", Double),
    _at("at", now=True),
    PrimaryKeyConstraint("run_no", "update_id", "rollout_id", "revision"),
    Index("update_members_at", "at", postgresql_using="brin"),
)

# How far each action token's log-prob had moved, as a member of an update was measured: evidence, and as long as that.
token_differences = Table(
    "token_differences",
    metadata,
    Column("run_no", Integer),
    Column("rollout_id", Text),
    Column("update_id", Text),
    Column("revision", Integer),
    Column("differences", LargeBinary, nullable=False),
    PrimaryKeyConstraint("run_no", "rollout_id", "update_id", "revision"),
    # As with the other evidence: up to a page they stay in the row, and they are never compressed.
    postgresql_with={"toast_tuple_target": "8160"},
)

rewinds = Table(
    "rewinds",
    metadata,
    Column("run_no", Integer),
    Column("rewind_id", Text),
    Column("to_commit_no", Integer, nullable=False),
    Column("consumed", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("answer", JSONB, nullable=False),
    _at("at", now=True),
    PrimaryKeyConstraint("run_no", "rewind_id"),
    CheckConstraint(_one_of("consumed", "release", "spent"), name="consumed"),
)

# What workers sent and got back, by the life of the worker that sent it.
rejections = Table(
    "rejections",
    metadata,
    Column("run_no", Integer),
    Column("worker_id", Text),
    Column("incarnation", Text),
    Column("reason", Text),
    Column("n", BigInteger, nullable=False),
    Column("last_detail", Text, nullable=False),
    _at("last_at", now=True),
    PrimaryKeyConstraint("run_no", "worker_id", "incarnation", "reason"),
)

# The drift of fresh rollouts (lag 0), summed by the life of the worker that made them.
worker_drift = Table(
    "worker_drift",
    metadata,
    Column("run_no", Integer),
    Column("worker_id", Text),
    Column("incarnation", Text),
    Column("n", BigInteger, nullable=False),
    Column("total", Double, nullable=False),
    PrimaryKeyConstraint("run_no", "worker_id", "incarnation"),
)
