"""Server-sent events as the HTML standard has them: what the coordinator writes, and what its client reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE_SECONDS = 15.0
"""A stream is never silent for longer: a comment goes over when there is nothing to tell."""
RETRY_MILLISECONDS = 1000
"""How long a browser waits before it connects again."""

KEEP_ALIVE = b":\n\n"
OPENING = f"retry: {RETRY_MILLISECONDS}\n\n".encode()

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class ServerSentEvent:
    """One event. Without data it tells nobody anything, but the number to continue after."""

    id: str
    event: str
    data: str


def encode_event(number: int, event: str, data: str) -> bytes:
    """The event as it goes over; `data` is JSON, which has no line ends."""
    return f"id: {number}\nevent: {event}\ndata: {data}\n\n".encode()


def encode_place(number: int) -> bytes:
    """Tells the reader to continue after this number, and nothing else."""
    return f"id: {number}\n\n".encode()


class EventDecoder:
    """Reads a stream from the pieces that it comes in. Fields other than id, event and data are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False
        self._id = ""  # stays until another one comes
        self._event = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[ServerSentEvent]:
        """The events that end within this piece. What begins in it and does not end is kept for the next one."""
        held = self._rest + piece
        if not self._begun:
            if len(held) < 3 and b"\xef\xbb\xbf".startswith(held):
                self._rest = held
                return
            held = held.removeprefix(b"\xef\xbb\xbf")
            self._begun = True
        begin = 0
        for end in _LINE_END.finditer(held):
            if end.group() == b"\r" and end.end() == len(held):
                break  # the other half of this line end may follow
            found = self._line(held[begin : end.start()])
            begin = end.end()
            if found is not None:
                yield found
        self._rest = held[begin:]

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            found = ServerSentEvent(self._id, self._event or "message", "\n".join(self._data))
            self._event, self._data = "", []
            return found
        name, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\x00" not in value:
                self._id = value
        return None
