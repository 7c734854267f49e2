"""No field of a request takes a value of another kind for its own: a text for a number, a number for a yes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.wire.base import WireModel
from coordinator.wire.policies import OpenActivation, PreparePolicy
from coordinator.wire.rollouts import Generation, Reward, Rollout
from coordinator.wire.runs import CreateRun
from coordinator.wire.tokens import CreateToken
from coordinator.wire.updates import AbortUpdate, CandidatesRequest, CommitUpdate, OpenUpdate, ReserveRequest
from coordinator.wire.workers import Ack, TicketRequest
from tests.wire.streams import CONTRACT, HASH

BASE = {"name": "tiny", "revision": "1", "sha256": HASH}
ROLLOUT = {
    "rollout_id": "r",
    "task_id": "t",
    "task_source": "s",
    "group_id": "g",
    "sample_index": 0,
    "attempt": 0,
    "spans": [{"version": 0, "artifact_hash": HASH, "start": 0, "end": 2}],
    "span_source": "dispatch",
    "worker_id": "w",
    "incarnation": "w-1",
    "contract": CONTRACT | {"top_k": 1, "min_p": 0.1},
    "generation": {"seed": 1, "max_tokens": 2, "stop": ["x"], "finish_reason": "y"},
    "token_ids": [1, 2],
    "action_mask": [False, True],
    "behavior_log_probs": [-0.5, -1.5],
}
CLOCKS = (
    "update_lease_seconds", "hold_seconds", "heartbeat_seconds", "lost_after_seconds", "activation_deadline_seconds",
    "group_deadline_seconds", "ticket_seconds", "longest_wait_seconds",
)  # fmt: skip
RUN = {
    "run_id": "run",
    "settings": {
        "max_lag": 1, "max_drift": 0.1, "group_size": 2, "max_attempts": 1, "min_usable": 1, "groups_per_update": 2,
        "required_caches": ["x"], **dict.fromkeys(CLOCKS, 1.5),
    },
    "contract": ROLLOUT["contract"],
    "vocab_size": 10,
    "policy": {"version": 0, "base_model": BASE},
}  # fmt: skip
ITEM = {"rollout_id": "r", "revision": 1, "current_log_probs": [-0.5], "use": "x"}
REWARD = {
    "rollout_id": "r", "status": "ok", "value": 1.5, "components": {"a": 1.5}, "ruleset_id": "x", "ruleset_hash": HASH,
}  # fmt: skip
OWNED = {"owner": "o", "after_commit_no": 1}
BODIES: list[tuple[type[WireModel], dict[str, Any]]] = [
    (Rollout, ROLLOUT),
    (CreateRun, RUN),
    (Reward, REWARD),
    (ReserveRequest, OWNED | {"confirm_drift": True, "rollouts": [ITEM]}),
    (CandidatesRequest, {"owner": "o", "groups": 1, "wait_seconds": 0.5}),
    (OpenUpdate, {"owner": "o", "policy_version": 1, "artifact_hash": HASH}),
    (CommitUpdate, OWNED | {"discards": [{"rollout_id": "r", "reason": "x"}]}),
    (AbortUpdate, {"owner": "o", "reason": "x", "quarantine": True}),
    (PreparePolicy, {"version": 1, "parent_version": 0, "base_model": BASE, "updates": ["u"],
                     "files": [{"name": "w", "size": 1, "sha256": HASH}]}),
    (OpenActivation, {"activation_id": "a", "required_workers": ["w"]}),
    (Ack, {"incarnation": "i", "version": 1, "artifact_hash": HASH, "caches_reset": ["x"]}),
    (TicketRequest, {"incarnation": "i", "group_ids": ["g"]}),
    (CreateToken, {"name": "n", "role": "viewer", "run_id": "r", "expires_at": "2100-01-01T00:00:00Z"}),
]  # fmt: skip
OTHERS: dict[type, list[Any]] = {
    float: ["1.5", "nan", True, False, "", [1.5], float("nan")],
    int: ["1", True, False, 1.5, "", [1]],
    bool: ["yes", "true", "false", 1, 0, 1.0, ""],
    str: [1, 1.5, True, 1893456000],
}


def leaves(node: Any, way: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    if not isinstance(node, dict | list):
        return [(way, node)]
    inner = node.items() if isinstance(node, dict) else enumerate(node)
    return [leaf for key, value in inner for leaf in leaves(value, (*way, key))]


def replaced(body: dict[str, Any], way: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(body))
    node = copy
    for key in way[:-1]:
        node = node[key]
    node[way[-1]] = value
    return copy  # type: ignore[no-any-return]


@pytest.mark.parametrize(("model", "body"), BODIES, ids=lambda b: b.__name__ if isinstance(b, type) else "")
def test_every_leaf_takes_its_own_kind_alone(model: type[WireModel], body: dict[str, Any]) -> None:
    model.model_validate(body)
    model.model_validate_json(json.dumps(body))
    for way, value in leaves(body):
        for other in OTHERS[type(value)]:
            spoilt = replaced(body, way, other)
            for read, given in ((model.model_validate, spoilt), (model.model_validate_json, json.dumps(spoilt))):
                with pytest.raises(ValidationError):
                    read(given)
                    pytest.fail(f"{model.__name__} took {other!r} for {way}")


def test_a_whole_number_is_a_number() -> None:
    assert Reward.model_validate(REWARD | {"value": 1, "components": {"a": 2}}).value == 1.0
    assert Rollout.model_validate(ROLLOUT | {"behavior_log_probs": [-1, None]}).behavior_log_probs == [-1.0, None]
    whole = CreateRun.model_validate(replaced(RUN, ("contract", "temperature"), 1))
    assert isinstance(whole.contract.temperature, float)


@pytest.mark.parametrize("text", ["2100-01-01", "20300131T120000Z", "4102444800", "4102444800.5", "tomorrow", ""])
def test_an_expiry_is_a_time_and_not_a_number(text: str) -> None:
    body = {"name": "n", "role": "viewer"}
    with pytest.raises(ValidationError):
        CreateToken.model_validate(body | {"expires_at": text})
    assert CreateToken.model_validate(body | {"expires_at": datetime(2100, 1, 1, tzinfo=UTC)}).expires_at


def test_a_body_of_many_faults_costs_no_more_than_its_first() -> None:
    for body in (
        ROLLOUT | {"token_ids": ["x"] * 10_000},
        ROLLOUT | {"behavior_log_probs": ["x"] * 10_000},
        ROLLOUT | {"action_mask": ["x"] * 10_000},
        ROLLOUT | {"spans": [{}] * 10_000},
        ROLLOUT | {str(n): 1 for n in range(10_000)},
    ):
        with pytest.raises(ValidationError) as refusal:
            Rollout.model_validate_json(json.dumps(body))
        assert refusal.value.error_count() < 10
    with pytest.raises(ValidationError) as refusal:
        Reward.model_validate(REWARD | {"components": {str(n): "x" for n in range(10_000)}})
    assert refusal.value.error_count() == 1
    with pytest.raises(ValidationError) as refusal:
        Generation.model_validate({"stop": [1] * 10_000})
    assert refusal.value.error_count() == 1
