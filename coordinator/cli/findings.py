"""What doctor looks at: each check answers a finding, with what to do where something is wrong."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import asyncpg
import httpx
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from coordinator.cli.output import seconds_in_words, shown
from coordinator.storage.artifacts import sync_folder
from coordinator.storage.database import Database, DatabaseError, check_durability, connect
from coordinator.storage.migrations import check_schema, newest
from coordinator.storage.notices import listening_connection
from coordinator.tokens import service as tokens

CLOCKS_APART_SECONDS = 1.0
HEARD_WITHIN_SECONDS = 2.0
EXPIRES_SOON = timedelta(days=7)
GIB = 2**30
OLDEST_POSTGRES, NEWEST_POSTGRES = 15, 18


class Finding(BaseModel):
    """One line of doctor. A warning is for soon, a fault for now."""

    check: str
    verdict: Literal["ok", "warning", "fault"]
    detail: str
    next_step: str | None = None


class Findings(BaseModel):
    """All of them, in the order in which they were looked at."""

    findings: list[Finding]


def ok(check: str, detail: str) -> Finding:
    """Nothing to do."""
    return Finding(check=check, verdict="ok", detail=detail)


def warning(check: str, detail: str, next_step: str) -> Finding:
    """Something to do soon."""
    return Finding(check=check, verdict="warning", detail=detail, next_step=next_step)


def fault(check: str, detail: str, next_step: str) -> Finding:
    """Something to do now."""
    return Finding(check=check, verdict="fault", detail=detail, next_step=next_step)


# the disk


def disk(data: Path) -> Iterator[Finding]:
    """The space where artifacts and an embedded Postgres lie."""
    folders = {"data folder": data}
    elsewhere = data / "postgres" / "elsewhere"
    if elsewhere.is_file():
        folders["embedded Postgres"] = Path(elsewhere.read_text().strip())
    for what, folder in folders.items():
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        usage = shutil.disk_usage(there)
        yield space(f"disk of the {what}", folder, usage.free, usage.total)


def space(check: str, folder: Path, free: int, total: int) -> Finding:
    """Whether there is enough of it: a fault below 1 GiB, a warning below 10 GiB that are less than a tenth."""
    detail = f"{free / GIB:.1f} of {total / GIB:.0f} GiB are free at {folder}"
    next_step = (
        "Make room: 'coordinator prune' removes what is over, and the runs' retention settings keep less of the runs "
        "to come."
    )
    if free < GIB:
        return fault(check, detail, next_step)
    if free < 10 * GIB and free < total / 10:
        return warning(check, detail, next_step)
    return ok(check, detail)


def artifact_store(data: Path) -> Finding:
    """Whether a file can be written, synced, locked against another server, and renamed there."""
    check, folder = "artifact store", data / "artifacts"
    if not folder.is_dir():
        return warning(
            check,
            f"there is no {folder}",
            "The first start of 'coordinator serve' makes it; if one has been started, name its folder with --data.",
        )
    name = folder / f"doctor-{secrets.token_hex(8)}"
    moved = name.with_suffix(".moved")
    try:
        with name.open("xb") as file:
            file.write(b"doctor")
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX)
            with name.open("rb") as second:
                try:
                    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    pass  # as it should be
                else:
                    return fault(
                        check,
                        f"flock has no effect at {folder}",
                        "Use a file system that has it (any local one, NFS from version 4 on): two servers could write "
                        "to one upload.",
                    )
        name.rename(moved)
        sync_folder(folder)
    except OSError as error:
        return fault(
            check,
            f"{folder}: {error}",
            "Let the user that runs the coordinator own it, on a disk that is writable and has fsync and flock.",
        )
    finally:
        for path in (name, moved):
            path.unlink(missing_ok=True)
    return ok(check, f"{folder} can be written; fsync and flock work")


# the database


async def database(url: str) -> AsyncIterator[Finding]:
    """Everything about the database; no more than the first fault where it does not answer."""
    where = make_url(url).render_as_string(hide_password=True)
    there = connect(url, pool_size=1)
    try:
        try:
            yield await _reached(there, where)
        except (SQLAlchemyError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            yield unreachable(where, error)
            return
        yield await _durable(there)
        schema = await _schema(there)
        yield schema
        yield await _clock(there)
        yield await _listens(there)
        if schema.verdict == "ok":
            yield await _tokens(there)
    finally:
        await there.close()


def unreachable(where: str, error: Exception) -> Finding:
    """The database gives no connection."""
    cause = " ".join(str(getattr(error, "orig", None) or error).split())
    return fault("database", f"{where}: {cause}", "Start it, or correct DATABASE_URL: host, port, user, password.")


async def _reached(there: Database, where: str) -> Finding:
    async with there.engine.connect() as connection:
        row = (
            await connection.execute(
                text(
                    "SELECT current_setting('server_version') AS version, pg_is_in_recovery() AS standby, "
                    "current_setting('server_version_num')::int / 10000 AS major, "
                    "current_setting('transaction_read_only') = 'on' AS read_only"
                )
            )
        ).one()
    detail = f"PostgreSQL {row.version} at {where}"
    if row.standby or row.read_only:
        return fault(
            "database",
            f"{detail} takes no writes" + (", it is a standby" if row.standby else ""),
            "Let DATABASE_URL lead to the primary.",
        )
    if row.major < OLDEST_POSTGRES:
        return fault("database", detail, f"Upgrade it: {OLDEST_POSTGRES} or later is needed.")
    if row.major > NEWEST_POSTGRES:
        return warning("database", detail, f"This release was tested with {OLDEST_POSTGRES} to {NEWEST_POSTGRES}.")
    return ok("database", detail)


async def _durable(there: Database) -> Finding:
    try:
        await check_durability(there)
    except DatabaseError as error:
        what, _, next_step = str(error).partition("; ")
        return fault("durability", what, f"{next_step[0].upper()}{next_step[1:]}.")
    return ok("durability", "fsync and synchronous_commit are on")


async def _schema(there: Database) -> Finding:
    try:
        await check_schema(there)
    except DatabaseError as error:
        what, _, next_step = str(error).rpartition("; ")
        return fault("schema", what, f"{next_step[0].upper()}{next_step[1:]}.")
    return ok("schema", f"at revision {newest()}, as this release knows it")


async def _clock(there: Database) -> Finding:
    async with there.engine.connect() as connection:
        began = time.time()
        moment = (await connection.execute(text("SELECT clock_timestamp()"))).scalar_one().timestamp()
        ended = time.time()
    return clocks(moment - (began + ended) / 2, (ended - began) / 2)


def clocks(apart: float, uncertain: float) -> Finding:
    """Whether the database's clock is `apart` seconds (more than `uncertain`) before this machine's."""
    detail = f"the database's is {abs(apart):.3f} s {'before' if apart >= 0 else 'behind'} this machine's"
    if abs(apart) - uncertain > CLOCKS_APART_SECONDS:
        return warning(
            "clocks",
            detail,
            "Have both set by NTP: leases, deadlines and tokens go by the database's, logs by this machine's.",
        )
    return ok("clocks", detail)


async def _listens(there: Database) -> Finding:
    channel, heard = f"coordinator_doctor_{secrets.token_hex(4)}", asyncio.Event()
    problem = f"nothing was heard within {HEARD_WITHIN_SECONDS:.0f} s"
    try:
        listener = await listening_connection(there.engine)
        try:
            await listener.add_listener(channel, lambda *_: heard.set())
            async with there.engine.begin() as connection:
                await connection.execute(text("SELECT pg_notify(:channel, '')"), {"channel": channel})
            async with asyncio.timeout(HEARD_WITHIN_SECONDS):
                await heard.wait()
            return ok("notices", "LISTEN and NOTIFY work")
        finally:
            listener.terminate()
    except TimeoutError:
        pass
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        problem = str(error)
    return warning(
        "notices",
        f"LISTEN does not work: {problem}",
        "Let DATABASE_URL lead to Postgres itself, not through a pooler: without it servers find out of each other's "
        "changes by asking, every second.",
    )


async def _tokens(there: Database) -> Finding:
    found = (await there.transaction(tokens.list_all)).tokens
    now = datetime.now(UTC)
    valid = [t for t in found if t.revoked_at is None and (t.expires_at is None or t.expires_at > now)]
    soon = [t for t in valid if t.expires_at is not None and t.expires_at < now + EXPIRES_SOON]
    if not any(t.role == "admin" for t in valid):
        return fault(
            "tokens",
            "there is no valid admin's token",
            "'coordinator token create --role admin --name NAME' makes one.",
        )
    if soon:
        names = ", ".join(
            f"{t.name} in {seconds_in_words((t.expires_at - now).total_seconds())}" for t in soon if t.expires_at
        )
        return warning("tokens", f"these expire soon: {names}", "'coordinator token create' makes others in time.")
    return ok("tokens", f"{len(valid)} are valid, and none of them expires within {shown(EXPIRES_SOON.days)} days")


# the server


async def servers(urls: str | None, token: str | None) -> AsyncIterator[Finding]:
    """Whether a coordinator answers at each of the addresses, and lets this token in."""
    if urls is None:
        yield warning(
            "server",
            "there is no address to ask",
            "'coordinator serve' writes one into the data folder; else set COORDINATOR_URL.",
        )
        return
    async with httpx.AsyncClient(timeout=5) as http:
        for url in (part.strip().rstrip("/") for part in urls.split(",")):
            yield await _server(http, url, token)


async def _server(http: httpx.AsyncClient, url: str, token: str | None) -> Finding:
    if token is not None and not (token.isascii() and token.isprintable()):
        return fault(
            "server",
            "the token holds characters that no token has",
            "Correct COORDINATOR_TOKEN or DATA/admin.token: it is one line, as 'coordinator token create' printed it.",
        )
    try:
        ready = await http.get(f"{url}/readyz")
        signed_in = await http.get(f"{url}/v1/runs", headers={"Authorization": f"Bearer {token}"}) if token else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return fault(
            "server",
            f"{url} does not answer: {str(error) or type(error).__name__}",
            "Start it with 'coordinator serve', or correct the address.",
        )
    if ready.status_code != 200:
        return fault("server", f"{url}/readyz answers {ready.status_code}", "Look at the log of that server.")
    if signed_in is not None and signed_in.status_code == 401:
        return fault(
            "server",
            f"{url} is ready, but does not know this token",
            "Take another one ('coordinator token create'), or correct COORDINATOR_TOKEN and DATA/admin.token.",
        )
    return ok("server", f"{url} is ready" + (" and knows the token" if signed_in is not None else ""))
