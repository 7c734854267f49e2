from copy import deepcopy
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules import compare_and_reserve
from coordinator.rules.lifecycle import Event, State, targets, transition_lifecycle
from coordinator.rules.reservation import (
    MOVES_NOTHING,
    REFUSAL_EVENTS,
    REFUSAL_STATES,
    RESERVE_REASONS,
    first_reason,
)


def a_ledger(**changes):
    record = {"lifecycle_state": "rewarded", "revision": 3, "reserved_by": None, "extra": {"tags": ["a"]}}
    return {"r1": record | changes}


def test_the_order_of_reasons():
    assert RESERVE_REASONS == (
        "missing_rollout",
        "idempotent_retry",
        "update_fenced",
        "revision_conflict",
        "not_rewarded",
        "contract_mismatch",
        "policy_withdrawn",
        "candidate_not_active",
        "future_policy",
        "stale_policy",
        "policy_drift",
        "group_refused",
        "reserved",
    )


def test_each_verdict_moves_a_rollout_or_leaves_it():
    assert {"reserved"} | MOVES_NOTHING | REFUSAL_EVENTS.keys() == set(RESERVE_REASONS)
    assert not MOVES_NOTHING & (REFUSAL_EVENTS.keys() | {"reserved"})
    assert {"future_policy", "revision_conflict", "candidate_not_active"} <= MOVES_NOTHING
    assert REFUSAL_STATES == {
        "policy_withdrawn": "quarantined",
        "stale_policy": "offline",
        "policy_drift": "quarantined",
        "group_refused": "offline",
    }
    for verdict, (event, reason) in REFUSAL_EVENTS.items():
        assert targets("rewarded", Event(event)) == {REFUSAL_STATES[verdict]}
        assert reason == verdict
    # A run may quarantine what is stale instead.
    assert targets("rewarded", "quarantine") == {"quarantined"}


@given(st.data())
def test_the_first_reason_in_order_wins(data):
    n = data.draw(st.integers(0, 12))
    names = data.draw(st.lists(st.sampled_from(RESERVE_REASONS[:-1]), min_size=1, unique=True))
    conditions = {name: np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool) for name in names}
    untouched = deepcopy(conditions)
    verdicts = first_reason(conditions)
    assert verdicts.shape == (n,)
    for i in range(n):
        expected = next((name for name in RESERVE_REASONS if name in conditions and conditions[name][i]), "reserved")
        assert verdicts[i] == expected
        assert type(verdicts[i]) is str
    assert all((conditions[name] == untouched[name]).all() for name in names)


def test_first_reason_with_an_order_of_its_own():
    conditions = {"b": np.array([True, True, False]), "a": np.array([True, False, False])}
    assert first_reason(conditions, ("a", "b", "c")).tolist() == ["a", "b", "c"]
    assert first_reason(conditions, ("b", "a", "c")).tolist() == ["b", "b", "c"]


@pytest.mark.parametrize(
    "conditions",
    [
        {},
        {"stale": np.array([True])},
        {"stale_policy": np.array([1])},
        {"stale_policy": np.array([[True]])},
        {"stale_policy": np.array(True)},
        {"stale_policy": np.array([True]), "policy_drift": np.array([True, False])},
    ],
)
def test_first_reason_refuses_columns_that_do_not_fit(conditions):
    with pytest.raises(ValueError):
        first_reason(conditions)


def test_reserving_moves_the_record_once_and_keeps_its_other_keys():
    ledger = a_ledger()
    seen_before = ledger["r1"]
    result = compare_and_reserve(ledger, "r1", 3, "u1")
    bound = {"lifecycle_state": "reserved", "revision": 4, "reserved_by": "u1", "extra": {"tags": ["a"]}}
    assert result == {"reserved": True, "reason": "reserved", "record": bound}
    assert ledger == {"r1": bound}
    assert seen_before == a_ledger()["r1"], "a record that somebody read earlier must not change under them"
    assert transition_lifecycle("rewarded", "reserve") == ledger["r1"]["lifecycle_state"]


def test_a_retry_is_idempotent_at_whatever_revision_it_names():
    ledger = a_ledger()
    compare_and_reserve(ledger, "r1", 3, "u1")
    after = deepcopy(ledger)
    for revision in (3, 4, 99):
        result = compare_and_reserve(ledger, "r1", revision, "u1")
        assert result == {"reserved": False, "reason": "idempotent_retry", "record": after["r1"]}
    assert ledger == after


def test_of_two_updates_one_wins():
    ledger = a_ledger()
    verdicts = [compare_and_reserve(ledger, "r1", 3, update)["reason"] for update in ("u1", "u2")]
    assert verdicts == ["reserved", "revision_conflict"]
    assert compare_and_reserve(ledger, "r1", 4, "u2")["reason"] == "not_rewarded"
    assert ledger["r1"]["reserved_by"] == "u1"


def test_a_retry_needs_the_reservation_to_stand():
    released = a_ledger(lifecycle_state="rewarded", revision=5, reserved_by="u1")
    assert compare_and_reserve(released, "r1", 3, "u1")["reason"] == "revision_conflict"
    consumed = a_ledger(lifecycle_state="consumed", reserved_by="u1")
    assert compare_and_reserve(consumed, "r1", 3, "u1")["reason"] == "not_rewarded"


def test_a_missing_rollout_has_no_record():
    ledger = {}
    assert compare_and_reserve(ledger, "r1", 0, "u1") == {
        "reserved": False,
        "reason": "missing_rollout",
        "record": None,
    }
    assert ledger == {}


@pytest.mark.parametrize("update_id", ["", None, 7])
@pytest.mark.parametrize("rollout_id", ["r1", "absent"])
def test_an_empty_update_id_comes_before_any_reason(rollout_id, update_id):
    ledger = a_ledger()
    with pytest.raises(ValueError):
        compare_and_reserve(ledger, rollout_id, 3, update_id)
    assert ledger == a_ledger()


@pytest.mark.parametrize(("stored", "expected"), [(1, True), (True, 1), (1, 1.0), (1, "1"), (1, None), (0, False)])
def test_only_integers_are_revisions(stored, expected):
    ledger = a_ledger(revision=stored)
    assert compare_and_reserve(ledger, "r1", expected, "u1")["reason"] == "revision_conflict"
    assert ledger == a_ledger(revision=stored)


def test_a_numpy_integer_is_a_revision():
    assert compare_and_reserve(a_ledger(), "r1", np.int64(3), "u1")["record"]["revision"] == 4


def test_a_record_without_the_fields_is_refused():
    assert compare_and_reserve({"r1": {}}, "r1", 0, "u1")["reason"] == "revision_conflict"
    assert compare_and_reserve({"r1": {"revision": 0}}, "r1", 0, "u1")["reason"] == "not_rewarded"


@pytest.mark.parametrize(("state", "holder", "revision"), list(product(State, (None, "u1", "u2"), (2, 3))))
def test_every_state_holder_and_revision(state, holder, revision):
    ledger = a_ledger(lifecycle_state=str(state), reserved_by=holder)
    before = deepcopy(ledger)
    result = compare_and_reserve(ledger, "r1", revision, "u1")
    if state == "reserved" and holder == "u1":
        expected = "idempotent_retry"
    elif revision != 3:
        expected = "revision_conflict"
    elif state != "rewarded":
        expected = "not_rewarded"
    else:
        expected = "reserved"
    assert result["reason"] == expected
    assert result["reserved"] is (expected == "reserved")
    assert (ledger == before) is (expected != "reserved")
    assert result["record"] == ledger["r1"]
    # What is returned is the caller's own.
    result["record"]["extra"]["tags"].append("b")
    assert ledger["r1"]["extra"] == {"tags": ["a"]}
