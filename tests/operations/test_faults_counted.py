"""What the database ends is counted by its kind, and so is each transaction that was tried again."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.storage.database import FAULTS, connect


async def raising(connection: AsyncConnection, state: str, left: list[int]) -> str:
    """Fails with this SQLSTATE as often as there are items left."""
    if left:
        left.pop()
        await connection.execute(text(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{state}'; END $$"))
    return "done"


async def slow(connection: AsyncConnection) -> None:
    await connection.execute(text("SET LOCAL statement_timeout = '20ms'"))
    await connection.execute(text("SELECT pg_sleep(60)"))


async def test_faults_and_retries_are_counted(database_url: str) -> None:
    database = connect(database_url, pool_size=1)
    nowhere = connect("postgresql://nobody@127.0.0.1:1/none")
    try:
        assert await database.transaction(raising, "40P01", [1, 2]) == "done"
        assert database.retries == 2
        with pytest.raises(DBAPIError):
            await database.transaction(slow)
        for state in ("40001", "55P03", "57P01", "22003"):
            with pytest.raises(DBAPIError):
                await database.read(raising, state, [1])
        with pytest.raises(OSError):
            await nowhere.read(slow)
    finally:
        await database.close()
    assert dict(database.faults) == {
        "deadlock": 2,
        "statement_timeout": 1,
        "serialization": 1,
        "lock_timeout": 1,
        "connection": 1,
        "other": 1,
    }
    assert dict(nowhere.faults) == {"connection": 1}
    assert database.faults.keys() <= set(FAULTS)
