from copy import deepcopy
from itertools import product

import numpy as np
import pytest

from coordinator.rules import activate_policy_version
from coordinator.rules.activation import ACTIVATION_REASONS, ActivationDecision, decide_activation

OLD = {"version": 4, "artifact_hash": "old", "since": {"by": "w"}}
NEW = {"version": 5, "artifact_hash": "new", "committed": True}
SERVES_NEW = {"version": 5, "artifact_hash": "new"}
SERVES_OLD = {"version": 4, "artifact_hash": "old"}


def test_the_order_of_reasons():
    assert ACTIVATION_REASONS == (
        "artifact_not_committed",
        "non_monotonic_version",
        "missing_worker_ack",
        "worker_mismatch",
        "activated",
    )


def test_the_switch():
    result = activate_policy_version(OLD, NEW, {"w1": SERVES_NEW, "w2": SERVES_NEW}, ["w2", "w1"])
    assert result == {
        "activated": True,
        "reason": "activated",
        "active_pointer": {"version": 5, "artifact_hash": "new"},
        "missing_workers": [],
        "mismatched_workers": [],
    }


@pytest.mark.parametrize(
    ("committed", "version", "absent", "differs"),
    list(product((True, False), (5, 4, 3), (True, False), (True, False))),
)
def test_every_overlap_of_conditions(committed, version, absent, differs):
    artifact = NEW | {"committed": committed, "version": version}
    states = {"ok": {"version": version, "artifact_hash": "new"}, "stranger": {"version": -1}}
    if not absent:
        states["b"] = states["a"] = states["ok"]
    if differs:
        states["d"] = {"version": version, "artifact_hash": "other"}
        states["c"] = {"version": version + 1, "artifact_hash": "new"}
    else:
        states["d"] = states["c"] = states["ok"]
    required = ["d", "ok", "b", "a", "c"]
    inputs = deepcopy((OLD, artifact, states, required))
    result = activate_policy_version(OLD, artifact, states, required)

    holds = (not committed, version <= 4, absent, differs, True)
    assert result["reason"] == ACTIVATION_REASONS[holds.index(True)]
    assert result["activated"] is (result["reason"] == "activated")
    assert result["missing_workers"] == (["a", "b"] if absent else [])
    assert result["mismatched_workers"] == (["c", "d"] if differs else [])
    new = {"version": version, "artifact_hash": "new"}
    assert result["active_pointer"] == (new if result["activated"] else OLD)
    assert inputs == (OLD, artifact, states, required)
    decision = decide_activation(
        4,
        version,
        "new",
        committed,
        {worker: (state["version"], state.get("artifact_hash")) for worker, state in states.items()},
        required,
    )
    assert decision == ActivationDecision(result["reason"], result["missing_workers"], result["mismatched_workers"])


def test_a_refusal_returns_a_copy_of_the_pointer():
    pointer = deepcopy(OLD)
    result = activate_policy_version(pointer, NEW, {}, ["w1"])
    result["active_pointer"]["since"]["by"] = "changed"
    result["active_pointer"]["version"] = 9
    assert pointer == OLD


@pytest.mark.parametrize("committed", [None, 1, "true", "false", []])
def test_only_true_is_committed(committed):
    assert activate_policy_version(OLD, NEW | {"committed": committed}, {}, [])["reason"] == "artifact_not_committed"


def test_an_artifact_that_does_not_say_is_not_committed():
    assert activate_policy_version(OLD, SERVES_NEW, {}, ["w1"]) == {
        "activated": False,
        "reason": "artifact_not_committed",
        "active_pointer": OLD,
        "missing_workers": ["w1"],
        "mismatched_workers": [],
    }


def test_nobody_required_passes_here():
    assert activate_policy_version(OLD, NEW, {"w1": SERVES_OLD}, [])["activated"] is True


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 5},
        {"artifact_hash": "new"},
        SERVES_OLD,
        {"version": 5, "artifact_hash": "NEW"},
        {"version": 5.0, "artifact_hash": "new"},
        {"version": "5", "artifact_hash": "new"},
        {"version": None, "artifact_hash": None},
        {"version": np.int64(5), "artifact_hash": "new"},
    ],
)
def test_a_state_that_does_not_say_exactly_this_is_a_mismatch(state):
    result = activate_policy_version(OLD, NEW, {"w1": state}, ["w1"])
    assert (result["reason"], result["missing_workers"], result["mismatched_workers"]) == (
        "worker_mismatch",
        [],
        ["w1"],
    )


def test_a_bool_confirms_no_version():
    pointer, artifact = (
        {"version": 0, "artifact_hash": "a"},
        {"version": 1, "artifact_hash": "b", "committed": True},
    )
    states = {"w1": {"version": True, "artifact_hash": "b"}}
    assert activate_policy_version(pointer, artifact, states, ["w1"])["reason"] == "worker_mismatch"


def test_an_ack_of_none_is_missing():
    assert activate_policy_version(OLD, NEW, {"w1": None}, ["w1"])["missing_workers"] == ["w1"]
    assert decide_activation(4, 5, "new", True, {"w1": None}, ["w1"]).missing == ["w1"]


def test_the_first_version_has_no_predecessor():
    assert decide_activation(None, 0, "h", True, {"w": (0, "h")}, {"w"}).reason == "activated"
    assert decide_activation(None, 0, "h", False, {}, {"w"}) == ActivationDecision("artifact_not_committed", ["w"], [])
    assert decide_activation(0, 0, "h", True, {"w": (0, "h")}, {"w"}).reason == "non_monotonic_version"


@pytest.mark.parametrize("version", [-1, True, False, 1.0, "1", None, np.int64(7)])
def test_versions_are_non_negative_plain_ints(version):
    with pytest.raises(ValueError):
        activate_policy_version(OLD | {"version": version}, NEW, {}, [])
    with pytest.raises(ValueError):
        activate_policy_version(OLD, NEW | {"version": version, "committed": False}, {}, [])


@pytest.mark.parametrize("artifact_hash", ["", None, b"new"])
def test_hashes_are_non_empty_strings(artifact_hash):
    with pytest.raises(ValueError):
        activate_policy_version(OLD | {"artifact_hash": artifact_hash}, NEW, {}, [])
    with pytest.raises(ValueError):
        activate_policy_version(OLD, NEW | {"artifact_hash": artifact_hash, "committed": False}, {}, [])


def test_absent_fields_of_pointer_and_artifact_are_value_errors():
    for pointer, artifact in (({}, NEW), (OLD, {}), ({"version": 4}, NEW), (OLD, {"version": 5})):
        with pytest.raises(ValueError):
            activate_policy_version(pointer, artifact, {}, [])


def test_a_worker_required_twice_is_an_error_before_any_reason():
    with pytest.raises(ValueError, match="twice"):
        activate_policy_version(OLD, NEW | {"committed": False}, {}, ["w1", "w2", "w1"])
