"""Log lines for people and machines: one JSON object a line on stderr."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_log = logging.getLogger("worker_agent")


def event(name: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log that `name` happened, with its fields."""
    _log.log(level, name, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """time (UTC), level, event, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def log_to_stderr() -> None:
    """Send the agent's and the client's log lines to stderr. For the command line, not for embedding."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("worker_agent", "coordinator.client"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
