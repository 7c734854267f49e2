"""The hashes of all tokens that are valid, read at most once a second, and only while somebody guesses.

Whether a token is among them costs no look-up of its own: guesses by the thousand, and a fleet behind the same address
that signs in for the first time, cost one read a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

KEPT_SECONDS = 1.0

Read = Callable[[], Awaitable[frozenset[bytes]]]


class GoodTokens:
    """What one process knows of them."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._found: asyncio.Task[frozenset[bytes]] | None = None
        self._asked_at = 0.0

    async def holds(self, digest: bytes) -> bool:
        """Whether a token with this hash was valid within the last second or so."""
        now = asyncio.get_running_loop().time()
        if self._found is None or (self._found.done() and now - self._asked_at >= KEPT_SECONDS):
            self._found, self._asked_at = asyncio.create_task(self._all()), now
        # Who leaves must not take the answer of the others with him.
        return digest in await asyncio.shield(self._found)

    async def _all(self) -> frozenset[bytes]:
        return await self._read()
