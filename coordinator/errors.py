"""A refusal, and how it leaves the server: RFC 9457 problem documents with stable codes."""

from __future__ import annotations

import logging
from typing import Any

import asyncpg
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from coordinator.wire.arrow_stream import ArrowError, TooManyRowsError
from coordinator.wire.problems import MEDIA_TYPE, PROBLEMS, ProblemDocument, problem_document

log = logging.getLogger("coordinator")


class Refusal(Exception):
    """The request is refused and has changed nothing. `extra` may hold `field`, `item` and what else helps."""

    def __init__(self, code: str, detail: str, **extra: Any) -> None:
        super().__init__(f"{code}: {detail}")
        self.problem = PROBLEMS[code]
        self.detail = detail
        self.extra = extra


def refusals(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI responses of an endpoint that may refuse with these codes."""
    answers: dict[int | str, dict[str, Any]] = {}
    for code in ("unauthenticated", "forbidden", "invalid_request", *codes):
        problem = PROBLEMS[code]
        answer = answers.setdefault(
            problem.status,
            {"model": ProblemDocument, "description": "", "content": {MEDIA_TYPE: {"examples": {}}}},
        )
        answer["content"][MEDIA_TYPE]["examples"][code] = {"value": problem_document(code, problem.title)}
        answer["description"] = ", ".join(sorted(answer["content"][MEDIA_TYPE]["examples"]))
    return answers


def _answer(code: str, detail: str, headers: dict[str, str] | None = None, **extra: Any) -> JSONResponse:
    body = problem_document(code, detail, **extra)
    return JSONResponse(body, status_code=body["status"], media_type=MEDIA_TYPE, headers=headers)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "5"}}.get(error.problem.status)
    return _answer(error.problem.code, error.detail, headers, **error.extra)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    return _answer("invalid_request", f"{field}: {first['msg']}", field=field)


async def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "unsupported_media_type"}.get(
        error.status_code, "invalid_request"
    )
    return _answer(code, str(error.detail))


async def _unreadable(_: Request, error: Exception) -> JSONResponse:
    return _answer("too_large" if isinstance(error, TooManyRowsError) else "invalid_arrow", str(error))


# SQLSTATE classes and codes after which the same request may succeed: the connection broke, a deadlock or a full
# server, Postgres stops, starts or cancelled a statement that took too long, a lock that was not had in time.
_TRY_AGAIN = ("08", "40", "53", "57", "25P03", "55P03")


def _sqlstate(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(getattr(cause, "sqlstate", None) or "")


async def _gone(request: Request, _: Exception) -> JSONResponse:
    """The client left before its request was whole; nobody reads the answer."""
    log.info("the client left during %s %s", request.method, request.url.path)
    return _answer("invalid_request", "the request ended before its body was whole")


def is_connection_fault(error: BaseException) -> bool:
    """Whether the database could not be reached or was too busy, as opposed to having refused a statement."""
    if isinstance(error, OSError | InterfaceError | OperationalError | PoolTimeout | asyncpg.InterfaceError):
        return True
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return _sqlstate(error).startswith(_TRY_AGAIN)


def is_data_fault(error: BaseException) -> bool:
    """Whether Postgres refused a value as such (SQLSTATE class 22): a NUL in a text, a number out of range."""
    return isinstance(error, DBAPIError) and _sqlstate(error).startswith("22")


async def _failed(request: Request, error: Exception) -> JSONResponse:
    if is_data_fault(error):
        assert isinstance(error, DBAPIError)
        return _answer("invalid_request", f"a value cannot be stored: {str(error.orig).split(': ', 1)[-1][:200]}")
    if is_connection_fault(error):
        log.warning("database unreachable on %s %s: %s", request.method, request.url.path, error)
        return _answer("unavailable", "the database did not answer", {"Retry-After": "1"})
    log.error("unexpected failure on %s %s", request.method, request.url.path, exc_info=error)
    return _answer("internal_error", "an unexpected failure; the coordinator's log has its trace")


def install(app: FastAPI) -> None:
    """Makes every error leave the app as a problem document."""
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ArrowError, _unreadable)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    # While it connects, asyncpg's own errors come through unwrapped.
    for kind in (DBAPIError, PoolTimeout, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(Exception, _failed)
