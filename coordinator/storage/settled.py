"""Up to which time nothing can be added any more: what a list that is read on and on may show."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

SETTLED_BEFORE = text("""
    SELECT COALESCE(min(xact_start), clock_timestamp()) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_xid IS NOT NULL
""")


async def settled_before(connection: AsyncConnection) -> datetime:
    """The time before which every row that will ever have it is there for the next statement to see.

    Rows get their time and their number before their transaction commits, so a lower one may become visible after
    a higher one, and a reader who continues after the highest would pass it over. A row's time lies after the start
    of its transaction; so what lies before the start of the oldest one that writes is complete.
    """
    moment: datetime = (await connection.execute(SETTLED_BEFORE)).scalar_one()
    return moment
