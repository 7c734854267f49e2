"""Rescoring: the rewards of a whole group are replaced in one call, or nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.ledger import Api, H, Json, Ledger, ok, refused

NEW: Json = {"ruleset_id": "new-rules", "ruleset_hash": H}


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, **settings)
    await ledger.worker()
    return ledger


async def rescore(ledger: Ledger, values: dict[str, Any], group: str = "g", **changes: Any) -> Any:
    rewards = [
        {"rollout_id": r} | ({"components": v} if isinstance(v, dict) else {"value": v}) for r, v in values.items()
    ]
    return await ledger.call("POST", "/rewards/rescore", NEW | {"group_id": group, "rewards": rewards} | changes)


def said(answer: Any) -> list[tuple[str, str, str, int]]:
    return [(v["rollout_id"], v["verdict"], v["state"], v["revision"]) for v in ok(answer)["verdicts"]]


async def rewards_of(ledger: Ledger, rollout_id: str) -> list[tuple[float, str]]:
    rows = await ledger.api.rows(
        "SELECT value, ruleset_id FROM rewards JOIN rulesets USING (run_no, ruleset_no) "
        "WHERE rollout_id = :r ORDER BY reward_no",
        r=rollout_id,
    )
    return [(row.value, row.ruleset_id) for row in rows]


async def test_a_whole_group_gets_new_rewards_and_the_old_ones_are_kept(ledger: Ledger) -> None:
    await ledger.group("g")
    await ledger.api.token("judge", "reward", "run")
    body = NEW | {
        "group_id": "g",
        "rewards": [{"rollout_id": "g:1", "value": 7.0}, {"rollout_id": "g:0", "components": {"a": 1.0, "b": 2.0}}],
    }
    answer = await ledger.call("POST", "/rewards/rescore", body, who="judge")
    assert said(answer) == [("g:1", "rescored", "rewarded", 2), ("g:0", "rescored", "rewarded", 2)]
    view = await ledger.get("/rollouts/g:0")
    assert (view["state"], view["revision"], view["reward"], view["ruleset_id"]) == ("rewarded", 2, 3.0, "new-rules")
    assert await rewards_of(ledger, "g:0") == [(0.0, "rules"), (3.0, "new-rules")]
    assert await rewards_of(ledger, "g:1") == [(1.0, "rules"), (7.0, "new-rules")]
    change = (await ledger.get("/rollouts/g:0/history"))["transitions"][-1]
    assert (change["event"], change["from_state"], change["to_state"], change["reason"], change["actor"]) == (
        "rescore", "rewarded", "rewarded", "rescored", "reward:judge",
    )  # fmt: skip
    ok(await ledger.open())
    assert [c["reward"] for c in (await ledger.candidates())["rollouts"]] == [3.0, 7.0]
    assert await ledger.reserve("g:0", "g:1") == ["revision_conflict"] * 2
    assert await ledger.reserve(("g:0", 2), ("g:1", 2)) == ["reserved"] * 2


async def test_what_stays_the_same_is_a_duplicate(ledger: Ledger) -> None:
    await ledger.group("g")
    same = {"ruleset_id": "rules"}
    assert said(await rescore(ledger, {"g:0": 0.0, "g:1": 5.0}, **same)) == [
        ("g:0", "duplicate", "rewarded", 1), ("g:1", "rescored", "rewarded", 2),
    ]  # fmt: skip
    assert said(await rescore(ledger, {"g:0": 0.0, "g:1": 5.0}, **same)) == [
        ("g:0", "duplicate", "rewarded", 1), ("g:1", "duplicate", "rewarded", 2),
    ]  # fmt: skip
    assert len(await rewards_of(ledger, "g:1")) == 2
    # Other components of the same sum are another reward; so is another ruleset.
    assert [v[1] for v in said(await rescore(ledger, {"g:0": 0.0, "g:1": {"a": 5.0}}, **same))] == [
        "duplicate", "rescored",
    ]  # fmt: skip
    assert [v[1] for v in said(await rescore(ledger, {"g:0": 0.0, "g:1": {"a": 5.0}}))] == ["rescored"] * 2


@pytest.mark.parametrize("consumed", [False, True])
async def test_a_group_that_an_update_has_is_refused(ledger: Ledger, consumed: bool) -> None:
    ids = await ledger.group("g")
    ok(await ledger.open())
    await ledger.reserve(*ids)
    if consumed:
        ok(await ledger.commit())
    problem = refused(await rescore(ledger, {"g:0": 5.0, "g:1": 5.0}), 409, "group_held")
    assert problem["item"] in ids
    assert (await ledger.get("/rollouts/g:0"))["reward"] == 0.0
    if not consumed:
        ok(await ledger.call("POST", "/updates/u/abort", {"owner": "t-1", "reason": "x"}))
        assert [v[1] for v in said(await rescore(ledger, {"g:0": 5.0, "g:1": 5.0}))] == ["rescored"] * 2


@pytest.mark.parametrize(
    ("values", "item"),
    [
        ({"g:0": 5.0}, "g:1"),
        ({"g:0": 5.0, "g:1": 5.0, "h:0": 5.0}, "h:0"),
        ({"g:0": 5.0, "g:1": 5.0, "none": 5.0}, "none"),
        ({"g:0": 5.0, "g:1": 5.0, "g:2": 5.0}, "g:2"),
    ],
)
async def test_a_group_is_named_whole_and_nothing_beside_it(api: Api, values: Json, item: str) -> None:
    ledger = await ledger_of(api, group_size=3)
    await ledger.group("g")
    await ledger.group("h")
    await ledger.submit(ledger.rollout("g:2", "g", 2))  # it has no reward yet
    assert refused(await rescore(ledger, values), 422, "partial_group")["item"] == item
    assert await ledger.state("g:0") == ("rewarded", None, 1)


@pytest.mark.parametrize(
    "rewards",
    [
        [],
        [{"rollout_id": "g:0", "value": 1.0}, {"rollout_id": "g:0", "value": 1.0}],
        [{"rollout_id": "g:0"}, {"rollout_id": "g:1", "value": 1.0}],
        [{"rollout_id": "g:0", "components": {"a": 1.7e308, "b": 1.7e308}}, {"rollout_id": "g:1", "value": 1.0}],
        [{"rollout_id": "g:0", "value": 1.0, "status": "ok"}, {"rollout_id": "g:1", "value": 1.0}],
    ],
)
async def test_new_rewards_without_sense_refuse_the_call(ledger: Ledger, rewards: list[Json]) -> None:
    await ledger.group("g")
    body = NEW | {"group_id": "g", "rewards": rewards}
    refused(await ledger.call("POST", "/rewards/rescore", body), 422, "invalid_request")
    assert await ledger.state("g:1") == ("rewarded", None, 1)


async def test_a_group_that_is_not_there(ledger: Ledger) -> None:
    refused(await rescore(ledger, {"r": 1.0}, "none"), 404, "group_unknown")


async def test_a_later_reward_keeps_to_the_new_ruleset(api: Api) -> None:
    ledger = await ledger_of(api, group_size=3)
    await ledger.group("g")
    await ledger.submit(ledger.rollout("late", "g", 2))
    ok(await rescore(ledger, {"g:0": 5.0, "g:1": 6.0}))
    assert (await ledger.reward("late"))["verdict"] == "ruleset_conflict"
    assert await ledger.state("late") == ("generated", None, 0)
    verdict = await ledger.reward("late", **NEW)
    assert (verdict["verdict"], verdict["state"]) == ("stored", "rewarded")


async def test_a_run_without_groups_is_rescored_rollout_by_rollout(api: Api) -> None:
    ledger = await ledger_of(api, group_size=None)
    await ledger.submit(ledger.rollout("r"))
    await ledger.reward("r")
    assert said(await rescore(ledger, {"r": 5.0}, "r")) == [("r", "rescored", "rewarded", 2)]


async def test_a_member_in_quarantine_is_rescored_with_its_group_and_moves_no_more(api: Api) -> None:
    """Else it would come out later with a reward under the old ruleset, and the group would hold two."""
    ledger = await ledger_of(api, min_usable=1)
    ids = await ledger.group("g")
    ok(await ledger.open())
    body = {
        "owner": "t-1",
        "after_commit_no": 0,
        "rollouts": [
            {"rollout_id": r, "revision": 1, "current_log_probs": [None] * 3 + [-0.5 - shift] * 3}
            for r, shift in zip(ids, (0.0, 1.0), strict=True)
        ],
    }
    ok(await ledger.call("POST", "/updates/u/reserve", body))
    ok(await ledger.call("POST", "/updates/u/abort", {"owner": "t-1", "reason": "x"}))
    assert await ledger.state("g:1") == ("quarantined", "policy_drift", 2)
    assert refused(await rescore(ledger, {"g:0": 5.0}), 422, "partial_group")["item"] == "g:1"
    assert said(await rescore(ledger, {"g:0": 5.0, "g:1": 6.0})) == [
        ("g:0", "rescored", "rewarded", 4), ("g:1", "rescored", "quarantined", 2),
    ]  # fmt: skip
    assert said(await rescore(ledger, {"g:0": 5.0, "g:1": 6.0})) == [
        ("g:0", "duplicate", "rewarded", 4), ("g:1", "duplicate", "quarantined", 2),
    ]  # fmt: skip
    assert await ledger.state("g:1") == ("quarantined", "policy_drift", 2)
    assert await rewards_of(ledger, "g:1") == [(1.0, "rules"), (6.0, "new-rules")]
    ok(await ledger.call("POST", "/rollouts/release", {"rollout_ids": ["g:1"]}))
    view = await ledger.get("/rollouts/g:1")
    assert (view["state"], view["reward"], view["ruleset_id"]) == ("rewarded", 6.0, "new-rules")
