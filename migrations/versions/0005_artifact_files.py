"""artifact files: where they lie, verification in the background, removal

Revision: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision; there is no way back."""
    op.add_column("policy_versions", sa.Column("uri", sa.Text(), nullable=True))
    op.add_column("policy_versions", sa.Column("files_removed_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column(
        "policy_versions", sa.Column("files_gone", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    )
    op.create_check_constraint(
        op.f("policy_versions_files_kept"),
        "policy_versions",
        "files_removed_at IS NULL OR state NOT IN ('prepared', 'active')",
    )
    op.create_index(
        "policy_versions_files",
        "policy_versions",
        ["files"],
        unique=False,
        postgresql_using="gin",
        postgresql_ops={"files": "jsonb_path_ops"},
    )
    op.create_index(
        "policy_versions_files_going",
        "policy_versions",
        ["run_no", "version"],
        unique=False,
        postgresql_where=sa.text("files_removed_at IS NOT NULL AND NOT files_gone"),
    )
    op.create_table(
        "verifications",
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'running'"), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("bytes_done", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("bytes_total", sa.BigInteger(), nullable=False),
        sa.Column("faulty", sa.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("claimed_by", sa.Text(), nullable=True),
        sa.Column("claimed_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("asked_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('running', 'refused', 'passed')", name=op.f("verifications_state")),
        sa.CheckConstraint("(state = 'running') = (ended_at IS NULL)", name=op.f("verifications_ended")),
        sa.CheckConstraint("(claimed_by IS NULL) = (claimed_until IS NULL)", name=op.f("verifications_claimed")),
        sa.PrimaryKeyConstraint("run_no", "version", name=op.f("verifications_pkey")),
    )
    op.create_index(
        "verifications_running",
        "verifications",
        ["claimed_until"],
        unique=False,
        postgresql_where=sa.text("state = 'running'"),
    )
