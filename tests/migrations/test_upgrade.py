"""An upgrade as it happens: a schema that this release does not know, a migration beside others, and one under load."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy.engine import make_url

from coordinator.client import Coordinator
from coordinator.storage.migrations import newest
from tests.client.server_process import ServerProcess
from tests.database import Databases
from tests.ledger_checker import check_ledger
from tests.load import Clients, start_run
from tests.migrations.previous import at_previous, copy_into, plain, previous

GROWS = {
    "journal", "rollouts", "rollout_evidence", "rollout_audit", "tombstones", "rewards", "groups", "update_members",
    "failures", "acks",
}  # fmt: skip
"""The tables that grow with the rollouts, to hundreds of millions of rows."""


def execute(url: str, *statements: str) -> list[Any]:
    """The rows of the last statement, each statement in a transaction of its own."""

    async def run() -> list[Any]:
        connection = await asyncpg.connect(plain(url))
        try:
            rows: list[Any] = []
            for statement in statements:
                rows = await connection.fetch(statement)
            return rows
        finally:
            await connection.close()

    return asyncio.run(run())


def environment(url: str) -> dict[str, str]:
    foreign = ("COORDINATOR_", "DATABASE_URL")
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)} | {"DATABASE_URL": plain(url)}


def coordinator(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "coordinator.cli", *arguments]
    return subprocess.run(command, env=environment(url), capture_output=True, text=True, timeout=120, check=False)


def refused(url: str, folder: Path) -> str:
    """What `coordinator serve` says as it refuses to start."""
    done = coordinator(url, "serve", "--port", "0", "--data", str(folder / "refused"))
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@contextmanager
def migrating(url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "coordinator.cli", "migrate"], env=environment(url), stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def files_of_tables(url: str) -> dict[str, int]:
    """The file of each table's rows: another one after a table was written anew."""
    rows = execute(url, "SELECT relname, relfilenode FROM pg_class WHERE relkind = 'r' AND relname = ANY(ARRAY"
                        f"{sorted(GROWS)})")  # fmt: skip
    return {str(row[0]): row[1] for row in rows}


WAITING = """
    SELECT pid, xact_start FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()
"""


def once_waiting(url: str, process: subprocess.Popen[bytes], log: Path, not_before: Any = None) -> Any:
    """The migration's backend and transaction, as soon as it waits for a lock; after that transaction, if named."""
    until = time.monotonic() + 60
    while True:
        found = [row for row in execute(url, WAITING) if not_before is None or row["xact_start"] > not_before]
        if found:
            return found[0]
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


async def test_a_migration_blocks_nobody_for_long_gives_way_and_is_done_whole_or_not_at_all(
    postgres: Databases, tmp_path: Path
) -> None:
    url = await asyncio.to_thread(at_previous, postgres)
    files = await asyncio.to_thread(files_of_tables, url)
    log = tmp_path / "migrate.log"
    # At its very end it enters the new revision: held there, it shows every lock that it has taken.
    holder = await asyncpg.connect(plain(url))
    try:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("LOCK TABLE alembic_version IN SHARE MODE")
        with migrating(url, log) as process:
            first = await asyncio.to_thread(once_waiting, url, process, log)
            held = await asyncio.to_thread(
                execute, url,
                f"SELECT relation::regclass::text, mode FROM pg_locks WHERE pid = {first['pid']} AND granted"
                " AND locktype = 'relation'",
            )  # fmt: skip
            process.kill()
            process.wait()
        message = await asyncio.to_thread(refused, url, tmp_path)
        assert f"at revision {previous()}, this release knows {newest()}; run 'coordinator migrate'" in message

        with migrating(url, log) as process:
            second = await asyncio.to_thread(once_waiting, url, process, log, first["xact_start"])
            # Its transaction ends, and with it all of its locks, and another one begins.
            await asyncio.to_thread(once_waiting, url, process, log, second["xact_start"])
            await transaction.rollback()
            assert await asyncio.to_thread(process.wait, 60) == 0, log.read_text()
        assert "trying again" in log.read_text()
    finally:
        await holder.close()
    # An index made without CONCURRENTLY, and a row that is changed, hold writers up for as long as a table is big.
    assert not {(table, mode) for table, mode in held if table in GROWS and mode in ("ShareLock", "RowExclusiveLock")}
    assert await asyncio.to_thread(files_of_tables, url) == files, "a table was written anew"


def test_a_schema_of_a_newer_release_and_one_of_none_are_refused_with_what_to_do(
    postgres: Databases, database_url: str, tmp_path: Path
) -> None:
    assert f"at revision none, this release knows {newest()}; run 'coordinator migrate'" in refused(
        postgres.empty(), tmp_path
    )
    execute(database_url, "UPDATE alembic_version SET version_num = '9999'")
    message = refused(database_url, tmp_path)
    assert f"at revision 9999, this release knows {newest()}; a newer release has migrated it" in message


@pytest.fixture
def server(postgres: Databases, tmp_path: Path) -> Iterator[ServerProcess]:
    """One of this release, on a Postgres of its own accord."""
    server = ServerProcess(tmp_path / "data", plain(postgres.migrated()))
    server.start()
    yield server
    server.stop()


def swap(postgres: Databases, url: str, older: str) -> None:
    """The older database takes the name of this one."""
    name, other = make_url(url).database, make_url(older).database
    maintenance = postgres.url_of("template1")
    execute(
        maintenance, f'ALTER DATABASE "{name}" RENAME TO "{name}_newer"', f'ALTER DATABASE "{other}" RENAME TO "{name}"'
    )


def of_the_next_release() -> list[str]:
    """A migration as the next release might bring it: it only adds."""
    added = [f'ALTER TABLE "{table}" ADD COLUMN of_the_next_release integer DEFAULT 7' for table in sorted(GROWS)]
    return [
        "SET lock_timeout = '3s'",
        *added,
        "CREATE TABLE of_the_next_release (n integer PRIMARY KEY)",
        "UPDATE alembic_version SET version_num = '9999'",
    ]


@pytest.mark.long
def test_nothing_is_lost_when_the_schema_moves_under_load(
    postgres: Databases, server: ServerProcess, tmp_path: Path
) -> None:
    assert server.database_url is not None
    url = server.database_url
    with Coordinator(server.url, server.token) as coordinator_:
        clients = Clients(tmp_path, start_run(coordinator_, "upgraded"), [(server.url, server.token)])
        try:
            for role, name in (("produce", "w1"), ("judge", "j1"), ("train", "t1"), ("publish", "p1")):
                clients.start(role, name)
            for kind, count in (("commit", 3), ("active", 2), ("reward", 100)):
                clients.wait_for(kind, count)

            # The release before: its schema, and all that it would have stored. The clients call on meanwhile.
            server.stop()
            older = at_previous(postgres)
            copy_into(url, older)
            swap(postgres, url, older)
            assert "run 'coordinator migrate'" in refused(url, tmp_path)
            done = coordinator(url, "migrate")
            assert done.returncode == 0, done.stderr
            server.start()
            clients.wait_for("commit", clients.count("commit") + 3)

            # The release after: its migration comes while this one serves, which goes on.
            execute(url, *of_the_next_release())
            for kind, more in (("rollout", 100), ("reward", 50), ("commit", 3), ("active", 1)):
                clients.wait_for(kind, clients.count(kind) + more)
            told, faults, retries = clients.told()
        finally:
            clients.stop()
    assert faults == []
    assert retries, "no client noticed that the coordinator was away"
    assert check_ledger(url, {"upgraded": told}) == []
    assert "Traceback" not in server.log.read_text()
    execute(url, f"UPDATE alembic_version SET version_num = '{newest()}'")
    done = coordinator(url, "verify")
    assert (done.returncode, "breaches 0" in done.stdout) == (0, True), done.stdout + done.stderr
