"""What takes longer than two seconds says how far it is."""

from __future__ import annotations

import logging
import time

SAY_EVERY_SECONDS = 2.0

_log = logging.getLogger("coordinator.client")


class Slow:
    """A line in the log (INFO) at least two seconds after the one before, with the bytes done of `total`."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._said = time.monotonic()

    def at(self, done: int) -> None:
        """It has come so far."""
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_SECONDS:
            self._said = now
            share = 100 * done // self._total if self._total else 100
            _log.info("%s: %.1f of %.1f MB, %d %%", self._what, done / 1e6, self._total / 1e6, share)
