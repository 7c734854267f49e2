"""What passes, what does not, and what the admission rule says of an old rollout."""

import math

import pytest

from worker_agent.closure.comparisons import admit, compare, difference
from worker_agent.closure.fixture import FixtureRollout


@pytest.mark.parametrize(
    ("found", "passed"),
    [
        ([0.0] * 10, True),
        ([0.15] + [0.0] * 9, True),  # a limit itself passes
        ([0.1501] + [0.0] * 9, False),
        ([0.0299] * 10, True),
        ([0.0301] * 10, False),  # the mean, though no token is far off
        ([-0.2] + [0.0] * 9, False),
        ([math.nan] + [0.0] * 9, False),
        ([-math.inf] + [0.0] * 9, False),
    ],
)
def test_both_limits_hold(found: list[float], passed: bool) -> None:
    result = compare([found[:4], found[4:]], [[0.0] * 4, [0.0] * 6])
    assert (result.passed, result.tokens) == (passed, 10)


def test_a_shifted_position_does_not_pass() -> None:
    row = [-0.1, -2.0, -0.3, -4.0]
    assert compare([row], [row]).passed
    assert not compare([[*row[1:], row[0]]], [row]).passed


def test_rows_of_other_lengths_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare([[1.0, 2.0]], [[1.0]])
    with pytest.raises(ValueError, match="zip"):
        difference([[1.0, 2.0]], [[1.0]])
    assert difference([[1.0, 2.0]], [[0.5, 3.0]]) == [[0.5, -1.0]]


ROLLOUT = FixtureRollout(
    rollout_id="a:0.0", task_id="a", prompt_tokens=1, token_ids=(1, 2, 3), behavior_log_probs=(-1.0, -2.0), text=""
)


@pytest.mark.parametrize(
    ("current", "accepted", "reason", "drift"),
    [
        ([-1.0, -2.0], True, "ok", 0.0),
        ([-1.25, -1.875], True, "ok", 0.1875),
        ([-1.5, -2.0], False, "policy_drift", 0.25),
        ([math.nan, -2.0], False, "log_prob_not_finite", None),
    ],
)
def test_admission_is_the_coordinators_rule(
    current: list[float], accepted: bool, reason: str, drift: float | None
) -> None:
    verdict = admit(ROLLOUT, current)
    assert (verdict.accepted, verdict.reason, verdict.drift) == (accepted, reason, drift)
    assert (verdict.behavior_version, verdict.current_version, verdict.max_lag, verdict.max_drift) == (0, 1, 1, 0.2)
    assert verdict.freshness == ("tolerated" if drift is not None else None)
