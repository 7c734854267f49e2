"""Whether this process can do its work: what a load balancer asks before it sends requests here."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.shared import Shared
from coordinator.storage.database import Database
from coordinator.storage.migrations import newest

PATIENCE_SECONDS = 3.0
"""A database or a disk that does not answer for so long counts as away."""


async def _revision(connection: AsyncConnection) -> str | None:
    revision: str | None = await connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def _write(folder: Path) -> None:
    """Writes a file without a name, which is gone when it is closed. Blocks."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"ready?")


class Readiness:
    """Asks the database and the artifact store: anew each time, but once for all who ask meanwhile.

    No token is needed to ask, so that a crowd must not cost more than one who asks.
    """

    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self._folder = folder
        self._newest = newest()
        self._looking = Shared(self._look)
        self._writing: asyncio.Task[None] | None = None
        self.ending = False
        """Set when the process was told to end: from then on it is not ready, and still answers."""

    async def check(self) -> None:
        """Refuses with `shutting_down`, or with `not_ready` and what is wrong.

        A database that does not answer raises its own error.
        """
        if self.ending:
            raise Refusal("shutting_down", "this process was told to end")
        await self._looking.get()

    async def _look(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            revision = await self._database.read(_revision)
        if revision != self._newest:
            raise Refusal(
                "not_ready", f"the database's schema is at revision {revision}, this release knows {self._newest}"
            )
        # One try at a time: a disk that hangs holds one thread, however often it is asked.
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(asyncio.to_thread(_write, self._folder))
        await asyncio.wait({self._writing}, timeout=PATIENCE_SECONDS)
        if not self._writing.done():
            raise Refusal("not_ready", f"the artifact store did not take a file within {PATIENCE_SECONDS:g} s")
        if (fault := self._writing.exception()) is not None:
            reason = fault.strerror if isinstance(fault, OSError) else type(fault).__name__
            raise Refusal("not_ready", f"the artifact store takes no file: {reason}")
