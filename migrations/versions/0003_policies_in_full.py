"""policies in full

Revision: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TIME = sa.TIMESTAMP(timezone=True)


def upgrade() -> None:
    op.add_column(
        "policy_versions", sa.Column("digests", postgresql.JSONB(), server_default=sa.text("'{}'"), nullable=False)
    )
    op.add_column("policy_versions", sa.Column("rollback_version", sa.Integer(), nullable=True))
    op.add_column("workers", sa.Column("asleep_until", _TIME, nullable=True))
    op.add_column(
        "workers", sa.Column("must_ack_active", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    )
    op.add_column("groups", sa.Column("bound", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.execute(
        """
        UPDATE groups g SET bound = true FROM rollouts r JOIN runs n USING (run_no)
        WHERE r.run_no = g.run_no AND r.state = 'reserved' AND g.group_id =
            CASE WHEN n.settings ->> 'group_size' IS NULL THEN r.rollout_id ELSE r.group_id END
        """
    )
    op.add_column("activation_workers", sa.Column("ended_as", postgresql.JSONB(), nullable=True))
    op.drop_column("acks", "digest")
    for name in ("digest_layout", "digest_registered", "digest_active"):
        op.add_column("acks", sa.Column(name, sa.Text(), nullable=True))

    op.add_column(
        "activations", sa.Column("asked_at", _TIME, server_default=sa.text("clock_timestamp()"), nullable=False)
    )
    op.execute("UPDATE activations SET asked_at = opened_at")
    op.alter_column("activations", "opened_at", existing_type=_TIME, nullable=True, server_default=None)
    op.alter_column("activations", "deadline_at", existing_type=_TIME, nullable=True)
    op.create_check_constraint(
        op.f("activations_deadline"), "activations", "(opened_at IS NULL) = (deadline_at IS NULL)"
    )
    op.create_check_constraint(
        op.f("activations_opened"), "activations", "state NOT IN ('open', 'succeeded') OR opened_at IS NOT NULL"
    )
    op.create_index(
        "activations_one_waiting",
        "activations",
        ["run_no"],
        unique=True,
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_table(
        "rollbacks",
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("rollback_id", sa.Text(), nullable=False),
        sa.Column("to_version", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("answer", postgresql.JSONB(), nullable=False),
        sa.Column("at", _TIME, server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("run_no", "rollback_id", name=op.f("rollbacks_pkey")),
    )
