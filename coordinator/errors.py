"""A refusal, and how it leaves the server: RFC 9457 problem documents with stable codes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import asyncpg
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from coordinator.wire.arrow_stream import ArrowError, TooManyRowsError
from coordinator.wire.problems import MEDIA_TYPE, PROBLEMS, problem_document

log = logging.getLogger("coordinator")


class Refusal(Exception):
    """The request is refused and has changed nothing. `extra` may hold `field`, `item` and what else helps."""

    def __init__(self, code: str, detail: str, headers: Mapping[str, str] | None = None, **extra: Any) -> None:
        super().__init__(f"{code}: {detail}")
        self.problem = PROBLEMS[code]
        self.detail = detail
        self.headers = headers
        self.extra = extra


HEADERS: dict[int, dict[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "5"},
    503: {"Retry-After": "1"},
}
"""What a refusal of this status carries beside its document."""

DOCUMENTED_HEADERS = HEADERS | {405: {"Allow": "GET, POST"}, 416: {"Content-Range": "bytes */62"}}
"""The same with those whose value the endpoint knows: here as examples."""

HEADER_MEANINGS = {
    "WWW-Authenticate": "the scheme that is asked for",
    "Retry-After": "seconds to wait before the request is sent again",
    "Allow": "the methods of this address",
    "Content-Range": "how many bytes the file has",
}

EVERYWHERE = ("unauthenticated", "forbidden", "invalid_request", "rate_limited", "internal_error", "unavailable")
"""Codes that every call with a token may give."""


def refusals(*codes: str, among: tuple[str, ...] = EVERYWHERE) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI responses of an endpoint that may refuse with these codes, beside those of every endpoint."""
    answers: dict[int | str, dict[str, Any]] = {}
    for code in (*among, *codes):
        problem = PROBLEMS[code]
        content: dict[str, Any] = {"schema": {"$ref": "#/components/schemas/ProblemDocument"}, "examples": {}}
        answer = answers.setdefault(problem.status, {"description": "", "content": {MEDIA_TYPE: content}})
        examples = answer["content"][MEDIA_TYPE]["examples"]
        examples[code] = {"summary": problem.title, "value": problem_document(code, problem.title)}
        answer["description"] = ", ".join(sorted(examples))
        if problem.status in DOCUMENTED_HEADERS:
            answer["headers"] = {
                name: {
                    "required": True,
                    "schema": {"type": "string"},
                    "description": HEADER_MEANINGS[name],
                    "example": value,
                }
                for name, value in DOCUMENTED_HEADERS[problem.status].items()
            }
    return answers


def _answer(
    request: Request, code: str, detail: str, headers: Mapping[str, str] | None = None, **extra: Any
) -> JSONResponse:
    request.state.code = code
    body = problem_document(code, detail, request_id=getattr(request.state, "request_id", None), **extra)
    sent = HEADERS.get(body["status"], {}) | dict(headers or {})
    return JSONResponse(body, status_code=body["status"], media_type=MEDIA_TYPE, headers=sent)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return _answer(request, error.problem.code, error.detail, error.headers, **error.extra)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):  # FastAPI leaves a body as it came unless its content type is JSON
        kind = request.headers.get("content-type", "")
        return _answer(request, "unsupported_media_type", f"{kind!r} is not understood here; send application/json")
    first = error.errors()[0]
    if first["type"] == "json_invalid":  # its place is an offset, and no field's name
        return _answer(request, "invalid_request", f"body: {first['msg']}: {first['ctx']['error']}", field="body")
    field = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    return _answer(request, "invalid_request", f"{field}: {first['msg']}", field=field)


def _methods(request: Request) -> str:
    """What the address takes. Starlette's own answer knows only the first route of several."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    there = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for methods in there for method in methods}))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        methods = _methods(request)
        return _answer(request, "method_not_allowed", f"{request.url.path} takes {methods}", {"Allow": methods})
    code = {404: "not_found", 413: "too_large"}.get(error.status_code, "invalid_request")
    return _answer(request, code, str(error.detail))


async def _unreadable(request: Request, error: Exception) -> JSONResponse:
    return _answer(request, "too_large" if isinstance(error, TooManyRowsError) else "invalid_arrow", str(error))


# SQLSTATE classes and codes after which the same request may succeed: the connection broke, a deadlock or a full
# server, Postgres stops, starts or cancelled a statement that took too long, a lock that was not had in time.
_TRY_AGAIN = ("08", "40", "53", "57", "25P03", "55P03")


def _sqlstate(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(getattr(cause, "sqlstate", None) or "")


async def _gone(request: Request, _: Exception) -> JSONResponse:
    """The client left before its request was whole; nobody reads the answer."""
    log.info("the client left before its request was whole")
    return _answer(request, "invalid_request", "the request ended before its body was whole")


def is_connection_fault(error: BaseException) -> bool:
    """Whether the database could not be reached or was too busy, as opposed to having refused a statement."""
    if isinstance(error, OSError | InterfaceError | OperationalError | PoolTimeout | asyncpg.InterfaceError):
        return True
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return _sqlstate(error).startswith(_TRY_AGAIN)


def is_refused_entry(error: BaseException) -> bool:
    """Whether Postgres did not let us in: a wrong password or role, or a database that does not exist."""
    return _sqlstate(error).startswith(("28", "3D"))


def is_data_fault(error: BaseException) -> bool:
    """Whether Postgres refused a value as such (SQLSTATE class 22): a NUL in a text, a number out of range."""
    return isinstance(error, DBAPIError) and _sqlstate(error).startswith("22")


def failure(request: Request, error: Exception) -> JSONResponse:
    """The answer to what no endpoint foresaw, which is logged, and to what the database refused or could not do."""
    if is_data_fault(error):
        assert isinstance(error, DBAPIError)
        return _answer(
            request, "invalid_request", f"a value cannot be stored: {str(error.orig).split(': ', 1)[-1][:200]}"
        )
    if is_connection_fault(error):
        cause = getattr(error, "orig", None) or error  # SQLAlchemy's own text has the statement in it
        log.warning("the database did not answer: %s", " ".join(str(cause).split()) or type(cause).__name__)
        return _answer(request, "unavailable", "the database did not answer")
    log.error("unexpected failure", exc_info=error)
    return _answer(request, "internal_error", "an unexpected failure; the coordinator's log has its trace")


async def _failed(request: Request, error: Exception) -> JSONResponse:
    return failure(request, error)


def install(app: FastAPI) -> None:
    """Makes every error leave the app as a problem document. All others are for the app's outermost layer."""
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ArrowError, _unreadable)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    # While it connects, asyncpg's own errors come through unwrapped.
    for kind in (DBAPIError, PoolTimeout, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        app.add_exception_handler(kind, _failed)
