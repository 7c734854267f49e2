"""Tells the other replicas which runs have changed and hears it from them, by NOTIFY and LISTEN.

NOTIFY makes the commits of all its senders wait for each other, so it has no place in the transactions that change
a ledger. Here one task per replica sends, on a connection of its own, at most one statement per pause for whatever
was announced meanwhile. A notice is a hint and no more: one that is lost costs its readers their poll.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from coordinator.storage.changes import Changes
from coordinator.storage.database import Database
from coordinator.storage.outage import Outage

log = logging.getLogger("coordinator.notices")

CHANNEL = "coordinator_changes"
PAUSE_SECONDS = 0.03
"""Between two statements; what is announced meanwhile travels in the next one."""
PAYLOAD_BYTES = 7999
"""Postgres refuses a payload of 8000 bytes."""
_SEPARATOR = ","  # no run id has one
_NOTIFY = f"SELECT pg_notify('{CHANNEL}', payload) FROM unnest($1::text[]) AS payload"
_ALIVE_SECONDS = 10.0
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.1, 2.0
_LOST = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


def payloads(run_ids: Iterable[str]) -> Iterator[str]:
    """These run ids in as few payloads as hold them, each within `PAYLOAD_BYTES`."""
    payload = ""
    for run_id in run_ids:
        longer = f"{payload}{_SEPARATOR}{run_id}" if payload else run_id
        if len(longer.encode()) > PAYLOAD_BYTES:
            yield payload
            longer = run_id
        payload = longer
    if payload:
        yield payload


async def listening_connection(engine: AsyncEngine) -> asyncpg.Connection:
    """A connection beside the pool that hears. It must lead to Postgres itself: a pooler loses what it is told."""
    _, arguments = engine.dialect.create_connect_args(engine.url)
    for key in ("prepared_statement_cache_size", "prepared_statement_name_func"):
        arguments.pop(key, None)  # the engine's own, which asyncpg does not know
    return await asyncpg.connect(**arguments, timeout=10, server_settings={"application_name": "coordinator notices"})


class Notices:
    """Connects the `changes` of this replica with those of all others on this database."""

    def __init__(self, database: Database, changes: Changes) -> None:
        self._engine = database.engine
        self._changes = changes

    async def run(self) -> None:
        """Sends and hears until it is cancelled. A lost connection is made anew, with growing pauses between tries."""
        outage = Outage(log, "and changes made through other replicas are found by asking only")
        loop = asyncio.get_running_loop()
        pause = _FIRST_RETRY_SECONDS
        while True:
            began = loop.time()
            try:
                connection = await self._connect()
                try:
                    outage.ends()
                    await self._exchange(connection)
                finally:
                    connection.terminate()
            except _LOST as error:
                outage.begins(error)
            except Exception:  # whatever broke this connection must not end all later ones
                log.exception("notices failed; a new connection follows")
            if loop.time() - began > _ALIVE_SECONDS:
                pause = _FIRST_RETRY_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_RETRY_SECONDS)

    async def _connect(self) -> asyncpg.Connection:
        connection = await listening_connection(self._engine)
        connection.add_termination_listener(lambda _: self._changes.stirred.set())
        await connection.add_listener(CHANNEL, self._heard)
        self._changes.hear_everything()  # what was sent before this moment is lost on us
        return connection

    def _heard(self, connection: asyncpg.Connection, sender: int, _: str, payload: str) -> None:
        if sender != connection.get_server_pid():
            for run_id in payload.split(_SEPARATOR):
                self._changes.hear(run_id)

    async def _exchange(self, connection: asyncpg.Connection) -> None:
        """Sends what is announced until the connection is lost."""
        self._changes.stirred.set()
        while True:
            try:
                async with asyncio.timeout(_ALIVE_SECONDS):
                    await self._changes.stirred.wait()
            except TimeoutError:
                # Without traffic, the loss of the other machine would never be noticed.
                await connection.execute("SELECT 1", timeout=_ALIVE_SECONDS)
                continue
            self._changes.stirred.clear()
            if connection.is_closed():
                raise ConnectionResetError("the connection that hears of changes was closed")
            run_ids = self._changes.take_untold()
            if not run_ids:
                continue
            try:
                await connection.execute(_NOTIFY, list(payloads(run_ids)), timeout=_ALIVE_SECONDS)
            except BaseException:
                self._changes.tell_later(run_ids)
                raise
            await asyncio.sleep(PAUSE_SECONDS)
