"""What a rollout must carry: evidence that lines up, spans that cover it, and the hashes that name it.

Kernels work on a whole batch at once. A batch's evidence is flat: the values of all rollouts one after
another, and `offsets` (int64, shape [n + 1]) that say where each rollout begins and ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]

LOG_PROB_ROUNDING = 1e-4
"""An action log-prob may lie this much above 0, since engines round."""


@dataclass(frozen=True)
class Fault:
    """Why one rollout is rejected: a stable code, the field at fault and a sentence that names the position."""

    code: str
    field: str
    detail: str


@dataclass(frozen=True)
class EvidenceFacts:
    """Per rollout, over its action tokens; int64 and bool arrays of shape [n]. Meaningless where at fault."""

    action_tokens: IntArray
    first_action: IntArray
    last_action: IntArray
    zero_tail: BoolArray


def _first_in_segment(bad: BoolArray, offsets: IntArray) -> dict[int, int]:
    """For each rollout with a bad value: its index -> the position of the first one within it."""
    at = np.flatnonzero(bad)
    owner = np.searchsorted(offsets, at, side="right") - 1
    owners, first = np.unique(owner, return_index=True)
    return {int(i): int(at[k] - offsets[i]) for i, k in zip(owners, first, strict=True)}


def check_evidence(
    token_ids: IntArray,
    action_mask: BoolArray,
    behavior_log_probs: FloatArray,
    offsets: IntArray,
    vocab_size: int,
) -> tuple[dict[int, Fault], EvidenceFacts]:
    """Checks action evidence whose three columns already have equal lengths.

    Shapes: the three columns [N], `offsets` [n + 1]. Answers the first fault of each faulty rollout by its
    index, and facts about every rollout.
    """
    n = len(offsets) - 1
    lengths = np.diff(offsets)
    faults: dict[int, Fault] = {}

    # The action tokens of rollout i are those numbered bounds[i] to bounds[i + 1].
    at = np.flatnonzero(action_mask)
    bounds = np.searchsorted(at, offsets)
    action_tokens = np.diff(bounds).astype(np.int64)
    first_action = np.zeros(n, dtype=np.int64)
    last_action = np.zeros(n, dtype=np.int64)
    acting = action_tokens > 0
    first_action[acting] = at[bounds[:-1][acting]] - offsets[:-1][acting]
    last_action[acting] = at[bounds[1:][acting] - 1] - offsets[:-1][acting]

    zero_tail = np.zeros(n, dtype=np.bool_)
    zero_tail[acting] = behavior_log_probs[at[bounds[1:][acting] - 1]] == 0.0

    for i in np.flatnonzero(~acting):
        faults[int(i)] = Fault("no_action_token", "action_mask", "action_mask marks no action token")
    starts = offsets[:-1][lengths > 0]
    for i in np.flatnonzero(lengths > 0)[action_mask[starts]]:
        faults.setdefault(
            int(i),
            Fault("action_at_start", "action_mask", "action_mask[0] is true, but nothing comes before token 0"),
        )
    with np.errstate(invalid="ignore"):
        not_finite = action_mask & ~np.isfinite(behavior_log_probs)
        positive = action_mask & (behavior_log_probs > LOG_PROB_ROUNDING)
    for i, k in _first_in_segment(not_finite, offsets).items():
        faults.setdefault(
            i,
            Fault(
                "log_prob_not_finite",
                "behavior_log_probs",
                f"behavior_log_probs[{k}] is null or not finite at an action token",
            ),
        )
    for i, k in _first_in_segment(positive, offsets).items():
        value = float(behavior_log_probs[offsets[i] + k])
        faults.setdefault(
            i,
            Fault(
                "log_prob_above_zero",
                "behavior_log_probs",
                f"behavior_log_probs[{k}] is {value:g}; a log-prob is at most {LOG_PROB_ROUNDING:g}",
            ),
        )
    for i, k in _first_in_segment((token_ids < 0) | (token_ids >= vocab_size), offsets).items():
        value = int(token_ids[offsets[i] + k])
        faults.setdefault(
            i,
            Fault(
                "token_id_out_of_range",
                "token_ids",
                f"token_ids[{k}] is {value}; the run's vocabulary has ids 0 to {vocab_size - 1}",
            ),
        )
    return faults, EvidenceFacts(action_tokens, first_action, last_action, zero_tail)


def check_spans(
    starts: Sequence[int], ends: Sequence[int], action_mask: BoolArray, first_action: int, last_action: int
) -> Fault | None:
    """Checks that half-open spans cover every action token of one rollout, each once.

    `action_mask` has shape [tokens]; `first_action` and `last_action` are positions in it.
    """
    length = len(action_mask)
    previous_end = 0
    covered = 0
    for k in sorted(range(len(starts)), key=lambda j: starts[j]):
        start, end = starts[k], ends[k]
        if not start < end <= length:
            return Fault("spans_malformed", "spans", f"spans[{k}] is [{start}, {end}) over {length} tokens")
        if start < previous_end:
            return Fault("spans_malformed", "spans", f"spans[{k}] begins at {start}, inside the span before it")
        previous_end = end
        if len(starts) == 1:
            covers = start <= first_action and end > last_action
            return None if covers else _gap(action_mask, [(start, end)])
        covered += int(np.count_nonzero(action_mask[start:end]))
    if covered != int(np.count_nonzero(action_mask)):
        return _gap(action_mask, list(zip(starts, ends, strict=True)))
    return None


def check_rows(row_starts: Sequence[int], action_mask: BoolArray) -> Fault | None:
    """Checks where the training rows of one rollout begin: at 0, ever later, and never with an action token.

    `action_mask` has shape [tokens].
    """
    previous = -1
    for k, start in enumerate(row_starts):
        if (k == 0 and start != 0) or not previous < start < len(action_mask):
            return Fault(
                "rows_malformed",
                "row_starts",
                f"row_starts[{k}] is {start}: the first is 0, each is greater than the one before it and less than "
                f"{len(action_mask)}",
            )
        if action_mask[start]:
            return Fault("action_at_start", "row_starts", f"action_mask[{start}] is true, but a row begins there")
        previous = start
    return None


def _gap(action_mask: BoolArray, ranges: list[tuple[int, int]]) -> Fault:
    left = action_mask.copy()
    for start, end in ranges:
        left[start:end] = False
    return Fault("spans_malformed", "spans", f"no span covers the action token at {int(np.argmax(left))}")


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no white space, as UTF-8: what every hash here is taken over."""
    return _CANONICAL.encode(value).encode()


def canonical_hash(value: Any) -> str:
    """sha256 of the canonical JSON, as 64 hexadecimal digits: of a generation contract, for example."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def canonical_log_probs(behavior_log_probs: FloatArray, action_mask: BoolArray) -> npt.NDArray[np.float32]:
    """float32 log-probs with every masked position 0: they take no part in the content hash."""
    kept = np.where(action_mask, behavior_log_probs, np.float32(0)).astype("<f4")
    return kept + np.float32(0)  # -0.0 becomes 0.0


def content_hash(
    identity: Mapping[str, Any],
    token_ids: IntArray,
    action_mask: BoolArray,
    canonical: npt.NDArray[np.float32],
) -> bytes:
    """sha256 over everything that a rollout says, from decoded columns, so that JSON and Arrow agree.

    `identity` holds all fields but the evidence. The three columns, shape [tokens], follow its canonical JSON
    as little-endian int32, one byte a token, and float32.
    """
    return content_digest(
        canonical_json(identity),
        token_ids.astype("<i4").tobytes(),
        action_mask.astype(np.uint8).tobytes(),
        canonical.tobytes(),
    )


def content_digest(identity: bytes, *columns: bytes | memoryview) -> bytes:
    """`content_hash` of an identity's canonical JSON and the bytes of its three columns.

    One update of one hash: Python lets go of its lock for each, and many threads then wait for each other.
    """
    return hashlib.sha256(b"".join((identity, b"\0", *columns))).digest()
