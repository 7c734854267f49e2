"""Arrow and JSON are two spellings of one thing, and a stream that is neither is refused whole."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from coordinator.rules.identity import Fault
from coordinator.wire.columns import (
    ROLLOUT_SCHEMA,
    ArrowError,
    CandidateColumns,
    ReserveColumns,
    decode_candidates,
    decode_reserve,
    decode_rollouts,
    encode_candidates,
    encode_reserve,
    encode_rollouts,
    ragged,
    reserve_columns,
    rollout_columns,
)
from coordinator.wire.rollouts import Rollout
from coordinator.wire.updates import EmptyReason, ReserveRequest, ReserveVerdict

HASH = "a" * 64
CONTRACT = {
    "tokenizer_hash": HASH,
    "chat_template_hash": HASH,
    "temperature": 1.0,
    "top_p": 1.0,
    "logprobs_mode": "raw",
    "dtype": "float32",
}


def rollout(n: int, tokens: int) -> Rollout:
    return Rollout.model_validate(
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


def test_rollouts_come_back_as_they_went() -> None:
    sent = rollout_columns([rollout(0, 4), rollout(1, 7)])
    received = decode_rollouts(encode_rollouts(sent))
    assert received.identities == sent.identities
    assert received.ids == ["r0", "r1"]
    for name in ("token_ids", "action_mask", "behavior_log_probs"):
        for i in range(2):
            np.testing.assert_array_equal(getattr(received, name)[i], getattr(sent, name)[i])
    assert math.isnan(received.behavior_log_probs[0][0])


def test_a_row_without_identity_is_a_fault_and_the_others_stand() -> None:
    table = pa.ipc.open_stream(encode_rollouts(rollout_columns([rollout(0, 3), rollout(1, 3)]))).read_all()
    ids = table.column("task_id").to_pylist()
    table = table.set_column(table.column_names.index("task_id"), "task_id", pa.array([ids[0], None]))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    received = decode_rollouts(sink.getvalue().to_pybytes())
    assert not isinstance(received.identities[0], Fault)
    fault = received.identities[1]
    assert isinstance(fault, Fault)
    assert (fault.code, fault.field) == ("missing_field", "task_id")


def test_wrong_columns_are_named() -> None:
    sink = pa.BufferOutputStream()
    schema = pa.schema([f for f in ROLLOUT_SCHEMA if f.name != "spans"] + [pa.field("extra", pa.int8())])
    with pa.ipc.new_stream(sink, schema):
        pass
    with pytest.raises(ArrowError, match=r"missing columns: \['spans'\]; unknown columns: \['extra'\]"):
        decode_rollouts(sink.getvalue().to_pybytes())


def test_mutated_and_truncated_streams_are_refused_or_read_and_never_anything_else() -> None:
    good = encode_rollouts(rollout_columns([rollout(n, 5) for n in range(4)]))
    chance = random.Random(7)
    refused = 0
    for _ in range(1500):
        data = bytearray(good[: chance.randrange(len(good))] if chance.random() < 0.3 else good)
        for _ in range(chance.randrange(4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            decode_rollouts(bytes(data))
        except ArrowError:
            refused += 1
    assert refused > 300


def test_a_reservation_is_the_same_from_json_and_from_arrow() -> None:
    body = {
        "owner": "o",
        "after_commit_no": 3,
        "confirm_drift": True,
        "rollouts": [
            {"rollout_id": "a", "revision": 1, "current_log_probs": [None, -0.1], "use": "chosen"},
            {"rollout_id": "b", "revision": 2},
        ],
    }
    from_json = reserve_columns(ReserveRequest.model_validate(body))
    from_arrow = decode_reserve(encode_reserve(from_json))
    for name in ("owner", "after_commit_no", "confirm_drift", "rollout_id", "revision", "use", "given"):
        assert getattr(from_json, name) == getattr(from_arrow, name)
    np.testing.assert_array_equal(from_json.current_log_probs.values, from_arrow.current_log_probs.values)
    assert from_arrow.current_log_probs[0][1] == -0.1  # not rounded to float32


def test_a_reservation_in_arrow_has_the_limits_of_one_in_json() -> None:
    columns = ReserveColumns("o", 0, False, ["a"], [-1], [None], [False], ragged([[]], np.float64))
    with pytest.raises(ValidationError):
        decode_reserve(encode_reserve(columns))


def test_candidates_come_back_as_they_went() -> None:
    empty = EmptyReason(reason="nothing_rewarded", since=None)
    sent = CandidateColumns(
        ["a"], [1], ["g"], ["t"], ["s"], [0], [1], [2], [1], [0.25],
        ragged([[5, 6]], np.int64), ragged([[False, True]], np.bool_), ragged([[np.nan, -1.5]], np.float32),
        [[0]], [b"\x00\xff"], ["g"], empty, "a" * 64,
        [ReserveVerdict(rollout_id="a", verdict="reserved", state="reserved", revision=2, lag=1, drift=None)],
    )  # fmt: skip
    received = decode_candidates(encode_candidates(sent))
    assert received.to_model() == sent.to_model()
    assert received.to_model().rollouts[0].behavior_log_probs == [None, -1.5]


@pytest.mark.parametrize("view", [pa.list_view, pa.large_list_view])
@pytest.mark.parametrize("name", ["token_ids", "action_mask", "behavior_log_probs", "spans"])
def test_list_views_are_refused_since_their_cast_loses_rows(
    name: str, view: Callable[[pa.DataType], pa.DataType]
) -> None:
    table = pa.ipc.open_stream(encode_rollouts(rollout_columns([rollout(0, 3), rollout(1, 3)]))).read_all()
    column = table.column(name)
    views = pa.array(column.to_pylist(), view(column.type.value_type))
    table = table.set_column(table.column_names.index(name), name, views)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ArrowError, match=f"column {name} is "):
        decode_rollouts(sink.getvalue().to_pybytes())
