"""One stream of server-sent events: what is told to one who watches a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager
from typing import cast

from fastapi.responses import StreamingResponse
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.types import Send

from coordinator.runs.service import journal_entry
from coordinator.watching import queries
from coordinator.watching.feeds import Entry, Reader, StreamEnded
from coordinator.wire.event_stream import (
    KEEP_ALIVE,
    KEEP_ALIVE_SECONDS,
    MEDIA_TYPE,
    OPENING,
    encode_event,
    encode_place,
)


class EventStream(StreamingResponse):
    """An answer that goes on. Its generator is closed when the client leaves, wherever it stands then."""

    media_type = MEDIA_TYPE

    def __init__(self, told: AsyncIterator[bytes]) -> None:
        # The second header keeps nginx from collecting what should go over at once.
        super().__init__(told, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        """Sends it piece by piece; a client that reads slowly holds up nobody but its own generator."""
        async with contextlib.aclosing(cast(AsyncGenerator[bytes, None], self.body_iterator)):
            await super().stream_response(send)


async def entries_after(connection: AsyncConnection, run_id: str, after: int, limit: int) -> list[Entry]:
    """Entries of a run's journal after a number, as they go over."""
    rows = await connection.execute(queries.ENTRIES_AFTER, {"run_id": run_id, "after": after, "limit": limit})
    return [
        Entry(row.event_no, row.event, encode_event(row.event_no, row.event, journal_entry(row).model_dump_json()))
        for row in rows
    ]


async def told(
    reading: AbstractContextManager[Reader], first: bytes, prefixes: tuple[str, ...], wait_seconds: float | None
) -> AsyncGenerator[bytes, None]:
    """What goes over: `first`, then every entry whose name begins with one of `prefixes`, or every one without any.

    It ends when the reader does, or after `wait_seconds` with all that was there by then.
    """
    loop = asyncio.get_running_loop()
    end = None if wait_seconds is None else loop.time() + wait_seconds
    with reading as reader:
        place = reader.cursor
        yield OPENING + first
        while True:
            left = KEEP_ALIVE_SECONDS if end is None else min(KEEP_ALIVE_SECONDS, end - loop.time())
            if left <= 0 and reader.caught_up:
                return
            try:
                entries = await reader.next(left if reader.caught_up else KEEP_ALIVE_SECONDS)
            except StreamEnded:
                return
            shown = [entry for entry in entries if not prefixes or entry.event.startswith(prefixes)]
            if shown:
                place = shown[-1].event_no
                yield b"".join(entry.sent for entry in shown)
            elif reader.caught_up:
                # Whoever filters is not to be told again, after a lost connection, what he did not want to hear.
                yield KEEP_ALIVE if place == reader.cursor else encode_place(reader.cursor)
                place = reader.cursor
            elif not entries:
                yield KEEP_ALIVE
