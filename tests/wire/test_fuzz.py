"""Whatever stream comes, a decoder reads it or refuses it: no other exception, no crash, no memory beyond its size."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from coordinator.wire.arrow_stream import ArrowError, _Table
from coordinator.wire.columns import (
    ROLLOUT_SCHEMA,
    decode_candidates,
    decode_reserve,
    decode_rollouts,
    encode_rollouts,
)
from tests.wire.streams import good_streams, messages, rollouts, table_of, with_column, written

SCRIPT = Path(__file__).with_name("fuzz_decoders.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_bad_stream_is_refused_or_read_and_never_anything_else(seed: int, tmp_path: Path) -> None:
    case = tmp_path / "case"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(SCRIPT), str(seed), "10000", str(case)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    held = case.read_bytes()
    stream = held[8 : 8 + struct.unpack_from("<Q", held)[0]]
    assert child.returncode == 0, f"exit {child.returncode}\n{child.stderr[-3000:]}\nof the stream {stream.hex()}"
    outcomes = json.loads(child.stdout)
    assert outcomes["read"] > 500
    assert outcomes["refused"] > 10_000


def content(stream: bytes, message: int) -> tuple[int, _Table]:
    """Where the header of a message begins, and the table of what it heads."""
    at = messages(stream)[message] + 8
    view = memoryview(stream)[at : at + struct.unpack_from("<i", stream, at - 4)[0]]
    return at, _Table(view, struct.unpack_from("<I", view, 0)[0]).table(2)


def shared_metadata(stream: bytes) -> bytes:
    """900 entries of the schema's metadata, each of them the same long text."""
    metadata = {f"k{n}": "x" * 100_000 * (n == 0) for n in range(900)}
    data = bytearray(written(table_of(stream).replace_schema_metadata(metadata)))
    at, schema = content(bytes(data), 0)
    vector = schema._follow(2)
    assert vector is not None
    entries = [vector + 4 + 4 * n for n in range(900)]
    longest = max(entries, key=lambda e: len(_Table(schema._header, e + schema._read("<I", e)).items(1, 1)))
    target = longest + schema._read("<I", longest)
    for entry in entries:
        if entry < target:
            struct.pack_into("<I", data, at + entry, target - entry)
    return bytes(data)


def shared_fields(stream: bytes) -> bytes:
    """A column of structs in structs, six levels deep, each ten times the same: 10^6 fields to whoever counts them."""
    kind: pa.DataType = pa.int32()
    for _ in range(6):
        kind = pa.struct([pa.field("", kind if n == 0 else pa.int32()) for n in range(10)])
    data = bytearray(written(with_column(table_of(stream).slice(0, 0), "token_ids", pa.array([], kind))))
    at, schema = content(bytes(data), 0)
    field = next(f for f in schema.tables(1) if bytes(f.items(0, 1)) == b"token_ids")
    while (vector := field._follow(5)) is not None and (children := list(field.tables(5))):
        for n in range(10):
            entry = vector + 4 + 4 * n
            assert children[0]._at > entry
            struct.pack_into("<I", data, at + entry, children[0]._at - entry)
        field = children[0]
    return bytes(data)


def shared_buffers(stream: bytes) -> bytes:
    """Every buffer of the batch is the whole body."""
    data = bytearray(stream)
    at, batch = content(stream, 1)
    vector = batch._follow(2)
    assert vector is not None
    count = batch._read("<I", vector)
    body = messages(stream)[2] - at - len(batch._header)
    for n in range(count):
        struct.pack_into("<qq", data, at + vector + 4 + 16 * n, 0, body)
    return bytes(data)


def deltas(stream: bytes) -> bytes:
    """A dictionary that grows with every batch."""
    table = table_of(stream)
    sink = pa.BufferOutputStream()
    words = [pa.array([f"w{n}" for n in range(end)]) for end in range(1, len(table) + 1)]
    ids = [pa.DictionaryArray.from_arrays(pa.array([n], pa.int8()), words[n]) for n in range(len(table))]
    schema = with_column(table.slice(0, 1), "rollout_id", ids[0]).schema
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for n in range(len(table)):
            writer.write_table(with_column(table.slice(n, 1), "rollout_id", ids[n]))
    return bytes(sink.getvalue().to_pybytes())


def all_null(rows: int) -> bytes:
    """Columns without any buffer."""
    return written(pa.table([pa.nulls(rows)] * len(ROLLOUT_SCHEMA), names=ROLLOUT_SCHEMA.names))


def claimed(rows: int) -> bytes:
    """The same, patched to claim so many rows that nobody could write them."""
    data = bytearray(all_null(1))
    at, batch = content(bytes(data), 1)
    length, nodes = batch._find(0), batch._follow(1)
    assert length is not None and nodes is not None
    for place in (length, *(nodes + 4 + 16 * n for n in range(len(ROLLOUT_SCHEMA)))):
        struct.pack_into("<q", data, at + place, rows)
    return bytes(data)


def wordy(rows: int, text: str) -> bytes:
    """A dictionary of one long text, which each row names."""
    table = table_of(encode_rollouts(rollouts(rows, 1)))
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int8()), pa.array([text]))
    return written(with_column(table, "group_id", column))


def listed(name: str, values: pa.Array) -> bytes:
    """One rollout with these values in one list."""
    table = table_of(encode_rollouts(rollouts(1)))
    return written(with_column(table, name, pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)))


def empty_batches(count: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROLLOUT_SCHEMA) as writer:
        for _ in range(count):
            writer.write_batch(pa.RecordBatch.from_pylist([], ROLLOUT_SCHEMA))
    return bytes(sink.getvalue().to_pybytes())


def fields(count: int) -> bytes:
    return written(pa.table([pa.array([1])] * count, names=[f"c{n}" for n in range(count)]))


def nested(depth: int) -> bytes:
    kind = pa.int32()
    for _ in range(depth):
        kind = pa.list_(kind)
    return written(with_column(table_of(encode_rollouts(rollouts(1))), "token_ids", pa.array([[]], kind)))


SMALL = encode_rollouts(rollouts(3))
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "zstd": (lambda: written(table_of(listed("token_ids", pa.array([0] * 2**20, pa.int32()))), compression="zstd"),
             "is compressed; write it without"),
    "lz4": (lambda: written(table_of(SMALL), compression="lz4"), "is compressed; write it without"),
    "rows without bytes": (lambda: claimed(2**40), "more entries than its bytes can hold"),
    "rows": (lambda: encode_rollouts(rollouts(4097, 1)), "more than 4096 rows"),
    "batches": (lambda: empty_batches(4097), "more than 4096 rows"),
    "nulls inside": (lambda: listed("token_ids", pa.nulls(2**24)), "more entries than its bytes can hold"),
    "bits": (lambda: listed("action_mask", pa.array(np.zeros(2**24, bool))), "more entries than its bytes can hold"),
    "one text, many rows": (lambda: wordy(4096, "x" * 2**20), "texts are too long for their number"),
    "shared texts": (lambda: shared_metadata(SMALL), "schema is too large"),
    "shared buffers": (lambda: shared_buffers(SMALL), "buffers do not fit into its body"),
    "growing dictionary": (lambda: deltas(SMALL), "dictionary deltas"),
    "fields": (lambda: fields(1001), "schema is too large"),
    "nested": (lambda: nested(20), "nested too deep"),
}  # fmt: skip


def test_fields_that_are_shared_are_counted_as_often_as_they_are_met() -> None:
    with pytest.raises(ArrowError, match="schema is too large"):
        decode_rollouts(shared_fields(SMALL))


def test_more_spans_than_their_hashes_have_room_for_are_refused() -> None:
    with pytest.raises(ArrowError, match="column spans has more entries"):
        decode_rollouts(spans(LARGE // 8, 1))


def test_a_candidate_without_a_value_is_refused() -> None:
    table = table_of(good_streams()["candidates"])
    for name in set(table.column_names) - {"side_data"}:
        column = table.column(name).combine_chunks()
        first = pa.concat_arrays([pa.nulls(1, column.type), column[1:]])
        with pytest.raises(ArrowError, match=f"columns hold nulls: \\['{name}'\\]"):
            decode_candidates(written(with_column(table, name, first)))


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_stream_that_would_grow_is_refused(bomb: str) -> None:
    make, why = BOMBS[bomb]
    stream = make()
    assert table_of(stream).num_columns, "it can be read where nobody looks"
    with pytest.raises(ArrowError, match=why):
        decode_rollouts(stream)


def spans(count: int, beside: int) -> bytes:
    """Spans without a hash, and a text of this length."""
    kind = ROLLOUT_SCHEMA.field("spans").type.value_type
    values = pa.StructArray.from_arrays(
        [pa.array(np.zeros(count, np.int32)), pa.array([""]).take(pa.array(np.zeros(count, np.int32))),
         pa.array(np.zeros(count, np.int32)), pa.array(np.zeros(count, np.int32))], fields=list(kind),
    )  # fmt: skip
    return written(with_column(table_of(listed("spans", values)), "task_id", pa.array(["x" * beside])))


LARGE = 2**21
JUNK = f"[{'[],' * (LARGE // 8)}0]"
COSTLY: dict[str, Callable[[], bytes]] = {
    "tokens": lambda: encode_rollouts(rollouts(8, LARGE // 64)),
    "token bytes": lambda: listed("token_ids", pa.array(np.zeros(LARGE, np.int8))),
    "wide tokens": lambda: listed("token_ids", pa.array(np.zeros(LARGE // 4, np.int64))),
    "log-probs": lambda: listed("behavior_log_probs", pa.array(np.zeros(LARGE // 2, np.float32))),
    "half log-probs": lambda: listed("behavior_log_probs", pa.array(np.zeros(LARGE, np.float16))),
    "spans": lambda: spans(LARGE // 8, 1),
    "fewer spans": lambda: spans(LARGE // 64, LARGE),
    "texts": lambda: written(with_column(table_of(SMALL), "task_id", pa.array(["é" * LARGE, "", "x"]))),
    "junk in JSON": lambda: written(with_column(table_of(SMALL), "contract", pa.array([JUNK] * 3))),
    "junk in each row": lambda: written(
        with_column(
            table_of(encode_rollouts(rollouts(64, 1))),
            "contract",
            pa.array([f"[{n},{'[],' * (LARGE // 256)}0]" for n in range(64)]),
        )
    ),
    "dictionary": lambda: wordy(4096, "x" * 1000),
    "rows": lambda: encode_rollouts(rollouts(4096, 1)),
    "nulls": lambda: all_null(4096),
    "batches": lambda: written(table_of(encode_rollouts(rollouts(1024, 1))), 1),
}  # fmt: skip


@pytest.mark.parametrize("what", COSTLY)
def test_a_stream_costs_a_small_multiple_of_its_bytes(what: str) -> None:
    stream = COSTLY[what]()
    before = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(before)
    gc.collect()
    pa.set_memory_pool(counted)
    tracemalloc.start()
    try:
        with contextlib.suppress(ArrowError):
            decode_rollouts(stream)
    finally:
        peak = tracemalloc.get_traced_memory()[1] + counted.max_memory()
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert peak < 16 * len(stream) + 4 * 2**20


def test_a_stream_is_taken_whole_or_not_at_all() -> None:
    good = good_streams()
    for name, decode in (("rollouts", decode_rollouts), ("reserve", decode_reserve), ("candidates", decode_candidates)):
        stream = written(table_of(good[name]), 1)
        assert len(decode(stream)) > 1
        for end in messages(stream):
            with pytest.raises(ArrowError, match="cut short"):
                decode(stream[:end])
        for more in (b"\x00", stream[-8:], stream):
            with pytest.raises(ArrowError, match="bytes follow the Arrow IPC stream's end"):
                decode(stream + more)
