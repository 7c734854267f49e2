"""The engine, the one way to run a transaction, and the one way to read without one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, TypeVar

import asyncpg
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

P = ParamSpec("P")
T = TypeVar("T")

SERIALIZATION_FAILURE, DEADLOCK = "40001", "40P01"
CANNOT_CONNECT_NOW = "57P03"
ATTEMPTS = 6
START_SECONDS = 120

SESSION = {
    "application_name": "coordinator",
    "timezone": "UTC",
    # A generic plan that was made while a table was empty stays slow for ever; see docs on plans.
    "plan_cache_mode": "force_custom_plan",
    # Compiling costs more than any of our statements takes, and is chosen by estimates that are wrong on new tables.
    "jit": "off",
    "statement_timeout": "60000",
    "lock_timeout": "30000",
    "idle_in_transaction_session_timeout": "60000",
}


class DatabaseError(RuntimeError):
    """The database is not fit to be used; the message says why and what to do."""


_KINDS = {
    SERIALIZATION_FAILURE: "serialization",
    DEADLOCK: "deadlock",
    "57014": "statement_timeout",
    "55P03": "lock_timeout",
    "25P03": "idle_timeout",
}
FAULTS = (*_KINDS.values(), "connection", "other")
"""What `Database.faults` counts."""


class Database:
    """A pool of connections to one Postgres.

    `faults` counts what went wrong by its kind, `retries` the transactions that were tried again. `span` is entered
    around each transaction and each read, with its name.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.faults: Counter[str] = Counter()
        self.retries = 0
        self.span: Callable[[str], AbstractContextManager[object]] = nullcontext
        self._reading = engine.execution_options(isolation_level="AUTOCOMMIT")

    async def transaction(
        self, work: Callable[Concatenate[AsyncConnection, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs `work(connection, ...)` in one transaction; it commits when `work` returns.

        A deadlock or a serialization failure is tried again, so `work` must have no effect outside of it.
        """
        for attempt in range(ATTEMPTS):
            try:
                with self._counted(), self.span(_name(work)):
                    async with self.engine.begin() as connection:
                        return await work(connection, *args, **kwargs)
            except DBAPIError as error:
                state = getattr(error.orig, "sqlstate", None)
                if state not in (SERIALIZATION_FAILURE, DEADLOCK) or attempt == ATTEMPTS - 1:
                    raise
            self.retries += 1
            await asyncio.sleep(random.uniform(0, 0.01 * 2**attempt))
        raise AssertionError("unreachable")

    async def read(
        self, work: Callable[Concatenate[AsyncConnection, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs `work(connection, ...)`, which only reads, each statement by itself: no BEGIN, no COMMIT, no lock kept.

        What two of its statements read may lie on both sides of somebody's commit.
        """
        with self._counted(), self.span(_name(work)):
            async with self._reading.connect() as connection:
                return await work(connection, *args, **kwargs)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, asyncpg.PostgresError) as error:
            lost = isinstance(error, InterfaceError) or (isinstance(error, DBAPIError) and error.connection_invalidated)
            state = str(getattr(getattr(error, "orig", error), "sqlstate", None) or "")
            lost = lost or state.startswith(("08", "57P", "53"))
            self.faults["connection" if lost else _KINDS.get(state, "other")] += 1
            raise
        except (OSError, PoolTimeout, asyncpg.InterfaceError):
            self.faults["connection"] += 1
            raise

    async def close(self) -> None:
        """Closes every connection."""
        await self.engine.dispose()


def _name(work: Callable[..., object]) -> str:
    """Which work it is, as `package.module.function` below `coordinator`."""
    return f"{work.__module__.removeprefix('coordinator.')}.{work.__qualname__}"


def async_url(url: str) -> str:
    """The address as SQLAlchemy wants it for asyncpg, from any of the usual spellings of postgresql://."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # whose text repeats the address, password and all
        raise DatabaseError(
            "DATABASE_URL cannot be read; it is postgresql://user:password@host:port/database, with what is special in "
            "the password as %XX"
        ) from None
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise DatabaseError(f"DATABASE_URL names {parsed.get_backend_name()}; only postgresql:// is possible")
    return parsed.set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)


def connect(url: str, pool_size: int = 10) -> Database:
    """A pool for this address. It connects when first used."""
    engine = create_async_engine(
        async_url(url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=30,
        pool_pre_ping=False,
        pool_recycle=1800,
        hide_parameters=True,  # values belong to their owners, and not into logs
        connect_args={"server_settings": SESSION, "timeout": 10},
    )
    return Database(engine)


async def check_durability(database: Database) -> None:
    """Refuses a Postgres that acknowledges what a crash could take back."""
    async with database.engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'synchronous_commit')")
        )
        settings = {str(row.name): row.setting for row in rows}
    for name, setting in settings.items():
        if setting == "off":
            raise DatabaseError(
                f"Postgres runs with {name}=off, so that a crash could lose what was acknowledged; "
                f"set {name}=on and start again"
            )


async def wait_until_started(url: str, say: Callable[[str], None], seconds: float = START_SECONDS) -> None:
    """Waits while Postgres starts or recovers from a crash, which it says itself; every other fault is left to the
    next who connects.
    """
    database = connect(url, pool_size=1)
    until = time.monotonic() + seconds
    said = False
    try:
        while True:
            try:
                async with database.engine.connect():
                    return
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) != CANNOT_CONNECT_NOW or time.monotonic() > until:
                    raise
                if not said:
                    reason = str(error.orig).rpartition(": ")[2]
                    say(f"waiting for Postgres, for up to {seconds:.0f} s: {reason}")
                    said = True
            await asyncio.sleep(0.2)
    finally:
        await database.close()
