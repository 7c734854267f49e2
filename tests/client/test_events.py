"""The client's iterator over what happens to a run goes on over restarts and replicas, and ends with a reason."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice

import pytest

from coordinator.client import AsyncCoordinator, Coordinator, Refused, Run, UnexpectedAnswer, Unreachable
from coordinator.wire.runs import JournalEntry
from tests.client.runs import new_run, new_worker
from tests.client.server_process import ServerProcess

NOBODY = "http://127.0.0.1:9"


def happen(run: Run, count: int, prefix: str = "u") -> None:
    """So many events of run, made by nothing else."""
    for number in range(count):
        run.worker("w1", f"{prefix}-{number}").register("hand", "1")


def first(run: Run, count: int, after: int | None = 0, only: tuple[str, ...] = ()) -> list[JournalEntry]:
    with closing(run.events(after, only=only)) as events:
        return list(islice(events, count))


def test_every_entry_of_the_journal_and_then_each_new_one(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    happen(run, 3)
    with closing(run.events(0)) as events:
        assert [next(events).event_no for _ in range(4)] == [1, 2, 3, 4]
        happen(run, 1, "later")
        assert next(events).detail["incarnation"] == "later-0"
    assert first(run, 5) == list(run.journal())
    assert [entry.event_no for entry in first(run, 2, 3)] == [4, 5]


def test_without_a_number_it_begins_at_now(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    happen(run, 2)
    found: list[JournalEntry] = []
    with closing(run.events()) as events:
        reading = threading.Thread(target=lambda: found.append(next(events)))
        reading.start()
        number = 0
        while not found:  # when "now" is, only the thread knows
            number += 1
            happen(run, 1, f"later{number}")
            time.sleep(0.05)
        reading.join()
    assert found[0].event_no > 3
    assert str(found[0].detail["incarnation"]).startswith("later")


def test_only_what_is_asked_for(coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    new_worker(run)
    assert [entry.event for entry in first(run, 1, only=("worker.acked", "policy."))] == ["worker.acked"]
    with pytest.raises(Refused, match="events"):
        first(run, 1, only=("worker, policy",))


async def test_the_async_twin_and_an_address_where_nobody_is(server: ServerProcess, coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    happen(run, 2)
    async with (
        AsyncCoordinator(f"{NOBODY},{server.url}", server.token) as other,
        aclosing(other.run(run.id).events(0)) as events,
    ):
        assert [(await anext(events)).event_no for _ in range(3)] == [1, 2, 3]
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.to_thread(happen, run, 1, "later")
        assert (await waiting).event_no == 4
        endless = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.1)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        with pytest.raises(StopAsyncIteration):  # its connection is closed with it
            await anext(events)


def test_it_goes_on_over_a_kill_and_a_restart(mortal_server: ServerProcess) -> None:
    with Coordinator(mortal_server.url, mortal_server.token) as coordinator:
        run = new_run(coordinator)
        found: list[int] = []

        def read() -> None:
            found.extend(entry.event_no for entry in islice(run.events(0), 13))

        reading = threading.Thread(target=read)
        reading.start()
        for life in range(3):
            happen(run, 2, f"before{life}")
            mortal_server.kill()
            mortal_server.start()
            happen(run, 2, f"after{life}")
        reading.join(60)
        assert found == list(range(1, 14))


def test_it_ends_with_the_token_and_where_there_is_no_run(server: ServerProcess, coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    created = coordinator.create_token("page", "viewer")
    with Coordinator(server.url, created.token) as page, closing(page.run(run.id).events(0)) as events:
        assert next(events).event_no == 1
        coordinator.revoke_token(created.token_id)
        with pytest.raises(Refused) as refused:
            next(events)
        assert refused.value.code == "unauthenticated"
    with pytest.raises(Refused) as refused:
        first(coordinator.run("none"), 1)
    assert refused.value.code == "run_unknown"
    with pytest.raises(Refused) as refused:
        first(run, 1, 99)
    assert refused.value.field == "Last-Event-ID"


def test_where_nobody_answers_it_ends_in_time() -> None:
    with Coordinator(NOBODY, "token", retry_seconds=0.3) as coordinator, pytest.raises(Unreachable):
        first(coordinator.run("run"), 1)


@contextmanager
def answering(kind: str, body: bytes) -> Iterator[str]:
    """A server that gives everybody this answer and ends it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_what_is_no_stream_of_events_is_said(server: ServerProcess, coordinator: Coordinator) -> None:
    for kind, body, said in (
        ("text/html", b"<p>Welcome</p>", "did not answer a stream of events"),
        ("text/event-stream", b"id: 1\nevent: e\ndata: {}\n\n", "JournalEntry"),
    ):
        with answering(kind, body) as url, Coordinator(url, "token") as foreign:
            run = foreign.run("run")
            with pytest.raises(UnexpectedAnswer, match=said):
                first(run, 1)
    # A proxy that ends every stream before it begins is a replica that does not answer.
    run = new_run(coordinator)
    with answering("text/event-stream", b"") as url, Coordinator(f"{url},{server.url}", server.token) as both:
        assert first(both.run(run.id), 1)[0].event == "run.created"
