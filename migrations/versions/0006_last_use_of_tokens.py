"""when each token was last used

Revision: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision; there is no way back."""
    op.add_column("tokens", sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True))
