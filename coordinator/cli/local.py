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
from pydantic import ValidationError

from coordinator.cli.faults import USAGE, Failure, matter
from coordinator.cli.output import patience, say

if TYPE_CHECKING:
    from coordinator.settings import Settings
    from coordinator.storage.database import Database

T = TypeVar("T")


def settings_of(data: Path) -> Settings:
    """The server's settings, of this data folder."""
    from coordinator.settings import Settings

    try:
        return Settings(data=data)
    except ValidationError as error:
        # By their variables, and without what they hold: it may be a secret.
        prefix = Settings.model_config["env_prefix"]
        faults = [(str(fault["loc"][0]), matter(fault)) for fault in error.errors(include_url=False)]
        words = [f"{name if name.isupper() else prefix + name.upper()}: {what}" for name, what in faults]
        raise Failure("; ".join(words), code=USAGE) from error


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


def with_database(data: Path, work: Callable[[Database], Awaitable[T]], doing: str = "waiting for the database") -> T:
    """What `work` makes of the database, which has the schema of this release. `doing` is told if it takes long."""
    from coordinator.storage.database import connect
    from coordinator.storage.migrations import check_schema

    async def run(url: str) -> T:
        database = connect(url, pool_size=1)
        try:
            await check_schema(database)
            return await work(database)
        finally:
            await database.close()

    with existing_database(data) as url, patience(doing):
        return asyncio.run(run(url))
