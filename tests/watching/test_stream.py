"""A run is watched by server-sent events: from now or from a number on, without a hole, for as long as one may."""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import AsyncAdaptedQueuePool, Connection, event, text

from coordinator.watching import feeds
from coordinator.watching import stream as watching_stream
from tests.api.ledger import Json, Ledger, ok, refused
from tests.watching.serving import numbers, streaming, until


async def journal(ledger: Ledger) -> list[Json]:
    entries: list[Json] = (await ledger.get("/journal"))["entries"]
    return entries


async def happen(ledger: Ledger, count: int, prefix: str = "u") -> None:
    """So many events."""
    for number in range(count):
        ok(await ledger.open(f"{prefix}{number}"))


async def test_it_begins_at_now_with_what_watch_answers(ledger: Ledger) -> None:
    async with streaming(ledger.api) as stream:
        first = await stream.next()
        assert (first.event, json.loads(first.data)) == ("watch", await ledger.get("/watch"))
        assert first.id == "3"
        await happen(ledger, 2)
        found = await stream.take(2)
    assert numbers(found) == [4, 5]
    assert [json.loads(event.data) for event in found] == (await journal(ledger))[3:]


async def test_it_continues_after_a_number_and_says_the_same_as_the_journal(ledger: Ledger) -> None:
    await ledger.activate(1, 0)
    entries = await journal(ledger)
    async with streaming(ledger.api, "?after=0") as stream:
        found = await stream.take(len(entries))
    assert [json.loads(event.data) for event in found] == entries
    assert numbers(found) == list(range(1, len(entries) + 1))
    async with streaming(ledger.api, "?after=0", last="4") as stream:  # what a browser sends with the first address
        assert numbers(await stream.take(1)) == [5]
    assert stream.response.headers["cache-control"] == "no-store"


async def test_a_page_at_a_time_and_what_comes_meanwhile(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than is kept, more than a page, and writers that go on."""
    monkeypatch.setattr(feeds, "KEPT", 8)
    monkeypatch.setattr(feeds, "PAGE", 3)
    await happen(ledger, 40, "before")
    writers = asyncio.gather(*(happen(ledger, 10, f"while{n}-") for n in range(3)))
    async with streaming(ledger.api, "?after=1") as stream:
        found = await stream.take(2 + 40 + 30)
    await writers
    assert numbers(found) == list(range(2, 74))


async def test_only_events_of_some_names(ledger: Ledger) -> None:
    await happen(ledger, 3)
    async with streaming(ledger.api, "?after=0&events=policy.,activation.,worker.acked") as stream:
        assert (await stream.next()).event == "worker.acked"
        await ledger.activate(1, 0)
        found = await stream.take(5)
        names = [event.event for event in found]
        assert names == [
            "policy.prepared", "policy.committed", "activation.opened", "worker.acked", "policy.activated",
        ]  # fmt: skip


async def test_who_filters_is_told_how_far_he_has_come(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching_stream, "KEEP_ALIVE_SECONDS", 0.05)
    async with streaming(ledger.api, "?events=policy.") as stream:
        await stream.next()
        await happen(ledger, 4)
        reading = asyncio.create_task(stream.next())
        await until(lambda: stream.place == "7")
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_silent_stream_is_kept_alive(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching_stream, "KEEP_ALIVE_SECONDS", 0.05)
    async with streaming(ledger.api, "?after=3") as stream:
        reading = asyncio.create_task(stream.next())
        await until(lambda: stream.comments >= 3)
        await happen(ledger, 1)
        assert numbers([await reading]) == [4]


async def test_it_ends_after_a_time_with_all_that_was_there(ledger: Ledger) -> None:
    async with streaming(ledger.api, "?after=0&wait_seconds=0") as stream:
        assert numbers([event async for event in stream]) == [1, 2, 3]
    async with streaming(ledger.api, "?after=3&wait_seconds=0") as stream:
        assert [event async for event in stream] == []
    async with streaming(ledger.api, "?wait_seconds=4") as stream:
        await stream.next()
        await happen(ledger, 1)
        assert numbers([event async for event in stream]) == [4]


@pytest.mark.parametrize("last", ["x", "-1", "1.0", "+1", "9" * 16, "0x1", "²"])
async def test_a_bad_last_event_id_is_refused(ledger: Ledger, last: str) -> None:
    headers = {"last-event-id": last.encode()}
    document = refused(await ledger.call("GET", "/events/stream", headers=headers), 422, "invalid_request")
    assert document["field"] == "Last-Event-ID"


async def test_a_number_that_the_run_has_not_come_to_is_refused(ledger: Ledger) -> None:
    """As after a backup was restored: what comes until then would be left out."""
    document = refused(await ledger.call("GET", "/events/stream?after=4"), 422, "invalid_request")
    assert (document["field"], "is 3" in document["detail"]) == ("after", True)
    headers = {"last-event-id": "4"}
    document = refused(await ledger.call("GET", "/events/stream", headers=headers), 422, "invalid_request")
    assert document["field"] == "Last-Event-ID"


@pytest.mark.parametrize("query", ["after=-1", "after=x", "events=,", "events=.", "events=A.", "events=a.b.c",
                                   "wait_seconds=-1", "wait_seconds=inf", "wait_seconds=nan"])  # fmt: skip
async def test_a_bad_query_is_refused(ledger: Ledger, query: str) -> None:
    refused(await ledger.call("GET", f"/events/stream?{query}"), 422, "invalid_request")


async def test_who_may_not_read_the_run_gets_no_stream(ledger: Ledger) -> None:
    api = ledger.api
    await Ledger.create(api, "other")
    await api.token("elsewhere", "viewer", "other")
    refused(await ledger.call("GET", "/events/stream", who=None), 401, "unauthenticated")
    refused(await ledger.call("GET", "/events/stream", who="elsewhere"), 403, "forbidden")
    refused(await api.call("GET", "/runs/none/events/stream"), 404, "run_unknown")


async def test_a_revoked_token_ends_its_streams_and_hears_of_nothing_more(ledger: Ledger) -> None:
    api = ledger.api
    body = {"name": "page", "role": "viewer"}
    created = ok(await api.call("POST", "/tokens", body))
    async with (
        streaming(api, "?after=3", who=created["token"]) as ending,
        streaming(api, "?after=3") as staying,
        streaming(api, "?after=0", who=created["token"]) as behind,
    ):
        await happen(ledger, 1, "before")
        assert numbers(await staying.take(1)) == numbers(await ending.take(1)) == [4]
        ok(await api.call("DELETE", f"/tokens/{created['token_id']}"))
        await happen(ledger, 2, "after")
        assert numbers(await staying.take(2)) == [5, 6]
        async with asyncio.timeout(30):
            assert [event async for event in ending] == []
            assert numbers([event async for event in behind]) in ([1, 2, 3], [1, 2, 3, 4])


async def test_a_token_that_expires_ends_its_streams_though_nothing_happens(ledger: Ledger) -> None:
    api = ledger.api
    soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    created = ok(await api.call("POST", "/tokens", {"name": "page", "role": "viewer", "expires_at": soon}))
    async with streaming(api, "?after=3", who=created["token"]) as stream, asyncio.timeout(30):
        assert [event async for event in stream] == []
    refused(await ledger.call("GET", "/events/stream", who=created["token"]), 401, "unauthenticated")


async def test_who_leaves_leaves_nothing_behind(ledger: Ledger) -> None:
    api = ledger.api
    await happen(ledger, 100)
    before = asyncio.all_tasks()
    async with contextlib.AsyncExitStack() as stack:
        for query in ("?after=0", "", "?events=policy.", "?after=0&wait_seconds=600") * 10:
            stream = await stack.enter_async_context(streaming(api, query))
            if "events" not in query:
                await stream.next()
        assert api.app.state.feeds._feeds.keys() == {"run"}
    feeds_here, changes = api.app.state.feeds, api.app.state.changes
    await until(lambda: not (feeds_here._feeds or changes._followers or asyncio.all_tasks() - before))


async def test_two_hundred_streams_hold_no_connection_and_ask_together(ledger: Ledger) -> None:
    api = ledger.api
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(streaming(api)) for _ in range(200)]
        for stream in streams:
            assert (await stream.next()).event == "watch"
        pool = api.database.engine.pool
        assert isinstance(pool, AsyncAdaptedQueuePool)
        asked: list[str] = []

        @event.listens_for(api.database.engine.sync_engine, "before_cursor_execute")
        def count(_: Connection, __: object, statement: str, *___: object) -> None:
            if "journal WHERE" in statement or "token_id = ANY(CAST" in statement:
                asked.append(statement)

        await happen(ledger, 1)
        found = await asyncio.gather(*(stream.take(1) for stream in streams))
        assert {tuple(numbers(events)) for events in found} == {(4,)}
        # Two questions for all; one more for each second that it took, and when the run is announced again.
        assert 2 <= len(asked) < 20, asked
        await until(lambda: pool.checkedout() == 0)


async def test_one_who_does_not_read_costs_no_memory_and_misses_nothing(ledger: Ledger) -> None:
    api = ledger.api
    address = api.http.base_url
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=2**16)
    head = f"GET /v1/runs/run/events/stream?after=3 HTTP/1.0\r\nAuthorization: Bearer {api.secrets['admin']}\r\n\r\n"
    writer.write(head.encode())
    assert b"200 OK" in await reader.readline()
    count = 6000
    async with api.database.engine.begin() as connection:
        await connection.execute(
            text(
                """
                WITH run AS (
                    UPDATE runs SET event_no = event_no + :count RETURNING run_no, event_no - :count AS begin
                )
                INSERT INTO journal (run_no, event_no, event, subject, actor, detail, at)
                SELECT run_no, begin + n, 'update.opened', 'u', 'test',
                       jsonb_build_object('owner', repeat('x', 2000)), clock_timestamp()
                FROM run, generate_series(1, :count) AS n
                """
            ),
            {"count": count},
        )
    api.app.state.changes.announce("run")
    async with streaming(api, f"?after={count}") as other:  # who reads is not held up by him
        assert numbers(await other.take(3)) == [count + 1, count + 2, count + 3]
    transports = [c.transport for c in api.app.state.server.server_state.connections]
    assert max(transport.get_write_buffer_size() for transport in transports) < 500_000
    assert len(api.app.state.feeds._feeds["run"][0]._recent) == feeds.KEPT
    found: list[int] = []
    async with asyncio.timeout(60):
        while not found or found[-1] != count + 3:
            line = await reader.readline()
            if line.startswith(b"id: "):
                found.append(int(line[4:]))
    assert found == list(range(4, count + 4))
    writer.close()
    await writer.wait_closed()
