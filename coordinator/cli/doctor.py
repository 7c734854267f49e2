"""doctor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from coordinator.cli.faults import FAILED
from coordinator.cli.local import settings_of
from coordinator.cli.options import AsJson, Data, Token, Url
from coordinator.cli.output import patience, print_json, print_lines, say

if TYPE_CHECKING:
    from coordinator.cli.findings import Finding


def doctor(data: Data = Path(".data"), url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Look whether everything that a coordinator stands on is in order, and say what to do about what is not.

    Give it where the server runs: the disk, the artifact store, the database with its schema, its clock and its
    settings, the tokens, and a server at the address. Each line is ok, a warning, which is for soon, or a fault,
    which is for now. Exit code 1: there is a fault.
    """
    from coordinator.cli.findings import Findings

    found: list[Finding] = []
    with patience("still looking"):
        for finding in _findings(data, url, token):
            found.append(finding)
            if not as_json:
                print_lines(f"{finding.verdict:<8} {finding.check}: {finding.detail}")
                if finding.next_step:
                    print_lines(f"{'':<8} {finding.next_step}")
    if as_json:
        print_json(Findings(findings=found))
    if any(finding.verdict == "fault" for finding in found):
        raise typer.Exit(FAILED)


def _findings(data: Path, url: str | None, token: str | None) -> Iterator[Finding]:
    """One after the other, as they are found."""
    from coordinator.cli import findings

    yield from _as_far_as_let_in("data folder", lambda: findings.disk(data))
    yield from _as_far_as_let_in("artifact store", lambda: [findings.artifact_store(data)])
    yield from _as_far_as_let_in("database", lambda: _of_database(data))
    yield from _as_far_as_let_in("server", lambda: _of_servers(data, url, token))


def _as_far_as_let_in(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What is found, and a fault where this user may not look: whoever asks wants the rest all the same."""
    from coordinator.cli import findings

    try:
        yield from look()
    except OSError as error:
        next_step = "Give doctor as the user that runs the coordinator, who must own the data folder."
        yield findings.fault(check, str(error), next_step)


def _of_servers(data: Path, url: str | None, token: str | None) -> Iterator[Finding]:
    from coordinator.cli import findings

    urls, token = url or _written(data / "address"), token or _written(data / "admin.token")
    yield from asyncio.run(_gathered(findings.servers(urls, token)))


def _of_database(data: Path) -> Iterator[Finding]:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    from coordinator.cli import findings
    from coordinator.server import database_url
    from coordinator.storage.database import DatabaseError
    from coordinator.storage.postgres import EmbeddedPostgresError

    settings = settings_of(data)
    if settings.database_url is None and not (data / "postgres").is_dir():
        next_step = "'coordinator serve' makes one there; name another folder with --data, or set DATABASE_URL."
        yield findings.fault("database", f"there is none in {data}", next_step)
        return
    where = str(data / "postgres")
    try:
        if settings.database_url is not None:
            where = "DATABASE_URL"
            where = make_url(settings.database_url.get_secret_value()).render_as_string(hide_password=True)
        with database_url(settings, say) as url:
            yield from asyncio.run(_gathered(findings.database(url)))
    except ArgumentError:
        next_step = "Write it as postgresql://user:password@host/database."
        yield findings.fault("database", "DATABASE_URL is no address of a database", next_step)
    except (SQLAlchemyError, OSError, DatabaseError) as error:
        yield findings.unreachable(where, error)
    except EmbeddedPostgresError as error:
        yield findings.fault("database", str(error), f"Look at {data / 'postgres' / 'postgres.log'}.")


async def _gathered(finding: AsyncIterator[Finding]) -> list[Finding]:
    return [found async for found in finding]


def _written(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
