"""How often a token may call, and how often an address may try tokens that are none.

Each is a token bucket in the memory of one server process: it fills at a steady rate up to a burst, and each request
takes one out of it.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from coordinator.errors import Refusal

BURST_SECONDS = 2.0
"""A token that was silent may make up for this time at once."""
FAILURES_A_SECOND, FAILURES_AT_ONCE = 1.0, 20.0
"""Different tokens that are none, by the address that they come from."""
REMEMBERED_SECONDS = 60.0
"""A token that was none is refused for so long without being looked up, and counts once: to repeat is not to guess."""
MOST_KEYS = 10_000
"""Buckets of one kind that are remembered; the one that was not asked for longest is forgotten, as if it were full."""

K = TypeVar("K", bound=Hashable)


@dataclass
class _Level:
    left: float
    at: float


class Buckets(Generic[K]):
    """One bucket for each key. `per_second` 0: without a bound."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._levels: OrderedDict[K, _Level] = OrderedDict()

    def seconds_until(self, key: K) -> float:
        """How long until one may be taken; 0 when it may be now."""
        if not self._per_second:
            return 0.0
        return max(0.0, (1.0 - self._level(key).left) / self._per_second)

    def take(self, key: K) -> None:
        """Takes one out, which must be there."""
        if self._per_second:
            self._level(key).left -= 1.0

    def _level(self, key: K) -> _Level:
        now = self._clock()
        level = self._levels.setdefault(key, _Level(self._burst, now))
        level.left = min(self._burst, level.left + (now - level.at) * self._per_second)
        level.at = now
        self._levels.move_to_end(key)
        if len(self._levels) > MOST_KEYS:
            self._levels.popitem(last=False)
        return level


def network(address: str) -> str:
    """Whom an address belongs to: an IPv6 host has a whole /64 to choose from."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)  # as a socket that takes both shows those who come by IPv4
    return address if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))


class Limits:
    """What one server process lets through. `requests_per_second` is for each token, `guesses` for each address.

    An address that tried too many different tokens that are none is refused before the next one is looked up, but for
    tokens that are good: whoever shares the address with a guesser goes on.
    """

    def __init__(
        self, requests_per_second: float = 0.0, guesses: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        burst = max(1.0, BURST_SECONDS * requests_per_second)
        self._requests: Buckets[bytes] = Buckets(requests_per_second, burst, clock)
        self._failures: Buckets[str] = Buckets(FAILURES_A_SECOND if guesses else 0.0, FAILURES_AT_ONCE, clock)
        self._guesses = guesses
        self._clock = clock
        self._good: OrderedDict[bytes, float] = OrderedDict()
        self._none: OrderedDict[bytes, float] = OrderedDict()

    async def admit(self, digest: bytes, address: str, is_good: Callable[[bytes], Awaitable[bool]]) -> None:
        """Refuses a request by its token's hash and its address, before the token is looked up.

        `is_good` is asked of a token that is new here and comes from an address that guesses.
        """
        if self._clock() < self._none.get(digest, 0.0):
            raise unknown_token()
        if digest not in self._good:
            seconds = self._failures.seconds_until(network(address))
            if seconds > 0 and not await is_good(digest):
                _refuse(seconds, "too many tokens that are none came from there")
        _refuse(self._requests.seconds_until(digest), "this token has sent more requests than it may")
        self._requests.take(digest)

    def failed(self, digest: bytes, address: str) -> None:
        """The token was none, or is none any more."""
        self._good.pop(digest, None)
        if self._guesses:
            self._failures.take(network(address))
            _remember(self._none, digest, self._clock() + REMEMBERED_SECONDS)

    def passed(self, digest: bytes) -> None:
        """The token was good."""
        _remember(self._good, digest, self._clock())


def _remember(digests: OrderedDict[bytes, float], digest: bytes, at: float) -> None:
    digests[digest] = at
    digests.move_to_end(digest)
    if len(digests) > MOST_KEYS:
        digests.popitem(last=False)


def unknown_token() -> Refusal:
    """The refusal of a token that is none."""
    return Refusal("unauthenticated", "the token is unknown, expired or revoked")


def _refuse(seconds: float, why: str) -> None:
    if seconds > 0:
        raise Refusal("rate_limited", why, {"Retry-After": str(math.ceil(seconds))})
