"""What the server logs, and how: lines of text or of JSON on stderr, each with the ids of its request, no secrets."""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from pythonjsonlogger.json import JsonFormatter

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

CURRENT: ContextVar[MutableMapping[str, Any] | None] = ContextVar("coordinator_request", default=None)
"""The ASGI scope of the request that is being answered; the request's threads see it too."""

PATH_IDS = ("run_id", "update_id", "rollout_id", "version", "activation_id", "worker_id", "rewind_id", "rollback_id")
"""Parameters of a path that a line names."""

FIELDS = ("operation", "status", "code", "seconds", "actor")
"""Further fields of the line that each request ends with."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,199}")
_HIDDEN = "***"
_BEARER = re.compile(r"(bearer\s+)[^\s'\",;]+", re.IGNORECASE)
_TOKEN = re.compile(r"(rct_[0-9a-f]+_)[A-Za-z0-9_-]+")
_PASSWORD = re.compile(r"(postgres(?:ql)?(?:\+\w+)?://[^\s:/@]*:)[^\s@]+(?=@)")


def context() -> Iterator[tuple[str, str]]:
    """The ids of the request under way, as far as they are ids: what else stands in a path is not repeated."""
    scope = CURRENT.get()
    if scope is None:
        return
    yield "request_id", scope["state"]["request_id"]
    if trace_id := scope["state"].get("trace_id"):
        yield "trace_id", trace_id
    for parameter, value in scope.get("path_params", {}).items():
        if parameter in PATH_IDS and _ID.fullmatch(str(value)):
            yield parameter, _secrets.hide(str(value))


class Secrets:
    """Takes secrets out of a text: anything that looks like a token or a password, and those that are known."""

    def __init__(self, known: Iterable[str]) -> None:
        known = [secret for secret in known if len(secret) >= 4]
        in_json = [json.dumps(secret, ensure_ascii=False)[1:-1] for secret in known]
        self._known = sorted({*known, *in_json}, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """The text without them."""
        for secret in self._known:
            text = text.replace(secret, _HIDDEN)
        for pattern in (_TOKEN, _BEARER, _PASSWORD):
            text = pattern.sub(rf"\1{_HIDDEN}", text)
        return text


_secrets = Secrets(())
"""What this process hides; `configure` says what it knows."""


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    told = {name: getattr(record, name) for name in FIELDS if getattr(record, name, None) is not None}
    return told | dict(context())


def _printable(text: str) -> str:
    """The text without what would move a terminal's cursor or colour the rest; ends of lines stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class TextFormatter(logging.Formatter):
    """`time level logger: message field=value ...`, on one line but for a trace, whose lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        said = " ".join(record.getMessage().splitlines())
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {record.name}: {said}{fields}"
        if record.exc_info:
            trace = "\n".join(self.formatException(record.exc_info).splitlines())
            line = f"{line}\n{textwrap.indent(trace, '  ')}"
        return _secrets.hide(_printable(line))


class JsonLines(JsonFormatter):
    """One JSON object a line: time, level, logger, message, the request's ids, and a trace where there is one."""

    def __init__(self) -> None:
        super().__init__(json_ensure_ascii=False)

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Fills one line's object."""
        told = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        log_data.update(told | {"message": record.getMessage()} | _fields(record))
        if "exc_info" in message_dict:
            log_data["exc_info"] = message_dict["exc_info"]

    def format(self, record: logging.LogRecord) -> str:
        """The line. What is hidden is hidden as JSON writes it, too, so that it may be hidden in the line."""
        return _secrets.hide(super().format(record))


def configure(kind: Format, level: Level, secrets: Iterable[str]) -> None:
    """Sends all logs of this process to stderr: ours from `level` on, those of libraries when they warn.

    `secrets` are hidden wherever they would appear.
    """
    global _secrets
    _secrets = Secrets(secrets)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    logging.getLogger("coordinator").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("DEBUG" if level == "debug" else "WARNING")
