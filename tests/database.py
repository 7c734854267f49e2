"""One embedded Postgres for a whole test process, and a fresh migrated database for each test that asks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from coordinator.storage.migrations import upgrade
from coordinator.storage.postgres import EmbeddedPostgres

TEMPLATE = "migrated"
DROPPED_AT_ONCE = 8
MEMORY = Path("/dev/shm")
ROOM_BYTES = 6 * 2**30


class Databases:
    """Databases on one server, which go with it or a little after they were given back.

    To drop one takes a checkpoint, on a disk longer than most tests; to drop some takes little more than one. A
    thousand of them would fill a small disk, or the memory.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = itertools.count()
        self._given_back: list[str] = []
        # What lies in memory stays small, beside the engines that other tests start.
        asyncio.run(self._execute(["ALTER SYSTEM SET max_wal_size = '192MB'", "SELECT pg_reload_conf()"]))
        self.create(TEMPLATE)
        upgrade(self.url_of(TEMPLATE))

    def url_of(self, name: str) -> str:
        return make_url(self._url).set(database=name).render_as_string(hide_password=False)

    def create(self, name: str, template: str = "template1") -> str:
        asyncio.run(self._execute([f'CREATE DATABASE "{name}" TEMPLATE "{template}"']))
        return self.url_of(name)

    def give_back(self, url: str) -> None:
        """Says that nobody needs the database at `url` any more."""
        self._given_back.append(str(make_url(url).database))
        if len(self._given_back) == DROPPED_AT_ONCE:
            asyncio.run(self._execute([f'DROP DATABASE "{name}" WITH (FORCE)' for name in self._given_back]))
            self._given_back.clear()

    def empty(self) -> str:
        """A database without tables."""
        return self.create(f"empty_{next(self._numbers)}")

    def migrated(self) -> str:
        """A database at the newest schema."""
        return self.create(f"test_{next(self._numbers)}", TEMPLATE)

    async def _execute(self, statements: list[str]) -> None:
        engine = create_async_engine(self._url, isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            for statement in statements:
                await connection.execute(text(statement))
        await engine.dispose()


def quick_folder() -> str | None:
    """A file system in memory with room for the databases of several test processes; None: there is none.

    A database is made there four times as fast. What is promised on a disk is promised there too, to all but a
    machine that loses its power, which no test can do.
    """
    return str(MEMORY) if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_BYTES else None


@contextlib.contextmanager
def databases() -> Iterator[Databases]:
    """Starts the server and removes it with all its files."""
    folder = Path(tempfile.mkdtemp(prefix="coordinator-tests-", dir=quick_folder()))
    folder.chmod(0o755)  # as root, Postgres runs as another user
    server = EmbeddedPostgres(folder / "postgres", progress=lambda _: None)
    try:
        yield Databases(server.start())
    finally:
        server.stop()
        shutil.rmtree(server.home, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
