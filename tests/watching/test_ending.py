"""A server that ends sends its watchers elsewhere in good order, and a database that sleeps loses them nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from coordinator.watching import stream as watching_stream
from tests.api.ledger import Api, Ledger, ok
from tests.database import databases
from tests.watching.serving import Served, numbers, serving, streaming, until


@contextlib.asynccontextmanager
async def caller(served: Served, secrets: dict[str, str]) -> AsyncIterator[Api]:
    async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as http:
        yield Api(served.app, served.database, http, secrets)


async def test_whoever_waits_is_answered_at_the_end_and_goes_on_elsewhere(database_url: str, tmp_path: Path) -> None:
    async with (
        serving(database_url, tmp_path) as one,
        serving(database_url, tmp_path) as two,
        caller(one, {}) as first,
        caller(two, first.secrets) as second,
    ):
        await first.token("admin", "admin")
        ledger = await Ledger.create(first, longest_wait_seconds=600)
        ok(await ledger.open())
        async with streaming(first) as stream, streaming(first, "?after=0") as other:
            assert (await stream.next()).id == "2"
            assert numbers(await other.take(2)) == [1, 2]
            watching = asyncio.create_task(first.call("GET", "/runs/run/watch?after=2&wait_seconds=600"))
            body = {"owner": "t-1", "groups": 1, "wait_seconds": 600}
            asking = asyncio.create_task(first.call("POST", "/runs/run/updates/u/candidates", body))
            await until(lambda: len(one.app.state.changes._followers["run"]) == 3)  # watchers, feed, candidates
            await one.stop()
            assert [event async for event in stream] == []
            assert [event async for event in other] == []
        # The process ended before its patience with open requests did: nothing was cut off.
        assert ok(await watching)["event_no"] == 2
        assert ok(await asking)["rollouts"] == []
        async with streaming(second, last=stream.place) as again:
            ok(await second.call("POST", "/runs/run/updates/u/renew", {"owner": "t-1"}))
            assert numbers(await again.take(1)) == [3]


@pytest.fixture
def own_url() -> Iterator[str]:
    """A database on a Postgres that nobody else uses."""
    with databases() as postgres:
        yield postgres.migrated()


@contextlib.asynccontextmanager
async def asleep(database_url: str) -> AsyncIterator[None]:
    """Postgres with all its processes, stopped as on a machine that hangs."""
    connection = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    folder = Path(await connection.fetchval("SHOW data_directory"))
    rows = await connection.fetch("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    await connection.close()
    pids = [int((folder / "postmaster.pid").read_text().split()[0]), *(row["pid"] for row in rows)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def test_a_database_that_sleeps_ends_no_stream_and_no_long_poll(
    own_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching_stream, "KEEP_ALIVE_SECONDS", 0.1)
    async with serving(own_url, tmp_path) as served, caller(served, {}) as api:
        await api.token("admin", "admin")
        ledger = await Ledger.create(api, longest_wait_seconds=600)
        async with streaming(api, "?after=1") as stream, streaming(api, "?after=0") as other:
            assert numbers(await other.take(1)) == [1]
            reading = asyncio.create_task(stream.take(3))
            watching = asyncio.create_task(api.call("GET", "/runs/run/watch?after=1&wait_seconds=600"))
            await until(lambda: stream.comments > 0 and len(api.app.state.changes._followers["run"]) == 2)
            async with asleep(own_url):
                writing = asyncio.create_task(ledger.open("during"))
                api.app.state.changes.announce("run")
                before = stream.comments
                await until(lambda: stream.comments > before + 15)  # more than a second: every question hangs
                assert (await api.http.get("/healthz")).status_code == 200
                assert not (reading.done() or watching.done() or writing.done())
            ok(await writing)
            assert ok(await watching)["event_no"] == 2
            ok(await ledger.open("after"))
            ok(await ledger.open("last"))
            assert numbers(await reading) == numbers(await other.take(3)) == [2, 3, 4]


async def test_a_server_whose_database_sleeps_ends_its_streams(own_url: str, tmp_path: Path) -> None:
    async with serving(own_url, tmp_path) as served, caller(served, {}) as api:
        await api.token("admin", "admin")
        await Ledger.create(api)
        async with streaming(api, "?after=0") as stream:
            assert numbers(await stream.take(1)) == [1]
            async with asleep(own_url):
                served.server.should_exit = True
                async with asyncio.timeout(30):
                    assert [event async for event in stream] == []
