"""the log-prob difference of each action token, as updates measured it

Revision: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision; there is no way back."""
    op.create_table(
        "token_differences",
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("update_id", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("differences", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_no", "rollout_id", "update_id", "revision", name=op.f("token_differences_pkey")),
        postgresql_with={"toast_tuple_target": "8160"},
    )
    op.execute("ALTER TABLE token_differences ALTER COLUMN differences SET STORAGE EXTERNAL")
