"""Proves the coordinator's promises from the audit of one database: `coordinator.operations.verify` as a list of lines.

Each line begins with the number of the statement that it contradicts.
"""

from __future__ import annotations

import asyncio

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.verify import Acknowledged, Breach, snapshot, verify
from coordinator.storage.database import connect

__all__ = ["Acknowledged", "check", "check_ledger"]


def check_ledger(url: str, acknowledged: dict[str, Acknowledged] | None = None) -> list[str]:
    """Every contradiction in the database at `url`; none: the promises held. `acknowledged` is by run_id."""
    return asyncio.run(_check_at(url, acknowledged))


async def _check_at(url: str, acknowledged: dict[str, Acknowledged] | None) -> list[str]:
    database = connect(url, pool_size=1)
    try:
        async with snapshot(database) as connection:
            return await check(connection, acknowledged)
    finally:
        await database.close()


async def check(connection: AsyncConnection, acknowledged: dict[str, Acknowledged] | None = None) -> list[str]:
    """Every contradiction in what this connection sees."""
    findings = [finding async for finding in verify(connection, told=acknowledged)]
    return [str(finding) for finding in findings if isinstance(finding, Breach)]
