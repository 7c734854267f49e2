"""The hashes of all tokens that are valid, read at most once a second, and only while somebody guesses.

Whether a token is among them costs no look-up of its own: guesses by the thousand, and a fleet behind the same address
that signs in for the first time, cost one read a second.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from coordinator.operations.shared import Shared

KEPT_SECONDS = 1.0

Read = Callable[[], Coroutine[Any, Any, frozenset[bytes]]]


class GoodTokens:
    """What one process knows of them."""

    def __init__(self, read: Read) -> None:
        self._found = Shared(read, KEPT_SECONDS)

    async def holds(self, digest: bytes) -> bool:
        """Whether a token with this hash was valid within the last second or so."""
        return digest in await self._found.get()
