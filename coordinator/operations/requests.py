"""Around every request: its id, the headers that every answer carries, one line in the log, and its time."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.errors import failure
from coordinator.operations.logs import CURRENT, context
from coordinator.operations.numbers import Numbers

log = logging.getLogger("coordinator.requests")

HEADER = "X-Request-ID"
_SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CLIENT_LEFT = 499
_QUIET = frozenset({"healthz", "readyz", "metrics"})
"""Asked every few seconds by machines: a line at debug, unless something is wrong."""


def _given_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode() if _SANE.fullmatch(value) else None
    return None


def operation_of(scope: Scope) -> str:
    """The name of the call, as in the OpenAPI document; `unmatched` where no address matched."""
    return getattr(scope.get("route"), "name", None) or "unmatched"


def _level(operation: str, status: int) -> int:
    if status >= 500:
        return logging.ERROR
    if status >= 400:
        return logging.WARNING
    return logging.DEBUG if operation in _QUIET else logging.INFO


class _Span(Protocol):
    def set_attribute(self, key: str, value: str, /) -> None: ...


def name_request(span: _Span) -> None:
    """Puts the ids of the request under way on a span."""
    for field, value in context():
        span.set_attribute(f"coordinator.{field}", value)


class Requests:
    """The outermost layer of the app. A failure that nobody else answered is answered here."""

    def __init__(self, app: ASGIApp, numbers: Numbers) -> None:
        self.app = app
        self.numbers = numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _given_id(scope) or secrets.token_hex(8)
        status = _CLIENT_LEFT
        began = time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if (span := state.get("span")) is not None:  # where traces are on; it ends with the answer
                    name_request(span)
                self._add_headers(MutableHeaders(scope=message), scope)
            await send(message)

        context = CURRENT.set(scope)
        self.numbers.in_flight.inc()
        try:
            try:
                await self.app(scope, receive, sending)
            except Exception as error:
                if status != _CLIENT_LEFT:
                    raise
                await failure(Request(scope), error)(scope, receive, sending)
        finally:
            self.numbers.in_flight.dec()
            self._end(scope, status, time.perf_counter() - began)
            CURRENT.reset(context)

    def _add_headers(self, headers: MutableHeaders, scope: Scope) -> None:
        headers[HEADER] = scope["state"]["request_id"]
        headers.setdefault("X-Content-Type-Options", "nosniff")
        headers.setdefault("X-Frame-Options", "DENY")
        headers.setdefault("Referrer-Policy", "no-referrer")
        if scope["path"].startswith("/v1/"):
            headers.setdefault("Cache-Control", "no-store")  # a token's secret, or what only its holder may read
        if scope["scheme"] == "https":
            headers.setdefault("Strict-Transport-Security", "max-age=31536000")

    def _end(self, scope: Scope, status: int, seconds: float) -> None:
        operation, state = operation_of(scope), scope["state"]
        self.numbers.request(operation, status, seconds)
        told = {
            "operation": operation,
            "status": status,
            "code": state.get("code"),
            "seconds": round(seconds, 6),
            "actor": state.get("actor"),
        }
        log.log(_level(operation, status), "%s %d", operation, status, extra=told)
