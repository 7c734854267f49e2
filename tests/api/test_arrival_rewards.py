"""A reward that comes with its rollout: by the run's leave only, and by the same rules as one that comes later."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.ledger import Api, H, Json, Ledger, ok

GOOD: Json = {"status": "ok", "value": 2.5, "ruleset_id": "rules", "ruleset_hash": H}


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, reward_on_arrival=True, **settings)
    await ledger.worker()
    return ledger


def rewarded(ledger: Ledger, rollout_id: str = "r", index: int = 0, *, reward: Json = GOOD, **changes: Any) -> Json:
    return ledger.rollout(rollout_id, changes.pop("group", "g"), index, reward=reward, **changes)


async def test_a_run_allows_it_or_not(ledger: Ledger) -> None:
    bad, good = await ledger.submit(rewarded(ledger), ledger.rollout("s", index=1))
    assert (bad["verdict"], bad["reason"], bad["reward"]) == ("rejected", "reward_not_allowed", None)
    assert good["verdict"] == "accepted"


async def test_it_is_the_arrival_and_then_the_reward_in_one_transaction(api: Api) -> None:
    ledger = await ledger_of(api)
    await api.token("gpu", "worker", "run", "w")
    body = {"rollouts": [rewarded(ledger)]}
    [verdict] = ok(await ledger.call("POST", "/rollouts", body, who="gpu"))["verdicts"]
    assert (verdict["verdict"], verdict["state"], verdict["revision"], verdict["reward"]) == (
        "accepted", "rewarded", 1, "stored",
    )  # fmt: skip
    view = await ledger.get("/rollouts/r")
    assert (view["state"], view["revision"], view["reward"], view["reward_status"], view["ruleset_id"]) == (
        "rewarded", 1, 2.5, "ok", "rules",
    )  # fmt: skip
    history = (await ledger.get("/rollouts/r/history"))["transitions"]
    assert [(t["revision"], t["event"], t["from_state"], t["to_state"], t["actor"]) for t in history] == [
        (0, "arrive", None, "generated", "worker:gpu"), (1, "reward_ready", "generated", "rewarded", "worker:gpu"),
    ]  # fmt: skip
    [first, second] = await api.rows("SELECT xmin::text AS x FROM rollout_audit")
    assert first.x == second.x


async def test_a_whole_group_with_its_rewards_can_be_reserved(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.submit(rewarded(ledger, "a"), rewarded(ledger, "b", 1, reward=GOOD | {"value": 0.0}))
    ok(await ledger.open())
    assert [r["reward"] for r in (await ledger.candidates())["rollouts"]] == [2.5, 0.0]
    assert await ledger.reserve("a", "b") == ["reserved"] * 2


async def test_a_quarantined_rollout_keeps_its_reward_and_moves_no_more(api: Api) -> None:
    ledger = await ledger_of(api, min_usable=1)
    [verdict] = await ledger.submit(rewarded(ledger, version=9))
    assert (verdict["state"], verdict["reason"], verdict["revision"], verdict["reward"]) == (
        "quarantined", "policy_unknown", 1, "stored",
    )  # fmt: skip
    view = await ledger.get("/rollouts/r")
    assert (view["state"], view["revision"], view["reward"]) == ("quarantined", 1, 2.5)


@pytest.mark.parametrize(
    ("reward", "outcome"),
    [
        (GOOD, "duplicate"),
        (GOOD | {"value": 3.0}, "conflict"),
        (GOOD | {"ruleset_id": "other"}, "conflict"),
        (GOOD | {"ruleset_hash": "0" * 64}, "conflict"),
        (GOOD | {"components": {"a": 2.5}}, "conflict"),
        (GOOD | {"status": "timeout", "value": None}, "recorded_failure"),
    ],
)
async def test_sent_again_the_first_reward_stands(api: Api, reward: Json, outcome: str) -> None:
    """The reward is no part of the rollout's content."""
    ledger = await ledger_of(api)
    await ledger.submit(rewarded(ledger))
    [verdict] = await ledger.submit(rewarded(ledger, reward=reward))
    assert (verdict["verdict"], verdict["reward"], verdict["state"], verdict["revision"]) == (
        "duplicate", outcome, "rewarded", 1,
    )  # fmt: skip
    assert (await ledger.get("/rollouts/r"))["reward"] == 2.5


async def test_a_reward_may_come_with_a_later_sending_of_the_rollout(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.submit(ledger.rollout("r"))
    [verdict] = await ledger.submit(rewarded(ledger))
    assert (verdict["verdict"], verdict["reward"], verdict["state"], verdict["revision"]) == (
        "duplicate", "stored", "rewarded", 1,
    )  # fmt: skip


async def test_a_rollout_that_conflicts_brings_no_reward(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.submit(ledger.rollout("r"))
    [verdict] = await ledger.submit(rewarded(ledger, task_id="other"))
    assert (verdict["verdict"], verdict["reward"]) == ("conflict", None)
    assert await ledger.state("r") == ("generated", None, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": None},
        {"value": None, "components": {}},
        {"value": None, "components": {"a": 1.7e308, "b": 1.7e308}},
        {"status": "timeout"},
        {"status": "error", "value": None, "components": {"a": 1.0}},
    ],
)
async def test_a_reward_without_sense_leaves_the_rollout_as_it_arrived(api: Api, wrong: Json) -> None:
    ledger = await ledger_of(api)
    [verdict] = await ledger.submit(rewarded(ledger, reward=GOOD | wrong))
    assert (verdict["verdict"], verdict["reward"], verdict["state"], verdict["revision"]) == (
        "accepted", "rejected", "generated", 0,
    )  # fmt: skip
    assert (await ledger.get("/rollouts/r"))["reward"] is None


async def test_a_reward_of_the_wrong_shape_rejects_its_item(api: Api) -> None:
    ledger = await ledger_of(api)
    [verdict] = await ledger.submit(rewarded(ledger, reward=GOOD | {"colour": "red"}))
    assert (verdict["verdict"], verdict["reason"]) == ("rejected", "invalid_field")


async def test_components_make_the_value(api: Api) -> None:
    ledger = await ledger_of(api)
    parts = {"value": None, "components": {"format": 0.25, "answer": 0.5}}
    [verdict] = await ledger.submit(rewarded(ledger, reward=GOOD | parts))
    assert (verdict["reward"], verdict["state"]) == ("stored", "rewarded")
    assert (await ledger.get("/rollouts/r"))["reward"] == 0.75


@pytest.mark.parametrize("status", ["timeout", "error"])
async def test_a_failed_reward_is_a_failure_and_no_value(api: Api, status: str) -> None:
    ledger = await ledger_of(api, min_usable=1)
    failed = {"status": status, "value": None, "message": "the sandbox hung"}
    [verdict] = await ledger.submit(rewarded(ledger, reward=GOOD | failed))
    assert (verdict["verdict"], verdict["reward"], verdict["state"], verdict["revision"]) == (
        "accepted", "recorded_failure", "reward_failed", 1,
    )  # fmt: skip
    view = await ledger.get("/rollouts/r")
    assert (view["reward"], view["reward_status"]) == (None, status)
    [failure] = (await ledger.get("/failures?stage=reward"))["failures"]
    assert (failure["kind"], failure["message"], failure["rollout_id"]) == (status, "the sandbox hung", "r")


async def test_the_first_good_reward_of_a_batch_pins_the_group_s_ruleset(api: Api) -> None:
    ledger = await ledger_of(api)
    other = GOOD | {"ruleset_id": "other"}
    a, b = await ledger.submit(rewarded(ledger, "a"), rewarded(ledger, "b", 1, reward=other))
    assert (a["reward"], b["verdict"], b["reward"], b["state"]) == (
        "stored", "accepted", "ruleset_conflict", "generated",
    )  # fmt: skip


@pytest.mark.parametrize("sibling", ["rewarded", "plain"])
async def test_an_arrival_tells_that_its_group_fell_with_a_reward(api: Api, sibling: str) -> None:
    ledger = await ledger_of(api)
    failed = GOOD | {"status": "error", "value": None}
    first = rewarded(ledger, "a") if sibling == "rewarded" else ledger.rollout("a")
    verdicts = await ledger.submit(first, rewarded(ledger, "b", 1, reward=failed))
    for verdict in verdicts:
        assert (verdict["verdict"], verdict["state"], verdict["reason"]) == ("accepted", "offline", "group_refused")
        stored = await ledger.state(verdict["rollout_id"])
        assert stored == (verdict["state"], verdict["reason"], verdict["revision"])


async def test_one_verdict_for_each_item_of_a_mixed_batch(api: Api) -> None:
    ledger = await ledger_of(api, group_size=4)
    verdicts = await ledger.submit(
        ledger.rollout("plain"),
        rewarded(ledger, "a", 1),
        rewarded(ledger, "bad", 9),
        rewarded(ledger, "a", 1),
        rewarded(ledger, "b", 2, reward=GOOD | {"value": -1.0}),
    )
    assert [(v["rollout_id"], v["verdict"], v["reward"]) for v in verdicts] == [
        ("plain", "accepted", None), ("a", "accepted", "stored"), ("bad", "rejected", None),
        ("a", "duplicate", None), ("b", "accepted", "stored"),
    ]  # fmt: skip
