"""The schema: reached from nothing, equal to the tables, and asked for before anything is served."""

from __future__ import annotations

import asyncio

import pytest
from alembic import command
from sqlalchemy import text

from coordinator.storage.database import DatabaseError, check_durability, connect
from coordinator.storage.migrations import check_schema, config, newest, upgrade
from tests.database import Databases


async def run_checks(url: str, *statements: str) -> None:
    database = connect(url, pool_size=1)
    try:
        async with database.engine.begin() as connection:
            for statement in statements:
                await connection.execute(text(statement))
        await check_schema(database)
    finally:
        await database.close()


def test_a_fresh_database_reaches_the_newest_schema_and_again_changes_nothing(postgres: Databases) -> None:
    url = postgres.empty()
    with pytest.raises(DatabaseError, match=r"revision none.*run 'coordinator migrate'"):
        asyncio.run(run_checks(url))
    upgrade(url)
    upgrade(url)
    asyncio.run(run_checks(url))


def test_the_migrations_make_exactly_the_tables(database_url: str) -> None:
    command.check(config(database_url))


def test_a_schema_of_a_newer_release_is_refused(database_url: str) -> None:
    with pytest.raises(DatabaseError, match=f"revision 9999, this release knows {newest()}; a newer release"):
        asyncio.run(run_checks(database_url, "UPDATE alembic_version SET version_num = '9999'"))


@pytest.mark.parametrize("setting", ["synchronous_commit"])
def test_a_postgres_that_forgets_is_refused(postgres: Databases, setting: str) -> None:
    url = postgres.migrated()
    name = url.rsplit("/", 1)[1]

    async def look() -> None:
        database = connect(url, pool_size=1)
        try:
            async with database.engine.begin() as connection:
                await connection.execute(text(f'ALTER DATABASE "{name}" SET {setting} = off'))
            await database.engine.dispose()
            await check_durability(database)
        finally:
            await database.close()

    with pytest.raises(DatabaseError, match=f"{setting}=off"):
        asyncio.run(look())


def test_only_postgres_is_possible() -> None:
    with pytest.raises(DatabaseError, match="only postgresql"):
        connect("sqlite:///x.db")
