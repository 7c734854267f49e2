"""Diagnosis: each thing that training can wait for is named, with its age and what to do about it."""

from __future__ import annotations

from typing import Any, get_args

from sqlalchemy import text

from coordinator.wire.diagnosis import BlockerCode
from tests.api.ledger import Api, Json, Ledger, ok


async def diagnosis(ledger: Ledger) -> Json:
    return await ledger.get("/diagnosis")


async def blockers(ledger: Ledger) -> list[str]:
    found = (await diagnosis(ledger))["blockers"]
    for blocker in found:
        assert blocker["code"] in get_args(BlockerCode)
        assert blocker["detail"]
        assert blocker["next_step"]
    return [b["code"] for b in found]


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, **settings)
    await ledger.worker()
    return ledger


async def execute(ledger: Ledger, statement: str) -> None:
    async with ledger.api.database.engine.begin() as connection:
        await connection.execute(text(statement))


async def lose(ledger: Ledger) -> None:
    """Nobody has heard of any worker for an hour."""
    await execute(ledger, "UPDATE workers SET heartbeat_at = heartbeat_at - interval '1 hour'")


async def test_the_way_from_an_empty_run_to_a_commit(api: Api) -> None:
    """At each step exactly what it waits for is named; when all is there, nothing is."""
    ledger = await Ledger.create(api)
    assert await blockers(ledger) == ["no_workers", "nothing_generated"]
    await ledger.worker()
    assert await blockers(ledger) == ["nothing_generated"]
    await ledger.submit(ledger.rollout("g:0", "g"))
    assert await blockers(ledger) == ["waiting_for_rewards"]
    await ledger.reward("g:0")
    assert await blockers(ledger) == ["groups_incomplete"]
    await ledger.submit(ledger.rollout("g:1", "g", 1))
    assert await blockers(ledger) == ["waiting_for_rewards", "groups_incomplete"]
    await ledger.reward("g:1")
    assert await blockers(ledger) == ["no_open_update"]
    ok(await ledger.open())
    assert await blockers(ledger) == []
    await ledger.candidates()
    assert await blockers(ledger) == ["held_by_updates"]
    await ledger.reserve("g:0", "g:1")
    assert await blockers(ledger) == []
    ok(await ledger.commit())
    found = await diagnosis(ledger)
    assert [b["code"] for b in found["blockers"]] == ["nothing_generated"]
    assert found["blockers"][0]["since"] == found["last_commit_at"] is not None
    assert found["last_commit_no"] == 1


async def test_producers_that_are_lost_or_drain(api: Api) -> None:
    ledger = await ledger_of(api)
    await lose(ledger)
    found = await diagnosis(ledger)
    assert found["blockers"][0]["code"] == "no_live_producers"
    assert found["blockers"][0]["since"] == found["producers"]["last_heartbeat"] is not None
    assert {k: found["producers"][k] for k in ("live", "draining", "lost", "fenced")} == {
        "live": 0, "draining": 0, "lost": 1, "fenced": 0,
    }  # fmt: skip
    draining = await Ledger.create(api, "draining")
    await draining.worker()
    ok(await draining.call("POST", "/workers/w/drain", {"incarnation": "w-1"}))
    found = await diagnosis(draining)
    assert (found["blockers"][0]["code"], found["producers"]["draining"]) == ("no_live_producers", 1)
    ok(await draining.call("POST", "/workers/w/deregister", {"incarnation": "w-1"}))
    assert (await blockers(draining))[0] == "no_workers"


async def test_workers_that_are_all_fenced(api: Api) -> None:
    """One that serves is enough, whatever became of the others."""
    ledger = await ledger_of(api)
    await ledger.worker("v")
    ok(await ledger.call("POST", "/workers/v/fence", {"reason": "its disk is dying"}))
    assert await blockers(ledger) == ["nothing_generated"]
    ok(await ledger.call("POST", "/workers/w/fence", {"reason": "so is this one's"}))
    first = (await diagnosis(ledger))["blockers"][0]
    told = "v (its disk is dying), w (so is this one's)"
    assert (first["code"], first["detail"]) == ("workers_fenced", told)
    await lose(ledger)
    await ledger.worker("x")
    assert await blockers(ledger) == ["nothing_generated"]
    found = (await diagnosis(ledger))["producers"]
    assert (found["live"], found["lost"], found["fenced"]) == (1, 2, 2)


async def test_an_activation_tells_what_it_waits_for(ledger: Ledger) -> None:
    await ledger.worker("v")
    ok(await ledger.prepare(1, 0))
    opened = ok(await ledger.activation(1))

    async def waits() -> tuple[str, Json]:
        found = await diagnosis(ledger)
        [blocker] = [b for b in found["blockers"] if b["code"] == "activation_open"]
        assert (blocker["since"], found["activation"]["deadline_at"]) == (opened["opened_at"], opened["deadline_at"])
        return blocker["detail"], found["activation"]

    detail, standing = await waits()
    assert detail.startswith("version 1 waits for the acks of v, w, until ")
    assert (standing["version"], standing["artifact_committed"]) == (1, False)
    assert (standing["missing_workers"], standing["mismatched_workers"]) == (["v", "w"], [])
    await ledger.ack("w", 1)
    await ledger.ack("v", 1, "0" * 64)
    detail, standing = await waits()
    assert (standing["missing_workers"], standing["mismatched_workers"]) == ([], ["v"])
    await ledger.ack("v", 1)
    assert (await waits())[0].startswith("version 1 waits for its artifact, until ")
    ok(await ledger.upload(1))
    ok(await ledger.call("POST", "/policies/1/commit"))
    found = await diagnosis(ledger)
    assert (found["activation"], [b["code"] for b in found["blockers"]]) == (None, ["nothing_generated"])


async def test_an_activation_by_hand_waits_for_the_switch(api: Api) -> None:
    ledger = await ledger_of(api, activation="by_hand")
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    await ledger.ack("w", 1)
    assert "waits for the switch" in (await diagnosis(ledger))["blockers"][0]["detail"]


async def test_rewards_that_all_failed_are_waited_for(api: Api) -> None:
    """A late good reward counts until the group is spent: nothing else can bring it on."""
    ledger = await ledger_of(api, group_size=3)
    await ledger.submit(ledger.rollout("a"))
    await ledger.reward("a", None, status="timeout")
    found = await diagnosis(ledger)
    assert [b["code"] for b in found["blockers"]] == ["waiting_for_rewards"]
    assert found["rewards"] == {"waiting": 0, "oldest": None, "failed": 1}


async def test_the_oldest_reward_that_is_missing_gives_the_age(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.submit(ledger.rollout("a"))
    await ledger.submit(ledger.rollout("b", "h"))
    found = await diagnosis(ledger)
    arrived = (await ledger.get("/rollouts/a"))["arrived_at"]
    assert found["rewards"] == {"waiting": 2, "oldest": arrived, "failed": 0}
    assert found["blockers"][0]["since"] == arrived


async def test_groups_that_are_all_too_old(api: Api) -> None:
    ledger = await ledger_of(api, max_lag=0)
    await ledger.group("g")
    await ledger.activate(1, 0)
    found = await diagnosis(ledger)
    assert [b["code"] for b in found["blockers"]] == ["all_stale"]
    assert {k: found["groups"][k] for k in ("ready", "incomplete", "stale", "held")} == {
        "ready": 0, "incomplete": 0, "stale": 1, "held": 0,
    }  # fmt: skip
    watching = await Ledger.create(api, "watching", max_lag=0, lag_gate="observe")
    await watching.worker()
    await watching.group("g")
    await watching.activate(1, 0)
    assert await blockers(watching) == ["no_open_update"]


async def test_a_hold_ends_with_the_update_that_has_it(ledger: Ledger) -> None:
    await ledger.group("g")
    ok(await ledger.open())
    await ledger.candidates()
    ok(await ledger.call("POST", "/updates/u/abort", {"owner": "t-1", "reason": "x"}))
    assert await blockers(ledger) == ["no_open_update"]


async def test_what_was_refused_lately_is_told_by_reason(api: Api) -> None:
    ledger = await ledger_of(api, min_usable=1)
    drifted = await ledger.group("drifted")
    await ledger.submit(ledger.rollout("unknown", "h", version=9))
    ok(await ledger.open())
    await ledger.reserve(*drifted, shift=1.0)
    assert (await diagnosis(ledger))["refused"] == {"policy_drift": 2, "policy_unknown": 1}


async def test_open_updates_and_tickets_stand_in_it(api: Api) -> None:
    ledger = await ledger_of(api, groups_per_update=4)
    ids = await ledger.group("g")
    ok(await ledger.open())
    await ledger.reserve(*ids)
    ok(await ledger.call("POST", "/workers/w/tickets", {"incarnation": "w-1", "group_ids": ["x", "y"]}))
    found = await diagnosis(ledger)
    [update] = found["updates"]
    view = await ledger.get("/updates/u")
    assert update == {
        k: view[k] for k in ("update_id", "owner", "policy_version", "reserved", "opened_at", "lease_until")
    }
    assert (update["reserved"], found["tickets"]) == (2, 2)
    await execute(
        ledger, "UPDATE updates SET opened_at = opened_at - interval '1 hour', lease_until = clock_timestamp()"
    )
    assert (await diagnosis(ledger))["updates"] == []
