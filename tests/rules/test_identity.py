"""Evidence, spans and content hashes: the batch kernels against direct loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.identity import (
    LOG_PROB_ROUNDING,
    canonical_json,
    canonical_log_probs,
    check_evidence,
    check_rows,
    check_spans,
    content_hash,
)

VOCAB = 50
Row = tuple[list[int], list[bool], list[float]]


def flat(rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row[0]) for row in rows], out=offsets[1:])
    return (
        np.array([t for row in rows for t in row[0]], dtype=np.int64),
        np.array([m for row in rows for m in row[1]], dtype=np.bool_),
        np.array([p for row in rows for p in row[2]], dtype=np.float32),
        offsets,
    )


def expected(row: Row) -> tuple[str, str] | None:
    """The first fault of one rollout by a plain loop: its code, and the position that its sentence names."""
    tokens, mask, log_probs = row
    if not any(mask):
        return "no_action_token", ""
    if mask[0]:
        return "action_at_start", ""
    for i, (acts, p) in enumerate(zip(mask, log_probs, strict=True)):
        if acts and not math.isfinite(p):
            return "log_prob_not_finite", f"[{i}]"
    for i, (acts, p) in enumerate(zip(mask, log_probs, strict=True)):
        if acts and p > np.float32(LOG_PROB_ROUNDING):
            return "log_prob_above_zero", f"[{i}]"
    for i, token in enumerate(tokens):
        if not 0 <= token < VOCAB:
            return "token_id_out_of_range", f"[{i}]"
    return None


log_prob = st.one_of(
    st.floats(-30, 0, width=32), st.sampled_from([math.nan, math.inf, -math.inf, 0.5, 0.0, float(np.float32(5e-5))])
)
token = st.one_of(st.integers(0, VOCAB - 1), st.sampled_from([-1, VOCAB, 2**31]))
row = st.integers(0, 6).flatmap(
    lambda n: st.tuples(
        st.lists(token, min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.lists(log_prob, min_size=n, max_size=n),
    )
)


@given(st.lists(row, max_size=6))
def test_a_batch_finds_the_same_first_fault_as_a_loop(rows: list[Row]) -> None:
    faults, facts = check_evidence(*flat(rows), VOCAB)
    for i, one in enumerate(rows):
        want = expected(one)
        if want is None:
            assert i not in faults
        else:
            assert faults[i].code == want[0]
            assert want[1] in faults[i].detail
        acting = [k for k, acts in enumerate(one[1]) if acts]
        assert facts.action_tokens[i] == len(acting)
        if acting:
            assert (facts.first_action[i], facts.last_action[i]) == (acting[0], acting[-1])
            assert bool(facts.zero_tail[i]) == (one[2][acting[-1]] == 0.0)


def test_rounding_above_zero_is_allowed_up_to_its_limit() -> None:
    rows: list[Row] = [([1, 2], [False, True], [0.0, p]) for p in (9e-5, 2e-4)]
    faults, _ = check_evidence(*flat(rows), VOCAB)
    assert list(faults) == [1]


@pytest.mark.parametrize(
    ("starts", "ends", "fault"),
    [
        ([2], [6], None),
        ([0], [6], None),
        ([2, 4], [4, 6], None),
        ([4, 2], [6, 4], None),  # in any order
        ([2, 5], [4, 6], None),  # the gap at 4 is no action token
        ([3], [6], "the action token at 2"),
        ([2], [5], "the action token at 5"),
        ([2, 5], [3, 6], "the action token at 3"),
        ([2, 3], [4, 6], "inside the span before it"),
        ([2, 4], [4, 4], "is [4, 4)"),
        ([2], [7], "over 6 tokens"),
        ([4], [2], "is [4, 2)"),
    ],
)
def test_spans_cover_every_action_token_once(starts: list[int], ends: list[int], fault: str | None) -> None:
    mask = np.array([False, False, True, True, False, True])
    found = check_spans(starts, ends, mask, 2, 5)
    if fault is None:
        assert found is None
    else:
        assert found is not None
        assert found.code == "spans_malformed"
        assert fault in found.detail


@given(st.lists(st.integers(-1, 8), min_size=1, max_size=4), st.lists(st.booleans(), min_size=1, max_size=7))
def test_rows_begin_at_0_ascend_and_never_begin_with_an_action_token(starts: list[int], mask: list[bool]) -> None:
    """The first row that is wrong is named; a wrong place comes before an action token at a right one."""
    found = check_rows(starts, np.array(mask))
    for k, start in enumerate(starts):
        placed = start == 0 if k == 0 else starts[k - 1] < start < len(mask)
        if not placed:
            assert found is not None
            assert (found.code, found.field) == ("rows_malformed", "row_starts")
            assert f"row_starts[{k}] is {start}" in found.detail
            return
        if mask[start]:
            assert found is not None
            assert (found.code, found.field) == ("action_at_start", "row_starts")
            assert f"action_mask[{start}]" in found.detail
            return
    assert found is None


def test_rows_of_one_rollout() -> None:
    mask = np.array([False, True, False, True, False, False])
    assert check_rows([0], mask) is None
    assert check_rows([0, 2, 4, 5], mask) is None
    fault = check_rows([0, 3], mask)
    assert fault is not None
    assert fault.code == "action_at_start"


def digest(log_probs: list[float], mask: list[bool], identity: dict[str, object] | None = None) -> bytes:
    marks = np.array(mask)
    canonical = canonical_log_probs(np.array(log_probs, dtype=np.float32), marks)
    return content_hash(identity or {"rollout_id": "r"}, np.arange(len(mask)), marks, canonical)


def test_masked_log_probs_are_no_part_of_the_content() -> None:
    mask = [False, True, False]
    assert digest([math.nan, -1.0, 3.0], mask) == digest([0.0, -1.0, -math.inf], mask)
    assert digest([0.0, -1.0, 0.0], mask) != digest([0.0, -1.5, 0.0], mask)
    assert digest([0.0, -0.0, 0.0], mask) == digest([0.0, 0.0, 0.0], mask)


def test_everything_else_is_part_of_the_content() -> None:
    mask, log_probs = [False, True], [0.0, -1.0]
    assert digest(log_probs, mask, {"rollout_id": "r", "task_id": "a"}) != digest(
        log_probs, mask, {"rollout_id": "r", "task_id": "b"}
    )
    assert digest(log_probs, [False, True]) != digest(log_probs, [True, True])


def test_canonical_json_does_not_depend_on_the_order_of_keys() -> None:
    assert canonical_json({"b": 1, "a": [1, 2.5, "é"]}) == '{"a":[1,2.5,"é"],"b":1}'.encode()
