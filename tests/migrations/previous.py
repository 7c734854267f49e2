"""A database as the previous release would have left it: its schema, and all data that it would have had."""

from __future__ import annotations

import asyncio
import io

import asyncpg
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy.engine import make_url

from coordinator.storage.migrations import config, newest
from tests.database import Databases

COLUMNS = """
    SELECT c.relname, array_agg(a.attname::text ORDER BY a.attnum)
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND c.relname <> 'alembic_version'
      AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
    GROUP BY c.relname
"""
SEQUENCES = "SELECT sequencename::text FROM pg_sequences WHERE schemaname = 'public'"


def previous() -> str:
    """The revision before the newest."""
    script = ScriptDirectory.from_config(config()).get_revision(newest())
    assert script is not None and isinstance(script.down_revision, str)
    return script.down_revision


def at_previous(postgres: Databases) -> str:
    """A database with the tables of the previous revision, and nothing in them."""
    url = postgres.empty()
    command.upgrade(config(url), previous())
    return url


def plain(url: str) -> str:
    """The address as asyncpg and Postgres' own programs want it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


async def _copy(newer: str, older: str) -> None:
    source, target = await asyncpg.connect(plain(newer)), await asyncpg.connect(plain(older))
    try:
        # Neither triggers nor the order of tables matter to rows that were consistent before.
        await target.execute("SET session_replication_role = replica")
        await source.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        there = {str(table): set(columns) for table, columns in await source.fetch(COLUMNS)}
        for table, columns in await target.fetch(COLUMNS):
            shared = [column for column in columns if column in there.get(table, ())]
            rows = io.BytesIO()
            names = ", ".join(f'"{column}"' for column in shared)
            await source.copy_from_query(f'SELECT {names} FROM "{table}"', output=rows, format="binary")
            rows.seek(0)
            await target.copy_to_table(table, source=rows, columns=shared, format="binary")
        known = {str(name) for (name,) in await source.fetch(SEQUENCES)}
        for (name,) in await target.fetch(SEQUENCES):
            if name in known:
                last = await source.fetchval(f'SELECT last_value FROM "{name}"')
                await target.execute(f"SELECT setval('\"{name}\"', $1)".replace("$1", str(last)))
    finally:
        await source.close()
        await target.close()


def copy_into(newer: str, older: str) -> None:
    """What of the rows of one database fits the older schema of the other, and where its sequences stand."""
    asyncio.run(_copy(newer, older))
