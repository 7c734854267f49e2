"""A proxy in front of a coordinator that can say it is full and hold answers back, as proxies on the way do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

import httpx

FULL = {
    "type": "about:blank",
    "title": "Storage is full",
    "status": 429,
    "code": "storage_full",
    "detail": "There is no room for more rollouts.",
    "next_step": "Send it again after Retry-After.",
}


class Relay:
    """Passes requests on to `target`, except as told. Bodies of known length only."""

    def __init__(self, target: str) -> None:
        self.full_for = 0
        """So many requests more are answered 429 `storage_full`, with `retry_after` (seconds)."""
        self.retry_after = 1
        self.asked_at: list[float] = []
        """When each request arrived, by the monotonic clock."""
        self.hold: str | None = None
        """Requests to paths that end so are passed on, and their answers held until `let_go` is set."""
        self.instead: Callable[[str, str], tuple[int, bytes] | None] = lambda method, path: None
        """A status and a body that a proxy answers itself to a method and a path; None: the request is passed on."""
        self.held = threading.Event()
        """Set once an answer is held, that is, once the coordinator has done what was asked."""
        self.let_go = threading.Event()
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                relay.asked_at.append(time.monotonic())
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if relay.full_for > 0:
                    relay.full_for -= 1
                    return self._answer(429, json.dumps(FULL).encode(), "application/problem+json")
                if (own := relay.instead(self.command, self.path)) is not None:
                    return self._answer(*own, "text/html")
                headers = {n: v for n, v in self.headers.items() if n.lower() not in ("host", "connection")}
                passed = httpx.request(
                    self.command, target + self.path, content=body, headers=headers, timeout=60, trust_env=False
                )
                if relay.hold is not None and self.path.endswith(relay.hold):
                    relay.held.set()
                    relay.let_go.wait()
                self._answer(passed.status_code, passed.content, passed.headers["Content-Type"])

            do_POST = do_PUT = do_GET

            def _answer(self, status: int, body: bytes, content_type: str) -> None:
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", content_type)
                    self.send_header("Content-Length", str(len(body)))
                    if status == 429:
                        self.send_header("Retry-After", str(relay.retry_after))
                    self.end_headers()
                    self.wfile.write(body)
                except ConnectionError:  # the client did not wait for it
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
                """Nothing: the tests look at what the client says."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Relay:
        threading.Thread(target=self._server.serve_forever, args=(0.05,)).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()
