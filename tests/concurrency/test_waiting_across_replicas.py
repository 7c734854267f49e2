"""Calls that wait at one replica are answered because of what was done at another. No poll wakes anyone here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import AsyncAdaptedQueuePool, Connection, event

from coordinator.app import create_app
from coordinator.storage.database import connect
from tests.api.ledger import Api, Ledger, ok

LONG = 3600


@contextlib.asynccontextmanager
async def replica(database_url: str, folder: Path) -> AsyncIterator[Api]:
    database = connect(database_url, pool_size=4)
    app = create_app(database, folder / "artifacts")
    app.state.changes._poll_seconds = LONG
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test", timeout=60) as http,
    ):
        yield Api(app, database, http, {})


@pytest.fixture
async def replicas(database_url: str, tmp_path: Path) -> AsyncIterator[tuple[Api, Api]]:
    """Two apps over one database, both connected for notices."""
    async with replica(database_url, tmp_path) as one, replica(database_url, tmp_path) as two:
        await one.token("admin", "admin")
        two.secrets = one.secrets
        for sender, hearer in ((one, two), (two, one)):
            with hearer.app.state.changes.follow("connected") as follower:
                heard = asyncio.create_task(follower.next(60))
                while not heard.done():
                    sender.app.state.changes.announce("connected")
                    await asyncio.sleep(0.02)
        yield one, two


async def until_they_wait(api: Api, waits: list[asyncio.Task[httpx.Response]]) -> None:
    """Until these calls have asked and none of them, with whatever they hold, moves any more."""
    pool = api.database.engine.pool
    assert isinstance(pool, AsyncAdaptedQueuePool)
    quiet = 0
    while quiet < 5:
        await asyncio.sleep(0.05)
        assert not any(wait.done() for wait in waits)
        quiet = quiet + 1 if pool.checkedout() == 0 and "run" in api.app.state.changes._followers else 0


def watching(api: Api, seen: int, count: int) -> list[asyncio.Task[httpx.Response]]:
    path = f"/runs/run/watch?after={seen}&wait_seconds={LONG}"
    return [asyncio.create_task(api.call("GET", path)) for _ in range(count)]


async def test_a_watch_at_one_replica_ends_with_a_change_through_the_other(replicas: tuple[Api, Api]) -> None:
    one, two = replicas
    ledger = await Ledger.create(one, longest_wait_seconds=LONG)
    seen = ok(await two.call("GET", "/runs/run/watch"))["event_no"]
    waits = watching(two, seen, 50)
    await until_they_wait(two, waits)
    ok(await ledger.open())
    answers = await asyncio.wait_for(asyncio.gather(*waits), 30)
    assert {ok(answer)["event_no"] for answer in answers} == {seen + 1}


async def test_who_waits_for_candidates_is_woken_by_rewards_through_the_other(replicas: tuple[Api, Api]) -> None:
    one, two = replicas
    ledger = await Ledger.create(one, longest_wait_seconds=LONG)
    await ledger.worker()
    ok(await ledger.open())
    body = {"owner": "t-1", "groups": 1, "wait_seconds": LONG}
    wait = asyncio.create_task(two.call("POST", "/runs/run/updates/u/candidates", body))
    await until_they_wait(two, [wait])
    rollouts = await ledger.group("g")
    candidates = ok(await asyncio.wait_for(wait, 30))
    assert {rollout["rollout_id"] for rollout in candidates["rollouts"]} == set(rollouts)


async def test_many_who_wait_hold_no_connection_and_ask_together(replicas: tuple[Api, Api]) -> None:
    _, two = replicas
    await Ledger.create(two, longest_wait_seconds=LONG)
    seen = ok(await two.call("GET", "/runs/run/watch"))["event_no"]
    waits = watching(two, seen, 200)
    await until_they_wait(two, waits)  # no connection is out
    asked: list[str] = []

    @event.listens_for(two.database.engine.sync_engine, "begin")
    def count(_: Connection) -> None:
        asked.append("transaction")

    two.app.state.changes.announce("run")
    await until_they_wait(two, waits)
    assert 1 <= len(asked) < 20  # one question for all, and what the sweeping clock asks
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
