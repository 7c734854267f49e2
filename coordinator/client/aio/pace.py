"""What a task does in its own way: pausing, blocking work, and a renewal in the background.

`coordinator.client.pace` has the same names for threads; all else is generated from one source.
"""

from __future__ import annotations

import asyncio
import functools
from asyncio import sleep
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["Renewal", "run_blocking", "sleep", "to_the_end"]


async def run_blocking(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work that takes the CPU or the disk: done in a thread, so that the loop goes on.

    A cancellation waits for the thread, which cannot be stopped: nothing writes to a folder any more once its
    removal begins.
    """
    # Not asyncio.to_thread: its task would be cancelled with all others when the loop closes, and the thread not.
    return await _ended(asyncio.get_running_loop().run_in_executor(None, functools.partial(work, *args, **kwargs)))


async def to_the_end(call: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """A call that is not to be cut off: a cancellation takes effect after it."""
    return await _ended(asyncio.create_task(call(*args, **kwargs)))


async def _ended(work: asyncio.Future[T]) -> T:
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from work.exception()
    return work.result()


class Renewal:
    """Calls `renew` in a task of its own each time `every_seconds` have passed, until it answers False."""

    def __init__(self, renew: Callable[[], Awaitable[bool]], every_seconds: float, name: str) -> None:
        self._renew = renew
        self._every_seconds = every_seconds
        self._task = asyncio.create_task(self._run(), name=name)

    async def stop(self) -> None:
        """No call begins afterwards, and one that is under way is cut off: the task has ended on return."""
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_seconds)
            if not await self._renew():
                return
