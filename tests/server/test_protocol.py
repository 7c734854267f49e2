"""Clients that are slow, silent or endless: they are sent away, and everybody else is served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn

from coordinator.protocol import ProblemProtocol


class Hasty(ProblemProtocol):
    """With less patience than a server should have."""

    head_seconds = 1.0
    silent_seconds = 1.0


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def measuring(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body, once it is whole."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(length).encode()})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = _Quiet(uvicorn.Config(measuring, http=Hasty, log_level="error", lifespan="off"))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = True
    await running


async def ask(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that comes until the server closes; each part is sent after a pause."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            with contextlib.suppress(ConnectionError):  # it may have been sent away already
                await writer.drain()
            await asyncio.sleep(pause)
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 8\r\n\r\n"


async def test_a_head_without_end_is_refused(port: int) -> None:
    for flood in (
        [b"GET / HTTP/1.1\r\n"]
        + [b"X-A: " + b"a" * 1000 + b"\r\n"] * 66,  # and no more: what comes after an answer makes a kernel forget it
        [b"GET / HTTP/1.1\r\nX-A: "] + [b"a" * 11_000] * 6,
        [b"GET /" + b"a" * 11_000] + [b"a" * 11_000] * 5,
    ):
        answer = await ask(port, *flood, pause=0.005)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 "), answer[:100]
        assert json.loads(body)["code"] == "headers_too_large"


async def test_who_says_nothing_is_sent_away(port: int) -> None:
    assert await ask(port) == b""
    assert await ask(port, b"GET / HTTP/1.1\r\nHost") == b""
    assert await ask(port, HEAD + b"1234") == b""


async def test_a_slow_body_that_goes_on_is_taken(port: int) -> None:
    """For longer than the patience with silence."""
    answer = await ask(port, HEAD, *[b"%d" % n for n in range(8)], pause=0.2)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"1\r\n8\r\n0\r\n\r\n")


async def test_one_request_after_another_on_one_connection(port: int) -> None:
    """What each head had does not add up."""
    head = b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 40_000 + b"\r\n"
    answer = await ask(port, head + b"\r\n", head + b"\r\n", head + b"Connection: close\r\n\r\n", pause=0.05)
    assert answer.count(b"HTTP/1.1 200 ") == 3
