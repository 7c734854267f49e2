"""Reward rulesets: one for each group, and, where the run forbids to mix them, one for each update."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.ledger import Api, Json, Ledger, ok, refused


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    """Groups `a` and `c` under one ruleset, `b` under another."""
    ledger = await Ledger.create(api, **settings)
    await ledger.worker()
    for name, ruleset in (("a", "rules"), ("b", "other"), ("c", "rules")):
        await ledger.submit(*(ledger.rollout(f"{name}:{i}", name, i) for i in range(2)))
        for i in range(2):
            assert (await ledger.reward(f"{name}:{i}", ruleset_id=ruleset))["verdict"] == "stored"
    ok(await ledger.open())
    return ledger


async def rulesets(ledger: Ledger, update: str = "u") -> set[str]:
    return {m["ruleset_id"] for m in (await ledger.get(f"/updates/{update}/lineage"))["members"]}


async def test_an_update_may_mix_them_unless_the_run_forbids_it(api: Api) -> None:
    ledger = await ledger_of(api)
    assert (await ledger.candidates())["groups"] == ["a", "b", "c"]
    assert await ledger.reserve("a:0", "a:1", "b:0", "b:1") == ["reserved"] * 4
    assert await rulesets(ledger) == {"rules", "other"}


async def test_without_mixing_candidates_are_of_one_ruleset(api: Api) -> None:
    ledger = await ledger_of(api, mix_rulesets=False)
    assert (await ledger.candidates())["groups"] == ["a", "c"]
    ok(await ledger.open("v"))
    assert (await ledger.candidates("v"))["groups"] == ["b"]


async def test_without_mixing_what_is_bound_decides_what_is_offered(api: Api) -> None:
    ledger = await ledger_of(api, mix_rulesets=False)
    assert await ledger.reserve("b:0", "b:1") == ["reserved"] * 2
    assert (await ledger.candidates())["empty"]["reason"] == "other_ruleset"
    ok(await ledger.call("POST", "/updates/u/abort", {"owner": "t-1", "reason": "x"}))
    ok(await ledger.open("v"))
    assert await ledger.reserve("a:0", "a:1", update="v") == ["reserved"] * 2
    assert (await ledger.candidates("v"))["groups"] == ["c"]


@pytest.mark.parametrize("calls", [[["a", "b"]], [["a"], ["b"]]])
async def test_a_reservation_that_would_mix_binds_nothing(api: Api, calls: list[list[str]]) -> None:
    """In one call or in two: the call that would make the second ruleset is refused whole."""
    ledger = await ledger_of(api, mix_rulesets=False)
    *first, last = calls
    for groups in first:
        assert await ledger.reserve(*(f"{g}:{i}" for g in groups for i in range(2))) == ["reserved"] * 2
    before = await api.rows("SELECT * FROM rollouts ORDER BY rollout_id")
    audit = await api.rows("SELECT count(*) AS n FROM rollout_audit")
    members = await api.rows("SELECT count(*) AS n FROM update_members")
    problem = refused(await ledger.try_reserve(*(f"{g}:{i}" for g in last for i in range(2))), 409, "ruleset_conflict")
    assert "other" in problem["detail"]
    assert await api.rows("SELECT * FROM rollouts ORDER BY rollout_id") == before
    assert await api.rows("SELECT count(*) AS n FROM rollout_audit") == audit
    assert await api.rows("SELECT count(*) AS n FROM update_members") == members
    assert await ledger.reserve("c:0", "c:1") == ["reserved"] * 2
    assert await rulesets(ledger) == {"rules"}


async def test_the_same_id_with_another_hash_is_another_ruleset(api: Api) -> None:
    ledger = await ledger_of(api, mix_rulesets=False)
    changed: Json = {"ruleset_hash": "0" * 64}
    await ledger.submit(*(ledger.rollout(f"d:{i}", "d", i) for i in range(2)))
    assert [(await ledger.reward(f"d:{i}", **changed))["verdict"] for i in range(2)] == ["stored"] * 2
    assert await ledger.reserve("a:0", "a:1") == ["reserved"] * 2
    refused(await ledger.try_reserve("d:0", "d:1"), 409, "ruleset_conflict")
    await ledger.submit(ledger.rollout("e:0", "e"), ledger.rollout("e:1", "e", 1))
    await ledger.reward("e:0")
    assert (await ledger.reward("e:1", **changed))["verdict"] == "ruleset_conflict"


async def test_candidates_that_bind_keep_to_one_ruleset(api: Api) -> None:
    ledger = await ledger_of(api, mix_rulesets=False, drift_gate="off")
    body = {"owner": "t-1", "groups": 3, "reserve": True, "after_commit_no": 0}
    answer = ok(await ledger.call("POST", "/updates/u/candidates", body))
    assert (answer["groups"], {v["verdict"] for v in answer["reserved"]}) == (["a", "c"], {"reserved"})
    assert ok(await ledger.call("POST", "/updates/u/candidates", body))["groups"] == ["a", "c"]
    assert await rulesets(ledger) == {"rules"}
