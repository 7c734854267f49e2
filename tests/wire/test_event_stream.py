"""Server-sent events survive any cut of the stream, any text, and any line end of the standard."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.wire.event_stream import (
    KEEP_ALIVE,
    OPENING,
    EventDecoder,
    ServerSentEvent,
    encode_event,
    encode_place,
)

# Line ends of Python and of Unicode, which are none of the standard's.
TEXT = st.text(st.one_of(st.characters(), st.sampled_from("\n\r\x0b\x0c\x1c\x85\u2028\u2029:\ufeff")))
EVENTS = st.lists(st.tuples(st.integers(0, 2**53), st.sampled_from(["policy.prepared", "watch"]), TEXT), max_size=5)


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(place % (len(stream) + 1) for place in at)})
    return [stream[begin:end] for begin, end in pairwise(places)]


def read(*pieces: bytes) -> list[ServerSentEvent]:
    decoder = EventDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


@given(EVENTS, st.lists(st.integers(0, 10_000), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_what_was_written_is_read_however_it_is_cut(
    events: list[tuple[int, str, str]], at: list[int], line_end: bytes
) -> None:
    sent = [(number, name, json.dumps(text, ensure_ascii=False)) for number, name, text in events]
    whole = OPENING + b"".join(KEEP_ALIVE + encode_event(*event) for event in sent)
    found = read(*cut(whole.replace(b"\n", line_end), at))
    # A carriage return at the very end may be half of a line end: what it closes comes with the next piece.
    told = [ServerSentEvent(str(number), name, text) for number, name, text in sent]
    heard = [event for event in found if event.data]
    assert heard == (told if line_end != b"\r" else told[: len(heard)])
    assert len(heard) >= len(told) - (line_end == b"\r")


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [("", "message", "a")]),
        (b"\xef\xbb\xbfdata:a\n\n", [("", "message", "a")]),
        (b"data:  a\ndata\ndata:b\n\n", [("", "message", " a\n\nb")]),
        (b"id: 1\nevent: e\ndata: a\n\ndata: b\n\n", [("1", "e", "a"), ("1", "message", "b")]),
        (b"id: 1\x00\ndata: a\n\n", [("", "message", "a")]),
        (b"id\ndata: a\n\n", [("", "message", "a")]),
        (b": a\nretry: 5\nelse: x\ndata: a\n\n", [("", "message", "a")]),
        (b"data: a\ndata: not ended", []),
        (b"data: \xff\n\n", [("", "message", "\ufffd")]),
    ],
)
def test_the_rules_of_the_standard(stream: bytes, expected: list[tuple[str, str, str]]) -> None:
    for pieces in ([stream], [stream[n : n + 1] for n in range(len(stream))]):
        assert read(*pieces) == [ServerSentEvent(*event) for event in expected]


def test_a_place_moves_the_id_and_tells_nothing() -> None:
    assert [(event.id, event.data) for event in read(encode_place(7))] == [("7", "")]
    assert [event for event in read(OPENING, KEEP_ALIVE) if event.data or event.id] == []
