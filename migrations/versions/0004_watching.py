"""watching

Revision: 0004
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("journal_subject", "journal", ["run_no", "subject", "event_no"])
