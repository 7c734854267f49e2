"""`/metrics`, `/healthz` and `/readyz`, on a thread of their own."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, generate_latest

from worker_agent.logs import event
from worker_agent.status.health import Health, alive, ready
from worker_agent.status.metrics import registry
from worker_agent.status.vitals import Vitals

_POLL_SECONDS = 0.1
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusError(Exception):
    """The address for metrics and health cannot be had; the message says why and what to do."""


@contextmanager
def serving_status(host: str, port: int, vitals: Vitals, spool: Path) -> Iterator[str]:
    """Answer at `host` and `port` (0: a free one) for as long as the block lasts; gives the address, which is logged.

    Raises `StatusError` if the address cannot be had.
    """
    server = _listen(host, port, vitals, registry(vitals, spool))
    address = f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="status", daemon=True)
    thread.start()
    event("status_served", metrics=f"{address}/metrics", health=f"{address}/healthz", readiness=f"{address}/readyz")
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    vitals: Vitals
    registry: CollectorRegistry

    def server_bind(self) -> None:
        # Not HTTPServer's, which looks its own name up, for as long as a name server takes.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


def _listen(host: str, port: int, vitals: Vitals, numbers: CollectorRegistry) -> _Server:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind = type("_Server", (_Server,), {"address_family": family, "vitals": vitals, "registry": numbers})
        server: _Server = kind(address[:2], _Handler)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise StatusError(
            f"metrics: {host}:{port} cannot be had ({why}): give another metrics_port, 0 for a "
            f"free one, or another metrics_host"
        ) from error
    return server


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0
    """Seconds for a client to say what it wants."""
    _HEALTH: ClassVar = {"/healthz": ("alive", alive), "/readyz": ("ready", ready)}

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/metrics":
            self._answer(HTTPStatus.OK, _METRICS_TYPE, generate_latest(self.server.registry))
        elif path in self._HEALTH:
            name, look = self._HEALTH[path]
            self._health(name, look(self.server.vitals))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"/metrics, /healthz and /readyz\n")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing: a line for each scrape helps no one."""

    def _health(self, name: str, health: Health) -> None:
        status = HTTPStatus.OK if health.well else HTTPStatus.SERVICE_UNAVAILABLE
        body = {name: health.well, "missing": health.missing}
        self._answer(status, "application/json", json.dumps(body).encode() + b"\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
