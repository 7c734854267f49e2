"""Log-probs of the same tokens, held against each other: engine and learner, before and after, old and new policy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coordinator.rules import assess_policy_compatibility
from worker_agent.closure.fixture import FixtureRollout
from worker_agent.closure.profile import MAX_DRIFT, MAX_ERROR, MAX_LAG, MAX_MEAN_ERROR
from worker_agent.closure.result import Admission, Comparison

Rows = Sequence[Sequence[float]]
"""Per rollout the log-probs of its answer's tokens, in nats."""


def compare(found: Rows, expected: Rows) -> Comparison:
    """How far two sets of log-probs of the same tokens are apart. What is not finite does not pass.

    Raises ValueError for rows of unequal lengths.
    """
    errors = np.abs(np.concatenate([np.asarray(row, np.float64) for row in difference(found, expected)]))
    largest, mean = float(errors.max()), float(errors.mean())
    return Comparison(
        tokens=errors.size,
        max_abs_error=largest,
        mean_abs_error=mean,
        max_limit=MAX_ERROR,
        mean_limit=MAX_MEAN_ERROR,
        passed=largest <= MAX_ERROR and mean <= MAX_MEAN_ERROR,  # false for NaN
    )


def difference(after: Rows, before: Rows) -> list[list[float]]:
    """after - before, token by token."""
    return [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(after, before, strict=True)]


def admit(rollout: FixtureRollout, current: Sequence[float]) -> Admission:
    """What the admission rule says of a rollout of version 0 when the learner holds version 1.

    `current` are its answer's log-probs under version 1. One that is not finite is admitted by no rule: the reason
    is then `log_prob_not_finite`, and there is no drift.
    """
    finite = all(map(math.isfinite, current))
    verdict = (
        assess_policy_compatibility(
            list(rollout.behavior_log_probs),
            list(current),
            [True] * len(current),
            behavior_version=0,
            current_version=1,
            max_lag=MAX_LAG,
            max_mean_abs_log_ratio=MAX_DRIFT,
        )
        if finite
        else {"accepted": False, "reason": "log_prob_not_finite", "freshness": None, "mean_abs_log_ratio": None}
    )
    return Admission(
        rollout_id=rollout.rollout_id,
        task_id=rollout.task_id,
        accepted=verdict["accepted"],
        reason=verdict["reason"],
        freshness=verdict["freshness"],
        drift=verdict["mean_abs_log_ratio"],
        behavior_version=0,
        current_version=1,
        max_lag=MAX_LAG,
        max_drift=MAX_DRIFT,
    )
