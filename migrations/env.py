"""How alembic reaches the database: over asyncpg, one migration at a time across processes."""

from __future__ import annotations

import asyncio
import os

from alembic import context
from sqlalchemy import Connection, pool, text
from sqlalchemy.ext.asyncio import create_async_engine

from coordinator.storage.database import async_url
from coordinator.storage.tables import metadata

ONE_AT_A_TIME = 7_242_001


def migrate(connection: Connection) -> None:
    """Runs what is missing, all of it in one transaction."""
    context.configure(connection=connection, target_metadata=metadata, compare_type=True)
    with context.begin_transaction():
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ONE_AT_A_TIME})
        context.run_migrations()


async def connect_and_migrate(url: str) -> None:
    """Opens one connection and migrates over it."""
    engine = create_async_engine(async_url(url), poolclass=pool.NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(migrate)
        await connection.commit()
    await engine.dispose()


asyncio.run(connect_and_migrate(context.config.attributes.get("url") or os.environ["DATABASE_URL"]))
