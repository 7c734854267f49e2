"""Commands that work on the database or the data folder of this machine: they need no server and no token.

The server's modules take a second to be loaded, so each command imports them when it runs: what only calls the API,
and completion in a shell, is quick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from coordinator.cli.output import say

if TYPE_CHECKING:
    from coordinator.settings import Settings
    from coordinator.storage.database import Database

T = TypeVar("T")


def settings_of(data: Path) -> Settings:
    """The server's settings, of this data folder."""
    from coordinator.settings import Settings

    return Settings(data=data)


@contextmanager
def existing_database(data: Path) -> Iterator[str]:
    """The address of the database that DATABASE_URL names, or of the one in the folder, which must be there."""
    from coordinator.server import database_url

    settings = settings_of(data)
    if settings.database_url is None and not (data / "postgres").is_dir():
        raise typer.BadParameter(
            f"there is no database in {data}; name the folder of a coordinator, run 'coordinator migrate' to make one "
            "there, or set DATABASE_URL"
        )
    with database_url(settings, say) as url:
        yield url


def with_database(data: Path, work: Callable[[Database], Awaitable[T]]) -> T:
    """What `work` makes of the database, which has the schema of this release."""
    from coordinator.storage.database import connect
    from coordinator.storage.migrations import check_schema

    async def run(url: str) -> T:
        database = connect(url, pool_size=1)
        try:
            await check_schema(database)
            return await work(database)
        finally:
            await database.close()

    with existing_database(data) as url:
        return asyncio.run(run(url))
