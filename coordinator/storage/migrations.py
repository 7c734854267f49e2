"""Brings a database to the schema that this release knows, and tells whether it is there."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import text

from coordinator.storage.database import Database, DatabaseError

PACKAGE = Path(__file__).resolve().parent.parent


def migrations_folder() -> Path:
    """The folder of the migrations: beside the package in a checkout, inside it when installed."""
    for folder in (PACKAGE.parent / "migrations", PACKAGE / "_migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise DatabaseError("the migrations are not installed with this package; install it again")


def config(url: str | None = None) -> Config:
    """Alembic's configuration for a database."""
    configuration = Config()
    configuration.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    if url is not None:
        configuration.attributes["url"] = url
    return configuration


def upgrade(url: str) -> None:
    """Runs every migration that the database lacks. Blocks, and must not be called from an event loop."""
    command.upgrade(config(url), "head")


def newest() -> str:
    """The revision that this release knows."""
    head = ScriptDirectory.from_config(config()).get_current_head()
    assert head is not None
    return head


async def check_schema(database: Database) -> None:
    """Refuses a database that is not at the revision that this release knows."""
    async with database.engine.connect() as connection:
        there = await connection.scalar(text("SELECT to_regclass('alembic_version') IS NOT NULL"))
        revision = await connection.scalar(text("SELECT version_num FROM alembic_version")) if there else None
    if revision != newest():
        raise DatabaseError(
            f"the database's schema is at revision {revision or 'none'}, this release knows {newest()}; "
            + (
                "run 'coordinator migrate'"
                if revision is None or _is_older(revision)
                else "a newer release has migrated it: run that release"
            )
        )


def _is_older(revision: str) -> bool:
    return any(script.revision == revision for script in ScriptDirectory.from_config(config()).walk_revisions())
