"""One answer for all who ask at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """What `make` answers: made once for all who ask meanwhile, and for who asks within `kept_seconds` of its begin."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], kept_seconds: float = 0.0) -> None:
        self._make = make
        self._kept_seconds = kept_seconds
        self._making: asyncio.Task[T] | None = None
        self._began_at = 0.0

    async def get(self) -> T:
        """The answer, or what making it raised."""
        now = asyncio.get_running_loop().time()
        if self._making is None or (self._making.done() and now - self._began_at >= self._kept_seconds):
            self._making, self._began_at = asyncio.create_task(self._make()), now
        # Who leaves must not take the answer of the others with him.
        return await asyncio.shield(self._making)
