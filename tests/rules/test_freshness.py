import math
import warnings
from copy import deepcopy
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules import assess_policy_compatibility
from coordinator.rules.freshness import (
    COMPATIBILITY_REASONS,
    DriftStatistics,
    NonFiniteLogProbError,
    drift_statistics,
    freshness,
    lags,
)

COLUMNS = ("n", "mean_abs", "max_abs", "k3", "outside_share", "effective_sample_size")
ANYTHING = st.floats(allow_nan=True, allow_infinity=True)
LOG_PROB = st.floats(-40.0, 0.0)


@st.composite
def batches(draw, log_prob=LOG_PROB, max_rollouts=6):
    """Rollouts as (behavior, current, mask); masked positions hold anything, NaN and infinities included."""
    rollouts = []
    for _ in range(draw(st.integers(0, max_rollouts))):
        mask = draw(st.lists(st.booleans(), max_size=12))
        columns = [np.array([draw(log_prob if m else ANYTHING) for m in mask], np.float64) for _ in range(2)]
        rollouts.append((*columns, np.array(mask, bool)))
    return rollouts


def flat(rollouts):
    behavior = np.concatenate([np.zeros(0), *(r[0] for r in rollouts)])
    current = np.concatenate([np.zeros(0), *(r[1] for r in rollouts)])
    mask = np.concatenate([np.zeros(0, bool), *(r[2] for r in rollouts)])
    offsets = np.cumsum([0, *(r[2].size for r in rollouts)])
    return behavior, current, mask, offsets


def directly(behavior, current, mask):
    """The textbook formulas, one rollout at a time."""
    d = current[mask] - behavior[mask]
    if not d.size:
        return (0, *[math.nan] * 5)
    w = np.exp(d)
    return (
        d.size,
        np.mean(np.abs(d)),
        np.max(np.abs(d)),
        np.mean(np.exp(d) - 1 - d),
        np.mean((w < 0.5) | (w > 2.0)),
        w.sum() ** 2 / (d.size * (w * w).sum()),
    )


def same(a: DriftStatistics, b: DriftStatistics) -> bool:
    return all(np.array_equal(getattr(a, c), getattr(b, c), equal_nan=c != "n") for c in COLUMNS)


@given(batches())
def test_drift_is_the_direct_formula_in_float64(rollouts):
    statistics = drift_statistics(*flat(rollouts))
    for column in COLUMNS:
        values = getattr(statistics, column)
        assert values.shape == (len(rollouts),)
        assert values.dtype == (np.int64 if column == "n" else np.float64)
    for i, rollout in enumerate(rollouts):
        got = [getattr(statistics, column)[i] for column in COLUMNS]
        want = directly(*rollout)
        assert got == pytest.approx(want, rel=1e-9, abs=1e-12, nan_ok=True)
        if want[0]:
            # The mean decides admission at equality, so it is the same number and not only a near one.
            assert got[:3] == list(want[:3])
            assert 1 / want[0] <= got[5] * (1 + 1e-12) and got[5] <= 1.0


def test_the_mean_is_bit_for_bit_numpys_at_every_length():
    rng = np.random.default_rng(7)
    lengths = [1, 2, 3, 7, 8, 9, 127, 128, 129, 1000, 8193, 20000, 5]
    rollouts = [(-rng.exponential(2.0, n), -rng.exponential(2.0, n), rng.random(n) < 0.9) for n in lengths]
    statistics = drift_statistics(*flat(rollouts))
    for i, (behavior, current, mask) in enumerate(rollouts):
        assert statistics.n[i] == mask.sum()
        if mask.any():
            assert statistics.mean_abs[i] == np.mean(np.abs(current[mask] - behavior[mask]))


@given(batches(), st.randoms(use_true_random=False))
def test_masked_positions_are_irrelevant(rollouts, random):
    behavior, current, mask, offsets = flat(rollouts)
    expected = drift_statistics(behavior, current, mask, offsets)
    junk = [math.nan, math.inf, -math.inf, 1e308, -0.0]
    other = [np.where(mask, column, [random.choice(junk) for _ in mask]) for column in (behavior, current)]
    assert same(drift_statistics(*other, mask, offsets), expected)
    for i, entry in enumerate(mask):
        if not entry:
            for column in other:
                column[i] = math.nan
    assert same(drift_statistics(*other, mask, offsets), expected)


@given(batches())
def test_a_batch_is_its_rollouts_one_by_one_and_nothing_is_changed(rollouts):
    columns = flat(rollouts)
    untouched = deepcopy(columns)
    whole = drift_statistics(*columns)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(columns, untouched, strict=True))
    for i, rollout in enumerate(rollouts):
        alone = drift_statistics(*flat([rollout]))
        picked = DriftStatistics(*(getattr(whole, column)[i : i + 1] for column in COLUMNS))
        assert same(alone, picked)


def test_empty_batches_and_rollouts_without_action_tokens():
    assert all(getattr(drift_statistics(*flat([])), column).shape == (0,) for column in COLUMNS)
    none = (np.array([math.nan]), np.array([math.inf]), np.array([False]))
    one = (np.array([-1.0]), np.array([-1.5]), np.array([True]))
    no_tokens = (np.zeros(0), np.zeros(0), np.zeros(0, bool))
    statistics = drift_statistics(*flat([none, no_tokens, one, no_tokens, none, one, none]))
    assert statistics.n.tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert statistics.mean_abs[[2, 5]].tolist() == [0.5, 0.5]
    for column in COLUMNS[1:]:
        assert np.isnan(getattr(statistics, column)[[0, 1, 3, 4, 6]]).all()
    assert not (statistics.mean_abs[[0, 1]] <= 1e9).any(), "a rollout without evidence is below no limit"


def test_ratios_on_the_edge_are_inside():
    behavior = np.array([-5.0, -5.0, -5.0, -5.0])
    step = np.array([math.log(2.0), -math.log(2.0), 0.6932, -0.6932])
    statistics = drift_statistics(np.zeros(4), step, np.ones(4, bool), np.array([0, 2, 4]))
    assert statistics.outside_share.tolist() == [0.0, 1.0]
    assert drift_statistics(behavior, behavior + 0.5, np.ones(4, bool), np.array([0, 4])).outside_share[0] == 0.0


@given(batches(log_prob=st.floats(allow_nan=False, allow_infinity=False)))
def test_any_finite_log_probs_give_numbers_without_a_warning(rollouts):
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        statistics = drift_statistics(*flat(rollouts))
    some = statistics.n > 0
    for column in COLUMNS:
        assert not np.isnan(getattr(statistics, column)[some]).any()
    assert (statistics.k3[some] >= 0).all()
    assert ((statistics.outside_share[some] >= 0) & (statistics.outside_share[some] <= 1)).all()
    assert ((statistics.effective_sample_size[some] > 0) & (statistics.effective_sample_size[some] <= 1)).all()


def test_log_ratios_beyond_float64_never_give_nan():
    high, low = 1.7e308, -1.7e308
    behavior, current = np.array([low, 0.0, high, 0.0]), np.array([high, 0.0, low, 0.0])
    with np.errstate(all="raise"):
        statistics = drift_statistics(behavior, current, np.ones(4, bool), np.array([0, 2, 4]))
    assert statistics.mean_abs.tolist() == statistics.max_abs.tolist() == [math.inf, math.inf]
    assert statistics.k3[0] == math.inf
    assert statistics.k3[1] > 1e307
    assert statistics.effective_sample_size.tolist() == [0.5, 0.5]


def test_nearly_equal_ratios_have_a_sample_size_of_at_most_one():
    step = np.random.default_rng(0).uniform(-1e-9, 1e-9, 3 * 5000)
    statistics = drift_statistics(np.zeros(step.size), step, np.ones(step.size, bool), np.arange(0, 15001, 3))
    assert statistics.effective_sample_size.max() == 1.0


def test_k3_overflows_to_infinity_and_the_sample_size_does_not():
    statistics = drift_statistics(np.array([-800.0, -1.0]), np.array([0.0, -1.0]), np.ones(2, bool), np.array([0, 2]))
    assert statistics.k3[0] == math.inf
    assert statistics.effective_sample_size[0] == 0.5
    assert statistics.mean_abs[0] == 400.0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_every_float_is_widened_before_it_is_subtracted(dtype):
    behavior, current = np.array([-0.1, -2.3], dtype), np.array([-0.7, -2.2], dtype)
    statistics = drift_statistics(behavior, current, np.ones(2, bool), np.array([0, 2], np.int32))
    assert statistics.mean_abs[0] == np.mean(np.abs(current.astype(np.float64) - behavior.astype(np.float64)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_a_log_prob_that_is_not_finite_names_rollout_and_position(which, value):
    columns = [np.zeros(7), np.zeros(7)]
    columns[which][5] = value
    with pytest.raises(NonFiniteLogProbError) as caught:
        drift_statistics(*columns, np.ones(7, bool), np.array([0, 3, 3, 7]))
    assert (caught.value.rollout, caught.value.position) == (2, 2)
    assert "rollout 2" in str(caught.value)


@pytest.mark.parametrize(
    "columns",
    [
        (np.zeros(2), np.zeros(3), np.ones(2, bool), np.array([0, 2])),
        (np.zeros(2), np.zeros(2), np.ones(3, bool), np.array([0, 2])),
        (np.zeros(2), np.zeros(2), np.ones(2), np.array([0, 2])),
        (np.zeros(2, int), np.zeros(2), np.ones(2, bool), np.array([0, 2])),
        (np.zeros(2), np.array(["a", "b"]), np.ones(2, bool), np.array([0, 2])),
        (np.zeros((1, 2)), np.zeros((1, 2)), np.ones((1, 2), bool), np.array([0, 2])),
        (np.zeros(2), np.zeros(2), np.ones(2, bool), np.array([0.0, 2.0])),
        (np.zeros(2), np.zeros(2), np.ones(2, bool), np.array([], int)),
        (np.zeros(2), np.zeros(2), np.ones(2, bool), np.array([1, 2])),
        (np.zeros(2), np.zeros(2), np.ones(2, bool), np.array([0, 1])),
        (np.zeros(2), np.zeros(2), np.ones(2, bool), np.array([0, 3])),
        (np.zeros(2), np.zeros(2), np.ones(2, bool), np.array([0, 2, 1, 2])),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns):
    with pytest.raises(ValueError):
        drift_statistics(*columns)


def test_lag_is_the_difference_of_clocks():
    result = lags(np.array([7, 4, 9], np.int64), 7)
    assert result.tolist() == [0, 3, -2]
    assert result.dtype == np.int64


@given(
    st.lists(st.tuples(st.integers(-3, 8), st.integers(0, 4)), min_size=1, max_size=20),
    st.integers(0, 6),
)
def test_the_newest_token_decides_on_future_and_the_oldest_on_the_rest(pairs, max_lag):
    oldest = np.array([lag for lag, _ in pairs], np.int64)
    newest = oldest - np.array([spread for _, spread in pairs], np.int64)
    codes = freshness(oldest, newest, max_lag)
    for code, old, new in zip(codes, oldest, newest, strict=True):
        if new < 0:
            expected = "future"
        elif old == 0:
            expected = "fresh"
        elif old <= max_lag:
            expected = "tolerated"
        else:
            expected = "stale"
        assert code == expected
        assert type(code) is str


def test_an_excused_candidate_is_judged_by_its_oldest_token():
    oldest, excused = np.array([-1, 0, 2, 9]), np.zeros(4, np.int64)
    assert freshness(oldest, excused, 4).tolist() == ["fresh", "fresh", "tolerated", "stale"]


def test_max_lag_zero_tolerates_nothing():
    assert freshness(np.array([0, 1]), np.array([0, 1]), 0).tolist() == ["fresh", "stale"]


def assess(**changes):
    arguments = {
        "old_log_probs": [None, -1.0, -2.0],
        "current_log_probs": [None, -1.25, -2.25],
        "action_mask": [False, True, True],
        "behavior_version": 3,
        "current_version": 3,
        "max_lag": 4,
        "max_mean_abs_log_ratio": 0.5,
    }
    return assess_policy_compatibility(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (True, "ok", "fresh", 0.25)),
        ({"current_version": 7}, (True, "ok", "tolerated", 0.25)),
        ({"current_version": 8}, (False, "stale_policy", "stale", 0.25)),
        ({"current_version": 2}, (False, "future_policy", "future", 0.25)),
        ({"max_mean_abs_log_ratio": 0.25}, (True, "ok", "fresh", 0.25)),
        ({"max_mean_abs_log_ratio": np.nextafter(0.25, 0)}, (False, "policy_drift", "fresh", 0.25)),
        ({"current_version": 4, "max_mean_abs_log_ratio": 0}, (False, "policy_drift", "tolerated", 0.25)),
        ({"current_version": 8, "max_mean_abs_log_ratio": 0.1}, (False, "stale_policy", "stale", 0.25)),
        ({"current_version": 2, "max_mean_abs_log_ratio": 0.1}, (False, "future_policy", "future", 0.25)),
        ({"action_mask": [False] * 3}, (False, "empty_action_mask", None, None)),
        ({"action_mask": [False] * 3, "current_version": 0}, (False, "empty_action_mask", None, None)),
        ({"current_log_probs": [0, -1, -2], "max_mean_abs_log_ratio": 0}, (True, "ok", "fresh", 0.0)),
        ({"behavior_version": 0, "current_version": 0, "max_lag": 0}, (True, "ok", "fresh", 0.25)),
    ],
)
def test_verdicts(changes, expected):
    result = assess(**changes)
    assert tuple(result[k] for k in ("accepted", "reason", "freshness", "mean_abs_log_ratio")) == expected
    assert len(result) == 4
    assert type(result["accepted"]) is bool
    assert type(result["reason"]) is str
    assert result["reason"] in COMPATIBILITY_REASONS
    assert type(result["mean_abs_log_ratio"]) in (float, type(None))


def test_no_tokens_at_all_is_an_empty_mask():
    result = assess(old_log_probs=[], current_log_probs=(), action_mask=np.zeros(0, bool))
    assert result == {
        "accepted": False,
        "reason": "empty_action_mask",
        "freshness": None,
        "mean_abs_log_ratio": None,
    }


BAD = [
    *({name: v} for name in ("behavior_version", "current_version") for v in (-1, True, False, 1.0, "1", None)),
    *({name: np.int64(3)} for name in ("behavior_version", "current_version", "max_lag")),
    *({"max_lag": v} for v in (-1, True, 1.5, math.nan, None)),
    *({"max_mean_abs_log_ratio": v} for v in (-0.1, math.nan, math.inf, -math.inf, True, "0.2", None, 10**400)),
    {"old_log_probs": [-1.0, -1.0]},
    {"current_log_probs": [-1.0] * 4},
    {"action_mask": [False, True]},
    {"action_mask": [0, 1, 1]},
    {"action_mask": [False, True, None]},
    {"action_mask": np.array([0, 1, 1])},
    {"action_mask": [0, 0, 0]},
    *(
        {name: [0.0, -1.0, v]}
        for name in ("old_log_probs", "current_log_probs")
        for v in (math.nan, math.inf, -math.inf, None, "x", True, 10**400, [])
    ),
]


@pytest.mark.parametrize("changes", BAD, ids=repr)
@pytest.mark.parametrize(
    "reason", [{}, {"current_version": 99}, {"behavior_version": 99}, {"max_mean_abs_log_ratio": 0}], ids=repr
)
def test_bad_input_comes_before_any_reason(changes, reason):
    with pytest.raises(ValueError):
        assess(**(reason | changes))


def test_bad_versions_come_before_an_empty_mask():
    for changes in ({"behavior_version": True}, {"max_lag": -1}, {"max_mean_abs_log_ratio": math.nan}):
        with pytest.raises(ValueError):
            assess(action_mask=[False] * 3, **changes)


def test_masked_positions_may_hold_anything():
    for junk in (None, "text", math.nan, math.inf, True, 10**400, object(), []):
        assert assess(old_log_probs=[junk, -1.0, -2.0], current_log_probs=[junk, -1.25, -2.25])["accepted"]


def test_a_log_prob_above_zero_is_not_this_functions_concern():
    assert assess(old_log_probs=[0, 0.1, 3.0], current_log_probs=[0, 0.1, 3.0])["accepted"]


def test_nothing_is_rounded_to_float32():
    old, current = -1.0, -1.0 - 2.0**-40
    result = assess(old_log_probs=[0, old, old], current_log_probs=[0, current, current], max_mean_abs_log_ratio=0)
    assert (result["reason"], result["mean_abs_log_ratio"]) == ("policy_drift", 2.0**-40)
    # And float32 columns are taken for exactly what they hold.
    narrow = np.array([0, -0.1, -0.3], np.float32)
    wide = [0, -0.1, -0.3]
    expected = (abs(float(narrow[1]) + 0.1) + abs(float(narrow[2]) + 0.3)) / 2
    assert assess(old_log_probs=narrow, current_log_probs=wide)["mean_abs_log_ratio"] == expected


@given(st.integers(min_value=0), st.integers(min_value=0), st.integers(min_value=0))
def test_versions_have_no_upper_bound(behavior, current, max_lag):
    result = assess(behavior_version=behavior, current_version=current, max_lag=max_lag)
    lag = current - behavior
    code = "future" if lag < 0 else "fresh" if lag == 0 else "tolerated" if lag <= max_lag else "stale"
    assert result["freshness"] == code
    assert result["accepted"] is (code in ("fresh", "tolerated"))


def test_versions_beyond_64_bits():
    assert assess(behavior_version=2**70, current_version=2**71, max_lag=2**70)["freshness"] == "tolerated"
    assert assess(behavior_version=2**70, current_version=2**71, max_lag=2**70 - 1)["freshness"] == "stale"


@given(
    batches(),
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
    st.integers(0, 5),
    st.integers(0, 3),
    st.one_of(st.floats(0.0, 20.0), st.none()),
)
def test_the_scalar_face_gives_what_the_batch_kernels_give(rollouts, versions, current, max_lag, limit):
    statistics = drift_statistics(*flat(rollouts))
    lag = lags(np.array(versions[: len(rollouts)], np.int64), current)
    codes = freshness(lag, lag, max_lag)
    for i, (old, new, mask) in enumerate(rollouts):
        # None: at the very mean, where equality has to be seen alike.
        bound = limit if limit is not None else float(np.nan_to_num(statistics.mean_abs[i]))
        as_lists = assess_policy_compatibility(
            old.tolist(), new.tolist(), mask.tolist(), versions[i], current, max_lag, bound
        )
        assert as_lists == assess_policy_compatibility(old, new, mask, versions[i], current, max_lag, bound)
        if statistics.n[i] == 0:
            assert as_lists["reason"] == "empty_action_mask"
            continue
        assert as_lists["mean_abs_log_ratio"] == statistics.mean_abs[i]
        assert as_lists["freshness"] == codes[i]
        assert as_lists["accepted"] is bool(codes[i] in ("fresh", "tolerated") and statistics.mean_abs[i] <= bound)


@given(st.lists(st.tuples(LOG_PROB, LOG_PROB, st.booleans()), max_size=30))
def test_the_scalar_changes_none_of_its_inputs(tokens):
    columns = [list(column) for column in zip(*tokens, strict=True)] or [[], [], []]
    untouched = deepcopy(columns)
    assess_policy_compatibility(*columns, 0, 0, 0, 0.2)
    assert columns == untouched


@given(st.lists(st.tuples(LOG_PROB, LOG_PROB), min_size=1, max_size=30))
def test_the_mean_is_near_the_exact_one(tokens):
    old, new = (list(column) for column in zip(*tokens, strict=True))
    exact = sum((abs(Fraction(b) - Fraction(a)) for a, b in tokens), Fraction(0)) / len(tokens)
    mean = assess_policy_compatibility(old, new, [True] * len(old), 0, 0, 0, 1e9)["mean_abs_log_ratio"]
    assert mean == pytest.approx(float(exact), rel=1e-13, abs=1e-300)
