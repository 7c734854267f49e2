"""HTTP as uvicorn reads it, but with bounds: what is no HTTP, or too much of it, gets a problem document too."""

from __future__ import annotations

import asyncio
import http
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coordinator.wire.problems import MEDIA_TYPE, problem_document


class ProblemProtocol(HttpToolsProtocol):
    """uvicorn's own protocol, but for the answer to bytes that cannot be read as a request, and for those who are slow.

    A head has `head_bytes`, and one read more, at most, and `head_seconds` to arrive whole; a body may take as long as
    it likes, but must not be silent for `silent_seconds`.
    """

    head_bytes = 64 * 2**10
    head_seconds = 30.0
    silent_seconds = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_arrived = 0
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there, and has yet to say what it wants."""
        super().connection_made(transport)
        self._set_timer(self.head_seconds, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or was sent away."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Refuses a head without end, whose parts the parser would keep."""
        self._heard_at = self.loop.time()
        if self._in_head:
            self._head_arrived += len(data)
        super().data_received(data)
        if self._in_head and self._head_arrived > self.head_bytes and not self.transport.is_closing():
            self._refuse("headers_too_large", f"address and headers have at most {self.head_bytes} bytes")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True
        self._set_timer(self.head_seconds, self.transport.close)

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        self._in_head, self._head_arrived = False, 0
        self._set_timer(self.silent_seconds, self._look_at_silence)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """It is whole, and takes as long as it takes."""
        self._stop_timer()
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers with code `malformed_http` and closes the connection."""
        self._refuse("malformed_http", msg)

    def _refuse(self, code: str, detail: str) -> None:
        document = problem_document(code, detail)
        body, status = json.dumps(document).encode(), http.HTTPStatus(document["status"])
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
            "x-content-type-options: nosniff\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _look_at_silence(self) -> None:
        silent = self.loop.time() - self._heard_at
        if self.flow.read_paused:  # it is we who do not listen
            self._set_timer(self.silent_seconds, self._look_at_silence)
        elif silent < self.silent_seconds:
            self._set_timer(self.silent_seconds - silent, self._look_at_silence)
        else:
            self.transport.close()

    def _set_timer(self, seconds: float, then: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
