"""When a token was last used: written down for the operator, and never in the way of a request."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from coordinator.operations.token_uses import TokenUses
from tests.api.ledger import Api, Ledger, ok, refused


async def last_uses(api: Api) -> dict[str, str | None]:
    """Of every token, as the list has it once everything that was noted is written."""
    await api.app.state.token_uses.write()
    return {token["name"]: token["last_used_at"] for token in ok(await api.call("GET", "/tokens"))["tokens"]}


async def age(api: Api, name: str, seconds: float) -> None:
    """Makes what is written down about a token so much older."""
    async with api.database.engine.begin() as connection:
        statement = text("UPDATE tokens SET last_used_at = last_used_at - make_interval(secs => :s) WHERE name = :name")
        await connection.execute(statement, {"s": seconds, "name": name})


async def test_a_use_is_written_down_and_again_only_after_a_minute(api: Api) -> None:
    await api.token("reader", "viewer")
    await api.token("idle", "viewer")
    began = datetime.now(UTC)
    ok(await api.call("GET", "/runs", who="reader"))
    refused(await api.call("GET", "/tokens", who="reader"), 403, "forbidden")
    refused(await api.call("GET", "/runs", who="rct_0123456789ab_wrong"), 401, "unauthenticated")
    uses = await last_uses(api)
    assert uses["idle"] is None
    first = uses["reader"]
    assert first is not None
    assert timedelta(0) <= datetime.fromisoformat(first) - began <= datetime.now(UTC) - began
    ok(await api.call("GET", "/runs", who="reader"))
    assert (await last_uses(api))["reader"] == first
    await age(api, "reader", 61)
    ok(await api.call("GET", "/runs", who="reader"))
    assert (await last_uses(api))["reader"] > first  # type: ignore[operator]


async def test_of_two_replicas_one_writes(api: Api) -> None:
    ok(await api.call("GET", "/runs"))
    assert (await last_uses(api))["admin"] is not None
    other = TokenUses(api.database)
    rows = await api.rows("SELECT token_id, xmin::text AS written_by FROM tokens")
    other.note([row.token_id for row in rows])
    await other.write()
    assert await api.rows("SELECT token_id, xmin::text AS written_by FROM tokens") == rows


async def test_a_row_that_somebody_else_holds_is_not_waited_for(api: Api) -> None:
    ok(await api.call("GET", "/runs"))
    async with api.database.engine.begin() as connection:
        await connection.execute(text("SELECT FROM tokens FOR UPDATE"))
        await connection.execute(text("SET lock_timeout = 100"))
        await api.app.state.token_uses.write()
    assert (await api.rows("SELECT last_used_at FROM tokens"))[0].last_used_at is None


async def test_a_database_that_is_read_only_fails_no_request_and_it_is_written_later(api: Api) -> None:
    ok(await api.call("GET", "/runs"))
    name = (await api.rows("SELECT current_database() AS name"))[0].name
    async with api.database.engine.begin() as connection:
        await connection.execute(text(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'))
    await api.database.engine.dispose()
    with pytest.raises(DBAPIError, match="read-only"):
        await api.app.state.token_uses.write()
    ok(await api.call("GET", "/runs"))
    async with api.database.engine.begin() as connection:
        await connection.execute(text("SET TRANSACTION READ WRITE"))
        await connection.execute(text(f'ALTER DATABASE "{name}" RESET default_transaction_read_only'))
    await api.database.engine.dispose()
    assert (await last_uses(api))["admin"] is not None


async def test_an_open_stream_of_events_is_a_use_for_as_long_as_it_tells_something(ledger: Ledger) -> None:
    api = ledger.api
    await api.token("page", "viewer")
    stream = asyncio.create_task(ledger.call("GET", "/events/stream?after=0&wait_seconds=2", who="page"))
    for _ in range(200):
        if (first := (await last_uses(api))["page"]) is not None:
            break
        await asyncio.sleep(0.01)
    await age(api, "page", 120)
    await ledger.worker("another")
    assert (await stream).status_code == 200
    assert first is not None
    assert (await last_uses(api))["page"] > first  # type: ignore[operator]
