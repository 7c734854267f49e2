"""The outside of an Arrow IPC stream: whether it is one, whole, and costs no more memory than it has bytes.

A small stream can ask for any amount of memory: compressed buffers, columns without buffers, buffers or strings of
the schema that are shared, dictionaries that grow with every batch. All of that stands in the messages' headers,
which are read here before any library acts on them. The framing and the tables are those of Arrow's `Message.fbs`
and `Schema.fbs`; a header is a FlatBuffer: tables of slots, each slot an offset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

_CONTINUES = 0xFFFFFFFF
_VERSION_5 = 4
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_LIST, _STRUCT, _FIXED_LIST, _LARGE_LIST = 12, 13, 16, 21
_NESTED = {_LIST, _STRUCT, _FIXED_LIST, _LARGE_LIST}
_TEXTS = {4: "Binary", 5: "Utf8", 19: "LargeBinary", 20: "LargeUtf8"}
_FLAT = {1: "Null", 2: "Int", 3: "FloatingPoint", 6: "Bool", **_TEXTS}
_REFUSED = {
    7: "Decimal", 8: "Date", 9: "Time", 10: "Timestamp", 11: "Interval", 14: "Union", 15: "FixedSizeBinary",
    17: "Map", 18: "Duration", 22: "RunEndEncoded", 23: "BinaryView", 24: "Utf8View", 25: "ListView",
    26: "LargeListView",
}  # fmt: skip
_LARGEST_SCHEMA = 1000
"""Fields and metadata entries of a schema, together."""


class ArrowError(ValueError):
    """The stream is no Arrow IPC stream, or lacks a column, or has one of another type, or would grow too large."""


class TooManyRowsError(ArrowError):
    """The stream has more rows than one call takes."""


class _Table:
    """A table of a header. Offsets that lead out of it are ArrowErrors."""

    def __init__(self, header: memoryview, at: int) -> None:
        self._header, self._at = header, at
        self._slots: int = at - self._read("<i", at)
        self._size: int = self._read("<H", self._slots)

    def _read(self, kind: str, at: int) -> int:
        return _read(self._header, kind, at)

    def _find(self, slot: int) -> int | None:
        place = 4 + 2 * slot
        offset = self._read("<H", self._slots + place) if place + 2 <= self._size else 0
        return self._at + offset if offset else None

    def _follow(self, slot: int) -> int | None:
        at = self._find(slot)
        return None if at is None else at + self._read("<I", at)

    def has(self, slot: int) -> bool:
        return self._find(slot) is not None

    def number(self, slot: int, kind: str) -> int:
        at = self._find(slot)
        return 0 if at is None else self._read(kind, at)

    def table(self, slot: int) -> _Table:
        at = self._follow(slot)
        if at is None:
            raise ArrowError("not a readable Arrow IPC stream: a header lacks a table")
        return _Table(self._header, at)

    def items(self, slot: int, size: int) -> memoryview:
        """The bytes of a vector whose entries take `size` bytes each."""
        at = self._follow(slot)
        if at is None:
            return self._header[:0]
        end = at + 4 + size * self._read("<I", at)
        if end > len(self._header):
            raise ArrowError("not a readable Arrow IPC stream: a header's vector is longer than the header")
        return self._header[at + 4 : end]

    def tables(self, slot: int) -> Iterator[_Table]:
        at = self._follow(slot)
        count = 0 if at is None else self._read("<I", at)
        if count > _LARGEST_SCHEMA:
            raise ArrowError("the Arrow IPC stream's schema is too large")
        for entry in range((at or 0) + 4, (at or 0) + 4 + 4 * count, 4):
            yield _Table(self._header, entry + self._read("<I", entry))


def _read(header: memoryview, kind: str, at: int) -> int:
    if at < 0 or at + struct.calcsize(kind) > len(header):
        raise ArrowError("not a readable Arrow IPC stream: an offset leads out of its header")
    number: int = struct.unpack_from(kind, header, at)[0]
    return number


def check_stream(data: bytes, most_rows: int) -> None:
    """Refuses a stream that is cut short, is followed by anything, or would take much more memory than its bytes.

    What passes has one schema of plain types, at most `most_rows` rows, uncompressed buffers that do not overlap, no
    column with more entries than half the bytes of its batch, and an end-of-stream marker as its last 8 bytes.
    ArrowError says what is wrong.
    """
    stream = memoryview(data)
    rows = at = count = 0
    while True:
        if at + 8 > len(stream):
            raise ArrowError("the Arrow IPC stream is cut short: it has no end-of-stream marker")
        mark, size = struct.unpack_from("<Ii", stream, at)
        if mark != _CONTINUES or size < 0:
            raise ArrowError(f"not a readable Arrow IPC stream: no message begins at byte {at}")
        at += 8
        if size == 0:
            break
        if at + size > len(stream):
            raise ArrowError("the Arrow IPC stream is cut short within a message")
        header = stream[at : at + size]
        message = _Table(header, _read(header, "<I", 0))
        body = message.number(3, "<q")
        at += size
        if not 0 <= body <= len(stream) - at:
            raise ArrowError("the Arrow IPC stream is cut short within a message")
        at += body
        if message.number(0, "<h") != _VERSION_5:
            raise ArrowError("the Arrow IPC stream is not of metadata version V5")
        if message.has(4):
            # Version 0.17 named its compression here; nobody needs it now.
            raise ArrowError("a message of the Arrow IPC stream has metadata of its own; put it into the schema")
        kind = message.number(1, "<B")
        if kind not in (_SCHEMA, _DICTIONARY, _BATCH) or (kind == _SCHEMA) != (count == 0):
            raise ArrowError(f"not a readable Arrow IPC stream: message {count} is of kind {kind}")
        content = message.table(2)
        if kind == _SCHEMA:
            if body:
                raise ArrowError("not a readable Arrow IPC stream: the schema has a body")
            _check_schema(content, len(header))
        elif kind == _DICTIONARY:
            if content.number(2, "<B"):
                raise ArrowError("the Arrow IPC stream has dictionary deltas; write each dictionary whole")
            _check_batch(content.table(1), body, size)
        else:
            # An empty batch counts as a row: it costs as much.
            rows += max(1, _check_batch(content, body, size))
            if rows > most_rows:
                raise TooManyRowsError(f"the Arrow IPC stream has more than {most_rows} rows")
        count += 1
        if count > 2 * most_rows + _LARGEST_SCHEMA:
            raise ArrowError("the Arrow IPC stream has too many messages")
    if count == 0:
        raise ArrowError("the Arrow IPC stream has no schema")
    if at != len(stream):
        raise ArrowError(f"{len(stream) - at} bytes follow the Arrow IPC stream's end-of-stream marker")


def _check_schema(schema: _Table, size: int) -> None:
    """The fields and their metadata as a tree: a table or string that many point at is copied for each of them."""
    if schema.number(0, "<h"):
        raise ArrowError("the Arrow IPC stream is not little-endian")
    fields = [(field, "", 0) for field in schema.tables(1)]
    entries = list(schema.tables(2))
    tables = texts = 0
    while fields:
        field, column, depth = fields.pop()
        tables += 1
        name = field.items(0, 1)
        texts += len(name)
        if tables > _LARGEST_SCHEMA or texts > size:
            raise ArrowError("the Arrow IPC stream's schema is too large")
        try:
            own = str(name, "utf-8")
        except UnicodeDecodeError as error:
            raise ArrowError("the name of a column is not UTF-8") from error
        column = column or own
        kind = field.number(2, "<B")
        if kind not in _FLAT and kind not in _NESTED:
            raise ArrowError(f"column {column[:200]} is or holds {_REFUSED.get(kind, f'type {kind}')}")
        if field.has(4) and (depth or kind not in _TEXTS):
            raise ArrowError(f"column {column[:200]} is or holds a dictionary of something else than texts")
        if depth > 8:
            raise ArrowError(f"column {column[:200]} is nested too deep")
        fields.extend((child, column, depth + 1) for child in field.tables(5))
        entries.extend(field.tables(6))
        if len(fields) + len(entries) > _LARGEST_SCHEMA:
            raise ArrowError("the Arrow IPC stream's schema is too large")
    for entry in entries:
        texts += len(entry.items(0, 1)) + len(entry.items(1, 1))
    if texts > size:
        raise ArrowError("the Arrow IPC stream's schema is too large")


def _check_batch(batch: _Table, body: int, header: int) -> int:
    """The number of rows. Neither buffers nor entries may exceed what the message's own bytes can hold."""
    if batch.has(3):
        raise ArrowError("the Arrow IPC stream is compressed; write it without compression")
    rows = batch.number(0, "<q")
    entries = np.frombuffer(batch.items(1, 16), "<i8")[::2]
    buffers = np.frombuffer(batch.items(2, 16), "<i8").reshape(-1, 2)
    if rows < 0 or (entries < 0).any() or (buffers < 0).any() or (buffers > body).any() or buffers[:, 1].sum() > body:
        raise ArrowError("the Arrow IPC stream has a batch whose buffers do not fit into its body")
    # An action has a token of at least a byte and a log-prob of at least two.
    if max(rows, int(entries.max(initial=0))) > (header + body) // 2:
        raise ArrowError("the Arrow IPC stream has a column with more entries than its bytes can hold")
    return rows
