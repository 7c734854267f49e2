"""Arrow IPC streams to try a decoder with: good ones, odd ones, and what becomes of them on a bad wire."""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.wire.columns import (
    CandidateColumns,
    RolloutColumns,
    encode_candidates,
    encode_reserve,
    encode_rollouts,
    ragged,
    reserve_columns,
    rollout_columns,
)
from coordinator.wire.rollouts import Rollout
from coordinator.wire.updates import ReserveRequest

HASH = "a" * 64
CONTRACT = {
    "tokenizer_hash": HASH,
    "chat_template_hash": HASH,
    "temperature": 1.0,
    "top_p": 1.0,
    "logprobs_mode": "raw",
    "dtype": "float32",
}


def rollouts(count: int, tokens: int = 5) -> RolloutColumns:
    """Good rollouts r0, r1 and so on."""
    return rollout_columns(
        [
            Rollout.model_validate(
                {
                    "rollout_id": f"r{n}",
                    "task_id": "t",
                    "task_source": "s",
                    "group_id": "g",
                    "sample_index": n,
                    "spans": [{"version": 0, "artifact_hash": HASH, "start": 0, "end": tokens}],
                    "span_source": "dispatch",
                    "worker_id": "w",
                    "incarnation": "w-1",
                    "contract": CONTRACT,
                    "token_ids": list(range(tokens)),
                    "action_mask": [i > 0 for i in range(tokens)],
                    "behavior_log_probs": [None] + [-0.5] * (tokens - 1),
                }
            )
            for n in range(count)
        ]
    )


def good_streams() -> dict[str, bytes]:
    """A stream for each decoder, by what it carries."""
    items = [{"rollout_id": f"r{n}", "revision": 1, "current_log_probs": [None, -0.1] * n} for n in range(3)]
    reserve = ReserveRequest.model_validate({"owner": "o", "after_commit_no": 3, "rollouts": items})
    candidates = CandidateColumns(
        ["a", "b"], [1, 2], ["g", "g"], ["t", "t"], ["s", "s"], [0, 1], [0, 0], [2, 2], [1, 1], [0.25, 0.5],
        ragged([[5, 6], [7]], np.int64), ragged([[False, True], [True]], np.bool_),
        ragged([[np.nan, -1.5], [-1.0]], np.float32), [[0], [0]], [b"x", None], ["g"], None,
    )  # fmt: skip
    return {
        "rollouts": encode_rollouts(rollouts(3)),
        "reserve": encode_reserve(reserve_columns(reserve)),
        "candidates": encode_candidates(candidates),
    }


def table_of(stream: bytes) -> pa.Table:
    """The stream's table, read without any check."""
    return pa.ipc.open_stream(stream).read_all()


def written(table: pa.Table, chunk: int | None = None, **options: Any) -> bytes:
    """The table as a stream, in batches of at most `chunk` rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, chunk)
    return bytes(sink.getvalue().to_pybytes())


def with_column(table: pa.Table, name: str, column: Any) -> pa.Table:
    """The table with another column in this one's place."""
    return table.set_column(table.column_names.index(name), name, column)


def odd_streams(good: bytes) -> Iterator[tuple[str, bytes]]:
    """The same content written in other ways, and each column as other types. Arrow can read all of them."""
    table = table_of(good)
    yield "in batches", written(table, 1)
    yield "empty", written(table.slice(0, 0))
    for codec in ("lz4", "zstd"):
        yield codec, written(table, compression=codec)
    yield "twice a column", written(table.append_column(table.field(0), table.column(0)))
    yield "a column less", written(table.drop_columns([table.column_names[-1]]))
    yield "other metadata", written(table.replace_schema_metadata({"request": "[" * 500, "groups": "{", "empty": "1"}))
    yield "binary metadata", written(table.replace_schema_metadata({b"request": b"\xff", b"groups": b"\xff"}))
    for name in table.column_names:
        for what, make in _odd_columns(table.column(name).combine_chunks()).items():
            try:
                stream = written(with_column(table, name, make()))
            except (pa.ArrowException, TypeError, NotImplementedError):
                continue  # Arrow has no such column
            yield f"{name} as {what}", stream


def _odd_columns(column: pa.Array) -> dict[str, Callable[[], pa.Array]]:
    count, kind, rows = len(column), column.type, column.to_pylist()
    odd: dict[str, Callable[[], pa.Array]] = {
        "null": lambda: pa.nulls(count),
        "nulls": lambda: pa.nulls(count, kind),
        "dictionary": lambda: column.dictionary_encode(),
        "runs": lambda: pc.run_end_encode(column),
        "extension": lambda: pa.ExtensionArray.from_storage(pa.opaque(kind, "x", "y"), column),
        "struct": lambda: pa.StructArray.from_arrays([column], ["x"]),
        "union": lambda: pa.UnionArray.from_sparse(pa.array([0] * count, pa.int8()), [column]),
        "lists": lambda: pa.FixedSizeListArray.from_arrays(column, 1),
        "no lists": lambda: pa.array([[]] * count, pa.list_(pa.null())),
        "no width": lambda: pa.array([b""] * count, pa.binary(0)),
    }
    if pa.types.is_list(kind):
        inner = kind.value_type
        return odd | {
            "large list": lambda: pa.array(rows, pa.large_list(inner)),
            "list view": lambda: pa.array(rows, pa.list_view(inner)),
            "large list view": lambda: pa.array(rows, pa.large_list_view(inner)),
            "dictionary inside": lambda: pa.ListArray.from_arrays(column.offsets, column.values.dictionary_encode()),
            "empty structs": lambda: pa.array([[{}]] * count, pa.list_(pa.struct([]))),
            "null inside": lambda: pa.array([[None]] * count, pa.list_(pa.null())),
            "text inside": lambda: pa.array([["1"]] * count, pa.list_(pa.utf8())),
        }
    if pa.types.is_string(kind):
        others = [pa.large_utf8(), pa.string_view(), pa.binary(), pa.json_()]
    else:
        others = [pa.int8(), pa.uint64(), pa.float64(), pa.float16(), pa.utf8(), pa.bool_(), pa.decimal128(9, 2)]
    return odd | {str(other): functools.partial(column.cast, other) for other in others}


def messages(stream: bytes) -> list[int]:
    """Where each message of a good stream begins, its end-of-stream marker last."""
    starts, reader = [], pa.BufferReader(stream)
    while True:
        starts.append(reader.tell())
        try:
            pa.ipc.read_message(reader)
        except EOFError:
            return starts


WORDS = (0, 1, 2, 7, 8, 127, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1, 2**64 - 8)


def mutated(stream: bytes, other: bytes, chance: random.Random) -> bytes:
    """The stream after one to four accidents; `other` is what may run into it."""
    data = bytearray(stream)
    for _ in range(chance.choice((1, 1, 1, 1, 2, 4))):
        if len(data) < 16:
            break
        at = chance.randrange(len(data))
        match chance.randrange(12):
            case 0 | 1 | 2:
                data[at] ^= 1 << chance.randrange(8)
            case 3:
                data[at] = chance.randrange(256)
            case 4 | 5 | 6 | 7:  # a number of a header or an offset of a column
                size = chance.choice((4, 8))
                at = min(at & ~3, len(data) - size)
                old = int.from_bytes(data[at : at + size], "little")
                new = chance.choice((*WORDS, old + 1, old - 1, old * 2, old + 8, len(data))) % 2 ** (8 * size)
                data[at : at + size] = new.to_bytes(size, "little")
            case 8:  # the length of a message
                starts = [n for n in range(0, len(data) - 8, 4) if data[n : n + 4] == b"\xff" * 4]
                if starts:
                    struct.pack_into("<i", data, chance.choice(starts) + 4, chance.choice((-1, 0, 8, at, 2**31 - 1)))
            case 9:
                del data[at:]
            case 10:  # from here on another stream, or a piece of it in between
                begin = chance.choice((chance.randrange(len(other)), chance.choice(messages(other))))
                at = chance.choice((at, chance.choice(messages(stream))))
                end = chance.choice((len(other), min(len(other), begin + chance.randrange(1, 200))))
                data[at : at if chance.random() < 0.5 else len(data)] = other[begin:end]
            case _:
                data += chance.choice((b"\x00", b"\xff" * 8, other, bytes(data)))
    return bytes(data)
