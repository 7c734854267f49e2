"""How alembic reaches the database: over asyncpg, one migration at a time across processes."""

from __future__ import annotations

import asyncio
import logging
import os

from alembic import context
from sqlalchemy import Connection, pool, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from coordinator.storage.database import DatabaseError, async_url
from coordinator.storage.tables import metadata

ONE_AT_A_TIME = 7_242_001
LOCK_NOT_AVAILABLE = "55P03"
LOCK_TIMEOUT = "3s"
ATTEMPTS, PAUSE_SECONDS = 60, 2

_log = logging.getLogger("coordinator.migrations")


def migrate(connection: Connection) -> None:
    """Runs what is missing, all of it in one transaction."""
    context.configure(connection=connection, target_metadata=metadata, compare_type=True)
    with context.begin_transaction():
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ONE_AT_A_TIME})
        # While it waits for a table that a backup reads, everybody else would wait behind it: it gives way instead.
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))
        context.run_migrations()


async def connect_and_migrate(url: str) -> None:
    """Opens one connection and migrates over it, again where somebody else held a table."""
    engine = create_async_engine(async_url(url), poolclass=pool.NullPool)
    try:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with engine.connect() as connection:
                    await connection.run_sync(migrate)
                    await connection.commit()
                return
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE:
                    raise
                if attempt == ATTEMPTS:
                    raise DatabaseError(
                        "nothing was migrated: another session holds a table, as a backup does; run it again later"
                    ) from error
            _log.warning("another session holds a table that the migration needs: trying again in %s s", PAUSE_SECONDS)
            await asyncio.sleep(PAUSE_SECONDS)
    finally:
        await engine.dispose()


asyncio.run(connect_and_migrate(context.config.attributes.get("url") or os.environ["DATABASE_URL"]))
