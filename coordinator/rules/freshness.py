"""Is a rollout close enough to the current policy? Lag in version clocks, drift in measured log-probs.

The kernels work on columns of a whole batch of rollouts; ``assess_policy_compatibility`` is their face for
one. Log-ratios are d = log pi_current(a|s) - log pi_behavior(a|s), in nats, at action tokens only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.reservation import first_reason

COMPATIBILITY_REASONS: tuple[str, ...] = (
    "empty_action_mask",
    "future_policy",
    "stale_policy",
    "policy_drift",
    "ok",
)
"""The verdicts of ``assess_policy_compatibility``, in the order in which they are given."""

_FRESHNESS = np.array(["fresh", "tolerated", "stale", "future"], dtype=object)
_FRESH, _TOLERATED, _STALE, _FUTURE = range(4)

_LARGEST = np.finfo(np.float64).max
_LOG_2 = math.log(2.0)


class NonFiniteLogProbError(ValueError):
    """A log-prob at an action token is NaN or infinite, so that no drift can be measured.

    ``rollout`` is the index in the batch, ``position`` the token's index within that rollout.
    """

    def __init__(self, rollout: int, position: int) -> None:
        super().__init__(f"rollout {rollout}: the log-prob of the action token at position {position} is not finite")
        self.rollout = rollout
        self.position = position


@dataclass(frozen=True)
class DriftStatistics:
    """How far the current policy is from the behaviour policy: one column per measure, shape [n_rollouts].

    All are over the action tokens of one rollout, float64 but for ``n``. A rollout without action tokens has
    ``n`` 0 and NaN elsewhere, and NaN is below no limit.
    """

    n: NDArray[np.int64]
    """Action tokens."""
    mean_abs: NDArray[np.float64]
    """Mean of |d|, bit for bit what ``numpy.mean`` gives for that rollout alone. This is *the* drift."""
    max_abs: NDArray[np.float64]
    """Largest |d|."""
    k3: NDArray[np.float64]
    """Mean of exp(d) - 1 - d: for tokens drawn from the behaviour policy an unbiased, never negative estimate
    of KL(behaviour || current) (J. Schulman, "Approximating KL Divergence", 2020). inf once exp(d) exceeds
    float64, from d of about 709.8."""
    outside_share: NDArray[np.float64]
    """Share of tokens whose ratio exp(d) lies outside [0.5, 2]."""
    effective_sample_size: NDArray[np.float64]
    """(sum w)^2 / (n sum w^2) over the ratios w = exp(d): Kish's effective sample size divided by n, from 1/n
    (one token outweighs all others) to 1 (equal ratios)."""


def lags(behavior_clock: NDArray[Any], current_clock: int) -> NDArray[Any]:
    """Lag of each behaviour version, in versions: the difference of lag clocks.

    ``behavior_clock`` is int64 [n]; so is the result. Negative where the behaviour version is the newer one.
    """
    return np.asarray(current_clock - behavior_clock)


def freshness(oldest_lag: NDArray[Any], newest_lag: NDArray[Any], max_lag: int) -> NDArray[np.object_]:
    """``future``, ``fresh``, ``tolerated`` or ``stale`` per rollout: an object column [n] of plain strings.

    ``oldest_lag`` and ``newest_lag`` are the lags of the versions that made a rollout's oldest and newest
    action token, int64 [n]. The newest decides on future (below 0), the oldest on the rest (0, up to
    ``max_lag``, above). A caller that excuses the open candidate gives 0 as the newest lag; an oldest lag
    below 0 then counts as fresh.
    """
    codes = np.full(np.shape(oldest_lag), _FRESH)
    codes[oldest_lag > 0] = _TOLERATED
    codes[oldest_lag > max_lag] = _STALE
    codes[newest_lag < 0] = _FUTURE
    return np.asarray(_FRESHNESS[codes], dtype=object)


def drift_statistics(
    behavior: NDArray[np.floating[Any]],
    current: NDArray[np.floating[Any]],
    action_mask: NDArray[np.bool_],
    offsets: NDArray[np.integer[Any]],
) -> DriftStatistics:
    """Drift of every rollout of a batch whose tokens lie end to end in flat columns.

    ``behavior`` and ``current`` are log-probs, floating [N], widened to float64 before anything is
    subtracted; ``action_mask`` is bool [N]; ``offsets`` is integer [n_rollouts + 1]: rollout i owns tokens
    ``offsets[i]`` up to ``offsets[i + 1]``. What stands at a masked position is never read into a number, NaN
    and infinities included.

    Raises NonFiniteLogProbError for the first action token with a log-prob that is not finite, and ValueError
    for columns of the wrong dtype, shape or length or offsets that do not cover them from 0 to N in order.
    """
    _check_columns(behavior, current, action_mask, offsets)
    action = np.flatnonzero(action_mask)
    old = behavior[action].astype(np.float64, copy=False)
    new = current[action].astype(np.float64, copy=False)
    not_finite = ~(np.isfinite(old) & np.isfinite(new))
    if not_finite.any():
        position = int(action[not_finite.argmax()])
        rollout = int(np.searchsorted(offsets, position, side="right")) - 1
        raise NonFiniteLogProbError(rollout, position - int(offsets[rollout]))

    # Action tokens of rollout i are those numbered bounds[i] to bounds[i + 1]. reduceat cannot express an
    # empty segment, and dropping the empty ones leaves the others adjoining.
    bounds = np.searchsorted(action, offsets)
    n = np.diff(bounds).astype(np.int64)
    occupied = n > 0
    starts, counts = bounds[:-1][occupied], n[occupied]

    # Log-probs near the ends of float64 may overflow here, and the infinity that this gives is the answer.
    with np.errstate(over="ignore", under="ignore"):
        d = new - old
        distance = np.abs(d)
        # Within float64's range inf - inf cannot arise below.
        d = np.clip(d, -_LARGEST, _LARGEST)
        segments = _Segments(starts, counts)
        mean_abs = segments.sums(distance) / counts
        max_abs = np.maximum.reduceat(distance, starts) if starts.size else distance
        # expm1 keeps the digits that exp(d) - 1 loses at small d; its last rounding may still fall below d.
        k3 = segments.sums(np.maximum(np.expm1(d) - d, 0.0)) / counts
        outside_share = segments.sums(distance > _LOG_2) / counts
        # The ratio is free of scale: with the largest weight at 1 neither sum can overflow or vanish.
        peak = np.maximum.reduceat(d, starts) if starts.size else d
        w = np.exp(d - np.repeat(peak, counts))
        sample_size = segments.sums(w) ** 2 / (counts * segments.sums(w * w))

    def per_rollout(values: NDArray[np.float64]) -> NDArray[np.float64]:
        column = np.full(n.shape, np.nan)
        column[occupied] = values
        return column

    return DriftStatistics(
        n=n,
        mean_abs=per_rollout(mean_abs),
        max_abs=per_rollout(max_abs),
        k3=per_rollout(k3),
        outside_share=per_rollout(outside_share),
        effective_sample_size=per_rollout(np.minimum(sample_size, 1.0)),
    )


def assess_policy_compatibility(
    old_log_probs: Sequence[float | None] | NDArray[Any],
    current_log_probs: Sequence[float | None] | NDArray[Any],
    action_mask: Sequence[bool] | NDArray[np.bool_],
    behavior_version: int,
    current_version: int,
    max_lag: int,
    max_mean_abs_log_ratio: float,
) -> dict[str, Any]:
    """May a rollout by ``behavior_version`` enter an update of ``current_version``?

    The three sequences have one entry per token. Log-probs are in nats, read as float64 without any rounding
    on the way; at a masked position anything may stand. Versions and ``max_lag`` are plain ints.

    Returns ``accepted`` (bool), ``reason``, ``freshness`` (``future``, ``fresh``, ``tolerated``, ``stale``)
    and ``mean_abs_log_ratio`` (the mean of |d| over action tokens). Reasons, the first that holds:
    ``empty_action_mask`` (freshness and mean are None), ``future_policy``, ``stale_policy``,
    ``policy_drift``, ``ok``. A mean equal to the limit is accepted. Equal versions prove nothing: the drift
    is measured all the same.

    Raises ValueError, before any reason is looked for: a version or ``max_lag`` that is not a non-negative
    int (a bool is not one), a limit that is negative or not a finite number, sequences of different lengths,
    a mask of anything but bools, or at an action position a log-prob that is not a finite number.
    """
    for name, number in (
        ("behavior_version", behavior_version),
        ("current_version", current_version),
        ("max_lag", max_lag),
    ):
        if type(number) is not int or number < 0:
            raise ValueError(f"{name} must be a non-negative int, not {number!r}")
    limit = _finite(max_mean_abs_log_ratio)
    if limit is None or limit < 0:
        raise ValueError(
            f"max_mean_abs_log_ratio must be a finite number of at least 0, not {max_mean_abs_log_ratio!r}"
        )
    mask = _plain(action_mask)
    old, new = _plain(old_log_probs), _plain(current_log_probs)
    if not len(old) == len(new) == len(mask):
        raise ValueError(f"lengths differ: {len(old)} old, {len(new)} current log-probs, {len(mask)} mask entries")
    for position, entry in enumerate(mask):
        if type(entry) is not bool:
            raise ValueError(f"action_mask[{position}] must be a bool, not {entry!r}")
    behavior = _action_column("old_log_probs", old, mask)
    current = _action_column("current_log_probs", new, mask)

    drift = drift_statistics(
        behavior,
        current,
        np.ones(behavior.size, dtype=np.bool_),
        np.array([0, behavior.size], dtype=np.int64),
    )
    # Object columns, because Python's version numbers may exceed int64.
    lag = lags(np.array([behavior_version], dtype=object), current_version)
    kind = freshness(lag, lag, max_lag)
    reason = first_reason(
        {
            "empty_action_mask": drift.n == 0,
            "future_policy": kind == "future",
            "stale_policy": kind == "stale",
            "policy_drift": ~(drift.mean_abs <= limit),
        },
        COMPATIBILITY_REASONS,
    )[0]
    empty = reason == "empty_action_mask"
    return {
        "accepted": reason == "ok",
        "reason": reason,
        "freshness": None if empty else kind[0],
        "mean_abs_log_ratio": None if empty else float(drift.mean_abs[0]),
    }


class _Segments:
    """Sums of adjoining, non-empty segments of a column, each rounded as ``numpy.sum`` rounds it alone."""

    def __init__(self, starts: NDArray[np.integer[Any]], counts: NDArray[np.int64]) -> None:
        # reduceat adds a segment's first element last, numpy.sum starts from 0. A 0 before each segment makes
        # both add in the same order, so that a mean at the limit is judged alike in a batch and alone.
        shift = np.arange(1, starts.size + 1)
        self._begins = starts + shift - 1
        self._padded = np.zeros(int(counts.sum()) + starts.size)
        self._places = np.repeat(shift, counts)
        self._places += np.arange(self._places.size)

    def sums(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """One sum per segment, float64. ``values`` is floating or bool [N]."""
        if not self._begins.size:
            return np.zeros(0)
        self._padded[self._places] = values
        return np.asarray(np.add.reduceat(self._padded, self._begins), dtype=np.float64)


def _check_columns(
    behavior: NDArray[Any], current: NDArray[Any], action_mask: NDArray[Any], offsets: NDArray[Any]
) -> None:
    for name, column, kinds in (
        ("behavior", behavior, "f"),
        ("current", current, "f"),
        ("action_mask", action_mask, "b"),
        ("offsets", offsets, "iu"),
    ):
        if column.ndim != 1 or column.dtype.kind not in kinds:
            raise ValueError(f"{name} has the wrong shape or dtype: {column.ndim} dimensions of {column.dtype}")
    if not behavior.size == current.size == action_mask.size:
        raise ValueError(f"lengths differ: {behavior.size} behavior, {current.size} current, {action_mask.size} mask")
    if offsets.size == 0 or offsets[0] != 0 or offsets[-1] != behavior.size or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"offsets must rise from 0 to {behavior.size}")


def _plain(values: Sequence[Any] | NDArray[Any]) -> list[Any]:
    """The entries as Python objects; every NumPy float up to float64 becomes a Python float without loss."""
    return list(values.tolist()) if isinstance(values, np.ndarray) else list(values)


def _action_column(name: str, values: list[Any], mask: list[bool]) -> NDArray[np.float64]:
    numbers: list[float] = []
    for position, (value, is_action) in enumerate(zip(values, mask, strict=True)):
        if is_action:
            number = _finite(value)
            if number is None:
                raise ValueError(f"{name}[{position}] is at an action token and must be a finite number, not {value!r}")
            numbers.append(number)
    return np.array(numbers, dtype=np.float64)


def _finite(value: object) -> float | None:
    """``value`` as a float if it is a finite real number (a bool is not a number here), else None."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
