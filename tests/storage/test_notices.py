"""A change made through one replica is heard at another. No poll wakes anyone here, so only a notice can have."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from coordinator import clocks
from coordinator.policies.verification import Verifier
from coordinator.storage.artifacts import ArtifactStore
from coordinator.storage.changes import Changes
from coordinator.storage.database import connect
from coordinator.storage.locations import Locations
from coordinator.storage.migrations import upgrade
from coordinator.storage.notices import CHANNEL, PAUSE_SECONDS, PAYLOAD_BYTES, Notices, payloads
from coordinator.storage.postgres import EmbeddedPostgres

NEVER = 3600.0
SENDERS = (
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'coordinator notices' AND datname = current_database()"
)


@contextlib.asynccontextmanager
async def replica(url: str) -> AsyncIterator[Changes]:
    """The notices of one replica at work on this database."""
    database, changes = connect(url, pool_size=1), Changes(poll_seconds=NEVER)
    task = asyncio.create_task(Notices(database, changes).run())
    try:
        yield changes
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await database.close()


@contextlib.asynccontextmanager
async def direct(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        yield connection
    finally:
        await connection.close()


async def until_heard(sender: Changes, hearer: Changes, run_id: str) -> None:
    """Announces until it is heard: for as long as the connections are being made."""
    with hearer.follow(run_id) as follower:
        heard = asyncio.create_task(follower.next(NEVER))
        async with asyncio.timeout(30):
            while not heard.done():
                sender.announce(run_id)
                await asyncio.sleep(0.05)


async def test_a_follower_at_one_replica_hears_what_another_announces(database_url: str) -> None:
    async with replica(database_url) as one, replica(database_url) as two:
        await until_heard(one, two, "first")
        await until_heard(two, one, "first")
        with two.follow("run") as follower, two.follow("other") as other:
            bystander = asyncio.create_task(other.next(NEVER))
            one.announce("run")
            await asyncio.wait_for(follower.next(NEVER), 30)
            assert not bystander.done()
            bystander.cancel()


async def test_a_lost_connection_is_made_anew_and_said_once(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coordinator")
    async with replica(database_url) as one, replica(database_url) as two, direct(database_url) as admin:
        await until_heard(one, two, "first")
        await until_heard(two, one, "first")
        with two.follow("quiet") as follower:
            ended = await admin.fetchval(f"SELECT count(pg_terminate_backend(pid)) FROM ({SENDERS}) AS senders")
            assert ended == 2
            # Nobody announced it: whoever missed notices wakes everyone when it hears again.
            await asyncio.wait_for(follower.next(NEVER), 30)
        await until_heard(one, two, "second")
        await until_heard(two, one, "second")
    lines = [(record.levelname, record.exc_info) for record in caplog.records if record.name == "coordinator.notices"]
    assert sorted(lines) == [("INFO", None), ("INFO", None), ("WARNING", None), ("WARNING", None)]


async def test_what_is_announced_while_nobody_can_be_told_is_told_later(database_url: str) -> None:
    async with replica(database_url) as two:
        one = Changes(poll_seconds=NEVER)
        one.announce("run")  # its notices have no connection yet
        with two.follow("run") as follower:
            await until_heard_by_itself(two, database_url)
            await follower.next(0)
            database = connect(database_url, pool_size=1)
            task = asyncio.create_task(Notices(database, one).run())
            await asyncio.wait_for(follower.next(NEVER), 30)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await database.close()


async def test_what_was_being_told_when_the_connection_broke_is_told_again(database_url: str) -> None:
    async with replica(database_url) as two, direct(database_url) as admin:
        await until_heard_by_itself(two, database_url)
        before = await admin.fetch(SENDERS)
        async with replica(database_url) as one:
            await until_heard(one, two, "first")
            await asyncio.sleep(3 * PAUSE_SECONDS)
            (pid,) = {row["pid"] for row in await admin.fetch(SENDERS)} - {row["pid"] for row in before}
            with two.follow("run") as follower:
                os.kill(pid, signal.SIGSTOP)
                try:
                    one.announce("run")
                    await asyncio.sleep(0.2)
                    assert one.take_untold() == set()  # it is under way
                    await admin.execute("SELECT pg_terminate_backend($1)", pid)
                finally:
                    os.kill(pid, signal.SIGCONT)
                await asyncio.wait_for(follower.next(NEVER), 30)


async def until_heard_by_itself(hearer: Changes, url: str) -> None:
    """Notifies by hand until it is heard."""
    async with direct(url) as connection:
        with hearer.follow("by-hand") as follower:
            heard = asyncio.create_task(follower.next(NEVER))
            async with asyncio.timeout(30):
                while not heard.done():
                    await connection.execute(f"SELECT pg_notify('{CHANNEL}', 'by-hand')")
                    await asyncio.sleep(0.05)


async def until_told(listener: asyncpg.Connection, heard: list[str], names: set[str]) -> None:
    """Postgres tells each connection in its own time."""
    until = asyncio.get_running_loop().time() + 30
    while not names <= {run_id for payload in heard for run_id in payload.split(",")}:
        assert asyncio.get_running_loop().time() < until, heard
        await listener.fetchval("SELECT 1")
        await asyncio.sleep(0.01)


async def test_a_storm_of_announcements_is_few_notices(database_url: str) -> None:
    heard: list[str] = []
    loop = asyncio.get_running_loop()
    async with replica(database_url) as one, replica(database_url) as two, direct(database_url) as listener:
        await until_heard(one, two, "first")
        await listener.add_listener(CHANNEL, lambda *notice: heard.append(notice[-1]))
        began = loop.time()
        for number in range(1000):
            one.announce(f"run-{number % 5}")
            await asyncio.sleep(0.001 if number % 10 else 0)
        with two.follow("last") as follower:
            one.announce("last")
            await asyncio.wait_for(follower.next(NEVER), 30)
        elapsed = loop.time() - began
        await until_told(listener, heard, {"last"})
    assert 2 <= len(heard) <= elapsed / PAUSE_SECONDS + 2
    assert {run_id for payload in heard for run_id in payload.split(",")} >= {f"run-{n}" for n in range(5)} | {"last"}


async def test_many_runs_travel_in_payloads_that_postgres_takes(database_url: str) -> None:
    names = {f"{number:0>200}" for number in range(300)}
    heard: list[str] = []
    async with replica(database_url) as one, replica(database_url) as two, direct(database_url) as listener:
        await until_heard(one, two, "first")
        await listener.add_listener(CHANNEL, lambda *notice: heard.append(notice[-1]))
        with contextlib.ExitStack() as stack:
            followers = [stack.enter_context(two.follow(name)) for name in names]
            for name in names:
                one.announce(name)
            await asyncio.wait_for(asyncio.gather(*[follower.next(NEVER) for follower in followers]), 30)
        await until_told(listener, heard, names)
    assert {run_id for payload in heard for run_id in payload.split(",")} - {"first"} == names
    assert max(map(len, heard)) <= PAYLOAD_BYTES
    assert len([payload for payload in heard if payload != "first"]) == 8  # 39 names of 200 bytes in each but the last


def test_payloads_hold_as_much_as_they_may() -> None:
    assert list(payloads([])) == []
    assert list(payloads(["a", "b"])) == ["a,b"]
    exact = ["x" * 3999, "y" * 3999]
    assert [len(payload) for payload in payloads(exact)] == [PAYLOAD_BYTES]
    assert [len(payload) for payload in payloads([*exact, "z"])] == [PAYLOAD_BYTES, 1]


async def test_the_longest_payload_is_one_that_postgres_takes(database_url: str) -> None:
    async with direct(database_url) as connection:
        await connection.execute("SELECT pg_notify('c', $1)", "x" * PAYLOAD_BYTES)
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await connection.execute("SELECT pg_notify('c', $1)", "x" * (PAYLOAD_BYTES + 1))


@pytest.fixture
def own_postgres() -> Iterator[EmbeddedPostgres]:
    """A server that the test may stop."""
    folder = Path(tempfile.mkdtemp(prefix="coordinator-outage-"))
    folder.chmod(0o755)  # as root, Postgres runs as another user
    server = EmbeddedPostgres(folder / "postgres", progress=lambda _: None)
    upgrade(server.start())
    yield server
    server.stop()
    shutil.rmtree(server.home)
    shutil.rmtree(folder, ignore_errors=True)


async def test_a_database_that_is_away_for_seconds_is_two_lines_of_each_task(
    own_postgres: EmbeddedPostgres,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(clocks, "EVERY_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "coordinator")
    url = own_postgres.start()
    database = connect(url, pool_size=2)
    async with replica(url) as one, replica(url) as two:
        store = ArtifactStore(tmp_path / "artifacts")
        verifier = Verifier(database, one, store, Locations())
        sweeper = asyncio.create_task(clocks.run(database, one, store, verifier, clocks.Sweeps()))
        await until_heard(one, two, "first")
        await asyncio.to_thread(own_postgres.stop)
        await asyncio.sleep(3)
        said = [record.name for record in caplog.records]
        assert sorted(said) == ["coordinator.clocks", "coordinator.notices", "coordinator.notices"]
        await asyncio.to_thread(own_postgres.start)
        await until_heard(one, two, "second")
        await until_heard(two, one, "second")
        for _ in range(600):
            if len(caplog.records) == 6:
                break
            await asyncio.sleep(0.05)
        sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeper
    await database.close()
    store.close()
    for name, count in (("coordinator.clocks", 1), ("coordinator.notices", 2)):
        records = [record for record in caplog.records if record.name == name]
        assert sorted(record.levelname for record in records) == ["INFO"] * count + ["WARNING"] * count
        assert all(record.exc_info is None and "\n" not in record.getMessage() for record in records)
