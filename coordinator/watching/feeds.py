"""The journal of a run as it grows, for many readers with one question per run and replica.

Each reader has a cursor of its own. The newest entries are kept, encoded once for all; who lags further behind reads
from the table at his own pace, so that a slow reader costs no memory. Nobody is told anything that was recorded after
his token had ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextvars import Context
from dataclasses import dataclass
from itertools import islice

from coordinator.errors import is_connection_fault
from coordinator.storage.changes import Changes, Follower
from coordinator.storage.outage import Outage

log = logging.getLogger("coordinator.watching")

KEPT = 256
"""Entries that are kept for each run that somebody reads."""
PAGE = 64
"""Entries that a reader gets at a time."""
CHECK_SECONDS = 1.0
"""While nothing is recorded, tokens are looked at so often."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a journal: its number, its name, and how it goes over."""

    event_no: int
    event: str
    sent: bytes


Entries = Callable[[str, int, int], Awaitable[list[Entry]]]
"""Reads at most so many entries of a run after a number, in their order."""
Valid = Callable[[Collection[str]], Awaitable[frozenset[str]]]
"""Which of these tokens, named by their ids, are neither revoked nor expired."""


class StreamEnded(Exception):
    """There is no more to be had here: the token has ended, or the server ends."""


class Reader:
    """One who reads a run's journal, from his cursor on."""

    def __init__(self, feed: _Feed, after: int, token_id: str) -> None:
        self.token_id = token_id
        self.cursor = after
        """The number of the entry that he was given last."""
        self.upto: int | None = None
        """He may be given entries up to this: those that were there when his token was seen to be valid."""
        self.ended = False
        self.stirred = asyncio.Event()
        self._feed = feed
        self._page: asyncio.Task[list[Entry]] | None = None

    @property
    def caught_up(self) -> bool:
        """Whether he was given all that he may be given."""
        return self.upto is not None and self.cursor >= self.upto

    async def next(self, seconds: float) -> list[Entry]:
        """The next entries, at most `PAGE`; none when there were none for this long. Raises `StreamEnded`.

        The first call answers as soon as it is known what there is, also that there is nothing.
        """
        until = asyncio.get_running_loop().time() + seconds
        first = self.upto is None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not self.ended and (self.upto is None or (self.caught_up and not first)):
                    self.stirred.clear()
                    await self.stirred.wait()
        if self.ended:
            raise StreamEnded
        if self.upto is None or self.caught_up:
            return []
        found = self._feed.recent(self.cursor)
        if found is None:
            found = await self._from_table(until)
        entries = [entry for entry in found if entry.event_no <= self.upto]
        if entries:
            self.cursor = entries[-1].event_no
        return entries

    async def _from_table(self, until: float) -> list[Entry]:
        """The page after the cursor. A question that takes longer goes on, and is answered in a later call."""
        if self._page is None:
            self._page = asyncio.create_task(self._feed.page(self.cursor))
        await asyncio.wait({self._page}, timeout=max(0.0, until - asyncio.get_running_loop().time()))
        if not self._page.done():
            return []
        page, self._page = self._page, None
        return page.result()

    def leave(self) -> None:
        """He reads no more."""
        self._feed.leave(self)
        if self._page is not None:
            self._page.cancel()

    def end(self) -> None:
        """The next call, or the one under way, raises `StreamEnded`."""
        self.ended = True
        self.stirred.set()


class _Feed:
    """The newest entries of one run, and who reads them."""

    def __init__(self, run_id: str, after: int, entries: Entries, valid: Valid, follower: Follower) -> None:
        self._run_id = run_id
        self._entries = entries
        self._valid = valid
        self._follower = follower
        self._last = after
        self._recent: deque[Entry] = deque(maxlen=KEPT)
        self._checked_at = 0.0
        self._outage = Outage(log, f"and those who watch run {run_id} hear of nothing")
        self.readers: set[Reader] = set()

    def join(self, reader: Reader) -> None:
        self.readers.add(reader)
        self._follower.wake()

    def leave(self, reader: Reader) -> None:
        self.readers.discard(reader)
        if not self.readers:
            self._follower.wake()

    def recent(self, after: int) -> list[Entry] | None:
        """At most `PAGE` entries after a number; none where they are not among those that are kept."""
        if not self._recent or self._recent[0].event_no > after + 1:
            return None
        begin = after + 1 - self._recent[0].event_no
        return list(islice(self._recent, begin, begin + PAGE))

    async def page(self, after: int) -> list[Entry]:
        """The same from the table; none, after a pause, when the database does not answer."""
        try:
            return await self._entries(self._run_id, after, PAGE)
        except Exception as error:
            if not is_connection_fault(error):
                raise
            await asyncio.sleep(LAST_RETRY_SECONDS)
            return []

    async def run(self) -> None:
        """Asks until nobody reads any more; somebody must read already."""
        pause = FIRST_RETRY_SECONDS
        try:
            with self._follower:
                while self.readers:
                    await self._follower.next(CHECK_SECONDS)
                    try:
                        await self._ask()
                    except Exception as error:
                        if not is_connection_fault(error):
                            raise
                        self._outage.begins(error)
                        await asyncio.sleep(pause)
                        self._follower.wake()
                        pause = min(2 * pause, LAST_RETRY_SECONDS)
                    else:
                        self._outage.ends()
                        pause = FIRST_RETRY_SECONDS
        except Exception:
            log.exception("the journal of run %s cannot be read; those who watch it are sent away", self._run_id)
        finally:
            for reader in self.readers:
                reader.end()

    async def _ask(self) -> None:
        """Reads what is new, and then whose token is valid, so that a token covers only what came before its end."""
        new = await self._entries(self._run_id, self._last, KEPT)
        if len(new) == KEPT:
            self._follower.wake()
        now = asyncio.get_running_loop().time()
        asked = [reader for reader in self.readers if not reader.ended]
        if not new and now - self._checked_at < CHECK_SECONDS and all(reader.upto is not None for reader in asked):
            return
        valid = await self._valid({reader.token_id for reader in asked})
        self._checked_at = now
        self._recent.extend(new)
        if new:
            self._last = new[-1].event_no
        for reader in asked:
            if reader.token_id in valid:
                reader.upto = self._last
                reader.stirred.set()
            else:
                reader.end()


class Feeds:
    """The feeds of all runs that are read here. It belongs to one event loop."""

    def __init__(self, changes: Changes, entries: Entries, valid: Valid) -> None:
        self._changes = changes
        self._entries = entries
        self._valid = valid
        self._feeds: dict[str, tuple[_Feed, asyncio.Task[None]]] = {}
        self._ended = False

    @contextlib.contextmanager
    def read(self, run_id: str, after: int, token_id: str, newest: int) -> Iterator[Reader]:
        """A reader of what comes after number `after`; `newest` is about the number of the newest entry."""
        if run_id not in self._feeds:
            follower = self._changes.follow(run_id)
            feed = _Feed(run_id, max(0, newest - KEPT), self._entries, self._valid, follower)
            # Of no request: it outlives the one that began it, and what it does is not that one's.
            task = asyncio.get_running_loop().create_task(self._serve(run_id, feed), context=Context())
            self._feeds[run_id] = feed, task
        feed, _ = self._feeds[run_id]
        reader = Reader(feed, after, token_id)
        if self._ended:
            reader.end()
        feed.join(reader)
        try:
            yield reader
        finally:
            reader.leave()

    @property
    def readers(self) -> int:
        """How many read."""
        return sum(len(feed.readers) for feed, _ in self._feeds.values())

    @property
    def feeds(self) -> int:
        """How many runs are read; each is followed once."""
        return len(self._feeds)

    def end(self) -> None:
        """Sends every reader away, and those who come from now on."""
        self._ended = True
        for feed, _ in self._feeds.values():
            for reader in feed.readers:
                reader.end()

    async def _serve(self, run_id: str, feed: _Feed) -> None:
        try:
            await feed.run()
        finally:
            del self._feeds[run_id]
