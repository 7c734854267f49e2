"""the ledger in full

Revision: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# What was there before has its run's contract, and is counted once.
_FILL = (
    """
    INSERT INTO contracts (run_no, contract_hash, contract) SELECT run_no, contract_hash, contract FROM runs
    """,
    """
    UPDATE groups g SET contract_no = c.contract_no FROM contracts c WHERE c.run_no = g.run_no
    """,
    """
    UPDATE rollouts r SET contract_no = c.contract_no FROM contracts c
    WHERE c.run_no = r.run_no AND r.state <> 'generation_failed'
    """,
    """
    UPDATE rollout_evidence e SET tokens = octet_length(e.action_mask), arrived_at = r.arrived_at
    FROM rollouts r WHERE r.run_no = e.run_no AND r.rollout_id = e.rollout_id
    """,
    """
    INSERT INTO counts (run_no, name, n) SELECT run_no, state, count(*) FROM rollouts GROUP BY run_no, state
    """,
    """
    INSERT INTO counts (run_no, name, n)
    SELECT run_no, 'evidence_bytes',
           sum(octet_length(token_ids) + octet_length(action_mask) + octet_length(behavior_log_probs))
    FROM rollout_evidence GROUP BY run_no
    """,
)

# Statement triggers with transition tables: no statement can forget to count, and a batch costs a few rows.
_COUNTING = (
    """
    CREATE FUNCTION count_new_rollouts() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO count_deltas (run_no, name, delta)
        SELECT run_no, state, count(*) FROM added GROUP BY run_no, state;
        RETURN NULL;
    END $$
    """,
    """
    CREATE FUNCTION count_moved_rollouts() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO count_deltas (run_no, name, delta)
        SELECT run_no, state, sum(n) FROM (
            SELECT run_no, state, count(*) AS n FROM added GROUP BY run_no, state
            UNION ALL
            SELECT run_no, state, -count(*) FROM removed GROUP BY run_no, state
        ) AS moved
        GROUP BY run_no, state HAVING sum(n) <> 0;
        RETURN NULL;
    END $$
    """,
    """
    CREATE FUNCTION count_dropped_rollouts() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO count_deltas (run_no, name, delta)
        SELECT run_no, state, -count(*) FROM removed GROUP BY run_no, state;
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER count_new AFTER INSERT ON rollouts
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION count_new_rollouts()
    """,
    """
    CREATE TRIGGER count_moved AFTER UPDATE ON rollouts
    REFERENCING OLD TABLE AS removed NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION count_moved_rollouts()
    """,
    """
    CREATE TRIGGER count_dropped AFTER DELETE ON rollouts
    REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION count_dropped_rollouts()
    """,
)


def upgrade() -> None:
    """Applies this revision; there is no way back."""
    op.create_table(
        "contracts",
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("contract_no", sa.Integer(), sa.Identity(always=True), nullable=False),
        sa.Column("contract_hash", sa.Text(), nullable=False),
        sa.Column("contract", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("run_no", "contract_no", name=op.f("contracts_pkey")),
        sa.UniqueConstraint("run_no", "contract_hash", name=op.f("contracts_run_no_contract_hash_key")),
    )
    op.create_table(
        "count_deltas",
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("delta", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "counts",
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_no", "name", name=op.f("counts_pkey")),
    )
    op.create_table(
        "rejections",
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.Column("last_detail", sa.Text(), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("run_no", "worker_id", "incarnation", "reason", name=op.f("rejections_pkey")),
    )
    op.create_table(
        "rewinds",
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("rewind_id", sa.Text(), nullable=False),
        sa.Column("to_commit_no", sa.Integer(), nullable=False),
        sa.Column("consumed", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("answer", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("consumed IN ('release', 'spent')", name=op.f("rewinds_consumed")),
        sa.PrimaryKeyConstraint("run_no", "rewind_id", name=op.f("rewinds_pkey")),
    )
    op.create_table(
        "tombstones",
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("sample_index", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("content_hash", sa.LargeBinary(), nullable=False),
        sa.Column(
            "dropped_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("run_no", "rollout_id", name=op.f("tombstones_pkey")),
        sa.UniqueConstraint(
            "run_no",
            "group_id",
            "sample_index",
            "attempt",
            name=op.f("tombstones_run_no_group_id_sample_index_attempt_key"),
        ),
    )
    op.create_table(
        "worker_drift",
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_no", "worker_id", "incarnation", name=op.f("worker_drift_pkey")),
    )
    op.add_column("groups", sa.Column("contract_no", sa.Integer(), nullable=True))
    op.drop_index(
        op.f("groups_offered"), table_name="groups", postgresql_where="((state = 'open'::text) AND (rewarded > 0))"
    )
    op.create_index(
        "groups_open",
        "groups",
        ["run_no", "oldest_clock", "first_arrival_at"],
        unique=False,
        postgresql_where=sa.text("state = 'open'"),
    )
    op.add_column("rollout_audit", sa.Column("judged_version", sa.Integer(), nullable=True))
    op.add_column("rollout_evidence", sa.Column("side_data", sa.LargeBinary(), nullable=True))
    op.add_column("rollout_evidence", sa.Column("side_data_digest", sa.Text(), nullable=True))
    op.add_column("rollout_evidence", sa.Column("row_starts", sa.ARRAY(sa.Integer()), nullable=True))
    op.add_column("rollout_evidence", sa.Column("tokens", sa.Integer(), nullable=True))
    op.add_column(
        "rollout_evidence",
        sa.Column(
            "arrived_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
    )
    op.alter_column("rollout_evidence", "token_ids", existing_type=postgresql.BYTEA(), nullable=True)
    op.alter_column("rollout_evidence", "action_mask", existing_type=postgresql.BYTEA(), nullable=True)
    op.alter_column("rollout_evidence", "behavior_log_probs", existing_type=postgresql.BYTEA(), nullable=True)
    op.create_check_constraint(
        op.f("rollout_evidence_whole"),
        "rollout_evidence",
        "(token_ids IS NULL) = (action_mask IS NULL) AND (token_ids IS NULL) = (behavior_log_probs IS NULL)",
    )
    op.create_index(
        "rollout_evidence_kept",
        "rollout_evidence",
        ["run_no", "arrived_at"],
        unique=False,
        postgresql_where=sa.text("token_ids IS NOT NULL"),
    )
    op.add_column("rollouts", sa.Column("contract_no", sa.Integer(), nullable=True))
    for statement in _FILL:
        op.execute(statement)
    op.alter_column("rollout_evidence", "tokens", nullable=False)
    op.execute("ALTER TABLE rollout_evidence SET (toast_tuple_target = 8160)")
    for column in ("token_ids", "action_mask", "behavior_log_probs", "side_data"):
        op.execute(f"ALTER TABLE rollout_evidence ALTER COLUMN {column} SET STORAGE EXTERNAL")
    op.create_check_constraint(
        op.f("rollouts_contract"), "rollouts", "(contract_no IS NULL) = (state = 'generation_failed')"
    )
    op.create_index("rollouts_arrived", "rollouts", ["run_no", "arrived_at"], unique=False)
    op.create_index("update_members_at", "update_members", ["at"], unique=False, postgresql_using="brin")
    op.add_column("updates", sa.Column("contract_no", sa.Integer(), nullable=True))
    op.drop_column("workers", "suspect_reason")
    for statement in _COUNTING:
        op.execute(statement)
