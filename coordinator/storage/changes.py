"""Waiting for a run to change without holding a database connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

POLL_SECONDS = 1.0
"""Whoever waits asks again after this time at the latest, should a notice have been lost."""
PAUSE_SECONDS = 0.02
"""The waiters of one run are woken at most once in this time, however often it is announced."""


class Follower:
    """One who waits for a run. It hears of everything since it began to follow, also of what came while it was busy."""

    def __init__(self, poll_seconds: float, leave: Callable[[Follower], None]) -> None:
        self._poll_seconds = poll_seconds
        self._leave = leave
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(self)

    def wake(self) -> None:
        """Ends this wait, or the next one at once."""
        self._changed.set()

    async def next(self, seconds: float) -> None:
        """Returns when the run changed since the last call, when it is time to ask again, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, self._poll_seconds)):
                await self._changed.wait()
        self._changed.clear()


class Changes:
    """Wakes the followers of a run when it has changed, and keeps what other replicas have yet to be told.

    It belongs to one event loop and is not to be called from other threads.
    """

    def __init__(self, poll_seconds: float = POLL_SECONDS) -> None:
        self._poll_seconds = poll_seconds
        self._followers: defaultdict[str, set[Follower]] = defaultdict(set)
        self._resting: dict[str, bool] = {}  # runs whose followers were just woken: has it changed again since?
        self._untold: set[str] = set()
        self.stirred = asyncio.Event()
        """Set when a run was announced; who tells the other replicas waits for it and clears it."""
        self.ended = False
        """Nobody is to wait here any longer: the server ends."""

    @property
    def followers(self) -> int:
        """How many follow a run; all who wait for the same answer of a run count as one."""
        return sum(len(followers) for followers in self._followers.values())

    def announce(self, run_id: str) -> None:
        """The run was changed here: wakes its followers, and has the other replicas told."""
        self.hear(run_id)
        self.tell_later((run_id,))

    def hear(self, run_id: str) -> None:
        """The run was changed, here or elsewhere: wakes its followers, at once or when they have rested."""
        if run_id in self._resting:
            self._resting[run_id] = True
        elif run_id in self._followers:
            self._wake(run_id)

    def hear_everything(self) -> None:
        """Any run may have been changed elsewhere: wakes all followers."""
        for run_id in list(self._followers):
            self.hear(run_id)

    def end(self) -> None:
        """Wakes everybody for good: each answers with what there is."""
        self.ended = True
        for followers in self._followers.values():
            for follower in followers:
                follower.wake()

    def tell_later(self, run_ids: Iterable[str]) -> None:
        """These runs are among those that the other replicas have to be told of."""
        self._untold.update(run_ids)
        self.stirred.set()

    def take_untold(self) -> set[str]:
        """The runs that the other replicas have to be told of; they count as told from now on."""
        untold, self._untold = self._untold, set()
        return untold

    def follow(self, run_id: str) -> Follower:
        """Follows this run until the block ends. Begin before the first question: no change falls between the two."""

        def leave(follower: Follower) -> None:
            followers = self._followers[run_id]
            followers.discard(follower)
            if not followers:
                del self._followers[run_id]

        follower = Follower(self._poll_seconds, leave)
        self._followers[run_id].add(follower)
        return follower

    def _wake(self, run_id: str) -> None:
        self._resting[run_id] = False
        asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._rested, run_id)
        for follower in self._followers.get(run_id, ()):
            follower.wake()

    def _rested(self, run_id: str) -> None:
        if self._resting.pop(run_id):
            self._wake(run_id)
