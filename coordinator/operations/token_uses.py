"""When each token was last used: noted in memory by each request, written down by one task of each replica.

No request writes for it or waits for it. What is written is true to a minute, and what cannot be written, since the
database is away or read only, is tried again with what was noted meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import asyncpg
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.storage.database import Database
from coordinator.storage.outage import Outage

log = logging.getLogger("coordinator.token_uses")

EVERY_SECONDS = 5.0
APART_SECONDS = 60.0
"""A token's row is written at most this often, by all replicas together."""

# By the database's clock. A row that another replica is writing is left to it: nobody waits here.
WRITE_USES = text("""
    WITH used AS (
        SELECT t.token_id, clock_timestamp() - make_interval(secs => n.seconds_ago) AS at
        FROM unnest(CAST(:token_ids AS text[]), CAST(:seconds_ago AS float8[])) AS n (token_id, seconds_ago)
        JOIN tokens t USING (token_id)
        ORDER BY t.token_id
        FOR NO KEY UPDATE OF t SKIP LOCKED
    )
    UPDATE tokens t SET last_used_at = used.at FROM used
    WHERE t.token_id = used.token_id
      AND (t.last_used_at IS NULL OR t.last_used_at < used.at - make_interval(secs => :apart_seconds))
""")


class TokenUses:
    """What one replica knows of the tokens that were used at it and are not written down yet."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._used: dict[str, float] = {}

    def note(self, token_ids: Iterable[str]) -> None:
        """These tokens are valid and in use at this moment."""
        now = asyncio.get_running_loop().time()
        self._used.update(dict.fromkeys(token_ids, now))

    async def write(self) -> None:
        """Once: writes down what was noted. If it fails, that is kept for the next time."""
        used, self._used = self._used, {}
        if not used:
            return
        try:
            await self._database.transaction(_write, used)
        except BaseException:
            self._used = used | self._used
            raise

    async def run(self) -> None:
        """Writes every few seconds until it is cancelled."""
        outage = Outage(log, "and when tokens were last used is written down later")
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            try:
                await self.write()
            except (SQLAlchemyError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                outage.begins(error)
            else:
                outage.ends()


async def _write(connection: AsyncConnection, used: dict[str, float]) -> None:
    now = asyncio.get_running_loop().time()
    await connection.execute(
        WRITE_USES,
        {
            "token_ids": list(used),
            "seconds_ago": [now - at for at in used.values()],
            "apart_seconds": APART_SECONDS,
        },
    )
