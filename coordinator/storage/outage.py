"""One line when the database stops to answer, and one when it answers again."""

from __future__ import annotations

import logging
import time


class Outage:
    """What one background task has said about the database; it tries again and again, and says it once."""

    def __init__(self, log: logging.Logger, consequence: str) -> None:
        self._log = log
        self._consequence = consequence
        self._began: float | None = None

    def begins(self, error: BaseException) -> None:
        """Another try failed: a warning, if it is the first one to fail."""
        if self._began is not None:
            return
        self._began = time.monotonic()
        cause = getattr(error, "orig", None) or error  # SQLAlchemy's own text has the statement in it
        reason = " ".join(str(cause).split()) or type(cause).__name__
        self._log.warning("the database does not answer, %s: %s", self._consequence, reason[:300])

    def ends(self) -> None:
        """A try succeeded: an information, if one had failed before."""
        if self._began is None:
            return
        self._log.info("the database answers again after %.1f s", time.monotonic() - self._began)
        self._began = None
