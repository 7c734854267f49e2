"""The coordinator's own server in the event loop of a test, and streams read from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from coordinator.app import create_app
from coordinator.protocol import ProblemProtocol
from coordinator.server import Server
from coordinator.storage.database import Database, connect
from coordinator.wire.event_stream import EventDecoder, ServerSentEvent
from tests.api.ledger import Api


class _Quiet(Server):
    """Leaves the signals to pytest."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Served:
    """One replica in this process."""

    app: FastAPI
    database: Database
    server: Server
    url: str
    running: asyncio.Task[None]

    async def stop(self) -> None:
        """In good order, as on SIGTERM."""
        self.server.should_exit = True
        await self.running


@contextlib.asynccontextmanager
async def serving(database_url: str, artifacts: Path) -> AsyncIterator[Served]:
    """Serves until the block ends, or until it is stopped."""
    database = connect(database_url, pool_size=8)
    app = create_app(database, artifacts, max_body_bytes=2**20)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=ProblemProtocol, log_level="warning", access_log=False, timeout_graceful_shutdown=10
    )
    server = app.state.server = _Quiet(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        assert not running.done(), running
        await asyncio.sleep(0.01)
    served = Served(app, database, server, f"http://127.0.0.1:{listener.getsockname()[1]}", running)
    try:
        yield served
    finally:
        await served.stop()


class Stream:
    """One stream that is being read. Iterating gives its events, until the server ends it."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.comments = 0
        self.place = ""
        """The id that a browser would send when it connects again."""
        self._decoder = EventDecoder()
        self._events = self._read()

    async def _read(self) -> AsyncIterator[ServerSentEvent]:
        async for piece in self.response.aiter_raw():
            self.comments += piece.count(b":\n\n")
            for event in self._decoder.feed(piece):
                self.place = event.id
                if event.data:
                    yield event

    def __aiter__(self) -> AsyncIterator[ServerSentEvent]:
        return self._events

    async def next(self) -> ServerSentEvent:
        async with asyncio.timeout(30):
            return await anext(self._events)

    async def take(self, count: int) -> list[ServerSentEvent]:
        return [await self.next() for _ in range(count)]


async def until(holds: Callable[[], bool]) -> None:
    """Waits until it holds, on a machine of any speed."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - what is waited for is not told to anyone
            await asyncio.sleep(0.02)


def numbers(events: list[ServerSentEvent]) -> list[int]:
    """The event numbers, which id and data must agree on."""
    for event in events:
        entry: dict[str, Any] = json.loads(event.data)
        assert (str(entry["event_no"]), entry["event"]) == (event.id, event.event)
    return [int(event.id) for event in events]


@contextlib.asynccontextmanager
async def streaming(
    api: Api, query: str = "", *, who: str = "admin", last: str | None = None, run_id: str = "run"
) -> AsyncIterator[Stream]:
    """A stream on a connection of its own."""
    headers = {"authorization": f"Bearer {api.secrets.get(who, who)}"}
    if last is not None:
        headers["last-event-id"] = last
    path = f"{api.http.base_url}/v1/runs/{run_id}/events/stream{query}"
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as http,
        http.stream("GET", path, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response)
