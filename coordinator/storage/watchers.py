"""One question per run for all who wait for the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Generic, TypeVar

from coordinator.storage.changes import Changes, Follower

T = TypeVar("T")


@dataclass(eq=False)
class _Waiter(Generic[T]):
    enough: Callable[[T], bool]
    end: float
    answer: asyncio.Future[T]


class _Question(Generic[T]):
    """The question about one run, asked at every change of the run for as long as somebody waits."""

    def __init__(self, ask: Callable[[], Awaitable[T]], changes: Changes, follower: Follower) -> None:
        self._ask = ask
        self._changes = changes
        self._follower = follower
        self._waiters: set[_Waiter[T]] = set()

    async def answer(self, waiter: _Waiter[T]) -> T:
        self._waiters.add(waiter)
        self._follower.wake()
        try:
            return await waiter.answer
        finally:
            self._waiters.discard(waiter)
            if not self._waiters:
                self._follower.wake()

    async def run(self) -> None:
        """Asks until nobody waits any more; somebody must wait already."""
        try:
            with self._follower:
                while self._waiters:
                    end = min(waiter.end for waiter in self._waiters)
                    await self._follower.next(max(0.0, end - asyncio.get_running_loop().time()))
                    if self._waiters:
                        await self._ask_once()
        finally:
            for waiter in self._waiters:
                waiter.answer.cancel()

    async def _ask_once(self) -> None:
        # Whoever comes while it is being asked waits for the next answer: this one may be older than his call.
        asked = list(self._waiters)
        now = asyncio.get_running_loop().time()
        try:
            answer = await self._ask()
            over = self._changes.ended
            served = [waiter for waiter in asked if over or waiter.end <= now or waiter.enough(answer)]
        except Exception as error:  # noqa: BLE001 - raised in each of the waiting calls
            for waiter in asked:
                if not waiter.answer.done():
                    waiter.answer.set_exception(error)
        else:
            for waiter in served:
                if not waiter.answer.done():
                    waiter.answer.set_result(answer)
        self._waiters.difference_update([waiter for waiter in asked if waiter.answer.done()])


class Watchers(Generic[T]):
    """Answers `ask(run_id)` to many who wait, with one question at a time and run. It belongs to one event loop."""

    def __init__(self, changes: Changes, ask: Callable[[str], Awaitable[T]]) -> None:
        self._changes = changes
        self._ask = ask
        self._questions: dict[str, tuple[_Question[T], asyncio.Task[None]]] = {}

    async def answer(self, run_id: str, enough: Callable[[T], bool], seconds: float) -> T:
        """The first answer asked for from now on that is enough, or the one that is asked for after `seconds`, or
        when the server ends.

        Raises what `ask` raises.
        """
        loop = asyncio.get_running_loop()
        if run_id not in self._questions:
            question = _Question(lambda: self._ask(run_id), self._changes, self._changes.follow(run_id))
            # Of no request: it outlives the one that began it, and what it does is not that one's.
            task = loop.create_task(self._serve(run_id, question), context=Context())
            self._questions[run_id] = question, task
        return await self._questions[run_id][0].answer(_Waiter(enough, loop.time() + seconds, loop.create_future()))

    async def _serve(self, run_id: str, question: _Question[T]) -> None:
        try:
            await question.run()
        finally:
            del self._questions[run_id]
