"""Waiting for a run to change without holding a database connection."""

from __future__ import annotations

import asyncio
from collections import defaultdict

POLL_SECONDS = 0.5
"""A change made through another replica is heard within this time."""


class Changes:
    """Wakes the waiters of a run when this process has changed it; others are found by asking again."""

    def __init__(self) -> None:
        self._waiters: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    def announce(self, run_id: str) -> None:
        """Wakes everyone who waits for this run."""
        for waiter in self._waiters.pop(run_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, run_id: str, seconds: float) -> None:
        """Returns when the run was announced, when it is time to ask again, or after `seconds`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[run_id].add(waiter)
        try:
            await asyncio.wait_for(waiter, min(seconds, POLL_SECONDS))
        except TimeoutError:
            return
        finally:
            waiters = self._waiters.get(run_id)
            if waiters is not None:
                waiters.discard(waiter)
                if not waiters:
                    del self._waiters[run_id]
