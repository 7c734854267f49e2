"""Request limits: a token's own pace, and the pace of those who guess tokens, without harm to their neighbours."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.app import create_app
from coordinator.errors import Refusal
from coordinator.operations import good_tokens
from coordinator.operations.limits import FAILURES_AT_ONCE, MOST_KEYS, Buckets, Limits, network
from coordinator.storage.database import connect
from tests.api.ledger import Api, Ledger, ok, refused


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def nobody(_: bytes) -> bool:
    """No token is good."""
    return False


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def limited(database_url: str, tmp_path: Path, clock: Clock) -> AsyncIterator[Api]:
    """An app whose tokens may send two requests a second, four at once."""
    database = connect(database_url, pool_size=4)
    app = create_app(database, tmp_path / "artifacts", limits=Limits(2, guesses=True, clock=clock))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as http:
            api = Api(app, database, http, {})
            await api.token("admin", "admin")
            await api.token("other", "admin")
            yield api


async def test_a_token_that_calls_too_often_is_told_when_to_come_again(limited: Api, clock: Clock) -> None:
    await Ledger.create(limited)
    for _ in range(3):
        ok(await limited.call("GET", "/runs"))
    slow = await limited.call("GET", "/runs")
    refused(slow, 429, "rate_limited")
    assert slow.headers["retry-after"] == "1"
    ok(await limited.call("GET", "/runs", who="other"))
    clock.now += 0.5
    ok(await limited.call("GET", "/runs"))
    refused(await limited.call("GET", "/runs"), 429, "rate_limited")
    ok(await limited.call("GET", "/runs/run/watch?wait_seconds=0.1", who="other"))


async def test_guessing_is_slow_and_neighbours_go_on(limited: Api, clock: Clock) -> None:
    ok(await limited.call("GET", "/runs"))  # known here from now on
    for n in range(int(FAILURES_AT_ONCE)):
        refused(await limited.call("GET", "/runs", who=f"rct_guess_{n}"), 401, "unauthenticated")
        refused(await limited.call("GET", "/runs", who="rct_guess_0"), 401, "unauthenticated")  # not a guess any more
    stopped = await limited.call("GET", "/runs", who="rct_guess_more")
    assert stopped.headers["retry-after"] == "1"
    refused(stopped, 429, "rate_limited")
    ok(await limited.call("GET", "/runs", who="other"))  # which was never seen here
    ok(await limited.call("GET", "/runs"))
    refused(await limited.call("GET", "/runs", who="rct_guess_more"), 429, "rate_limited")
    clock.now += 2.0
    refused(await limited.call("GET", "/runs", who="rct_guess_more"), 401, "unauthenticated")


def test_what_is_remembered_has_a_bound(clock: Clock) -> None:
    buckets: Buckets[int] = Buckets(1, 1, clock)
    for key in range(MOST_KEYS + 10):
        buckets.take(key)
    assert len(buckets._levels) == MOST_KEYS
    assert buckets.seconds_until(MOST_KEYS) == 1
    assert buckets.seconds_until(0) == 0


async def test_guesses_by_the_hundred_cost_one_read(limited: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a fleet behind the guesser's address signs in all the same, after a restart that forgot everybody."""
    for n in range(int(FAILURES_AT_ONCE)):
        refused(await limited.call("GET", "/runs", who=f"rct_guess_{n}"), 401, "unauthenticated")
    read, reads = limited.database.read, Counter[str]()

    async def counted(work: Any, *args: Any) -> Any:
        reads[work.__name__] += 1
        return await read(work, *args)

    monkeypatch.setattr(limited.database, "read", counted)
    monkeypatch.setattr(good_tokens, "KEPT_SECONDS", 1e6)
    guesses = [limited.call("GET", "/runs", who=f"rct_more_{n}") for n in range(200)]
    answers = await asyncio.gather(*guesses, limited.call("GET", "/runs", who="other"))
    assert [answer.status_code for answer in answers] == [429] * 200 + [200]
    assert (reads["valid_hashes"], reads["authenticate"]) == (1, 1)


async def test_without_a_bound_nothing_is_remembered(clock: Clock) -> None:
    limits = Limits(clock=clock)
    for _ in range(1000):
        await limits.admit(b"token", "10.0.0.1", nobody)
        limits.failed(b"none", "10.0.0.1")
    bounded = Limits(0, guesses=True, clock=clock)
    for _ in range(int(FAILURES_AT_ONCE)):
        bounded.failed(b"none", "2001:db8::1")
    with pytest.raises(Refusal, match="rate_limited"):
        await bounded.admit(b"another", "2001:db8::ffff", nobody)
    await bounded.admit(b"another", "2001:db8:1::1", nobody)


def test_an_ipv6_host_is_its_network() -> None:
    assert network("2001:db8::1") == network("2001:db8::2") != network("2001:db8:0:1::1")
    assert network("10.0.0.1") != network("10.0.0.2")
    assert network("::ffff:10.0.0.1") == network("10.0.0.1") != network("::ffff:10.0.0.2")
    assert network("fe80::1%eth0") == network("fe80::2%eth0")
    assert network("testclient") == "testclient"
