"""Updates: holds, the order of verdicts, exactly one winner, leases by the database's clock."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from sqlalchemy import text

from tests.api.ledger import Api, Json, Ledger, ok, refused


async def test_holds_hide_groups_from_other_updates_and_end_with_them(ledger: Ledger) -> None:
    for name in ("g", "h", "i"):
        await ledger.group(name)
    ok(await ledger.open("u"))
    ok(await ledger.open("v", owner="t-2"))
    assert (await ledger.candidates("u", 2))["groups"] == ["g", "h"]
    assert (await ledger.candidates("v", 8, "t-2"))["groups"] == ["i"]
    assert (await ledger.candidates("u", 1))["groups"] == ["g"]
    empty = (await ledger.candidates("u", 1, wait=0))["empty"]
    assert empty is None
    ok(await ledger.call("POST", "/updates/u/abort", {"owner": "t-1", "reason": "enough"}))
    assert (await ledger.candidates("v", 8, "t-2"))["groups"] == ["g", "h", "i"]


async def test_a_hold_is_no_reservation(ledger: Ledger) -> None:
    ids = await ledger.group("g")
    ok(await ledger.open("u"))
    ok(await ledger.open("v", owner="t-2"))
    await ledger.candidates("u")
    assert await ledger.reserve(*ids, update="v", owner="t-2") == ["reserved"] * 2


async def test_the_oldest_admissible_comes_first(ledger: Ledger) -> None:
    await ledger.activate(1, 0)
    await ledger.group("new", 1)
    await ledger.group("old", 0)
    ok(await ledger.open(version=1))
    found = await ledger.candidates()
    assert found["groups"] == ["old", "new"]
    assert [(r["policy_version"], r["lag"]) for r in found["rollouts"]] == [(0, 1), (0, 1), (1, 0), (1, 0)]


async def test_an_empty_answer_says_why(ledger: Ledger) -> None:
    quick = await Ledger.create(ledger.api, "quick", max_lag=0)
    ok(await quick.open())

    async def why(update: str = "u") -> str:
        reason: str = (await quick.candidates(update))["empty"]["reason"]
        return reason

    assert await why() == "no_live_producers"
    await quick.worker()
    assert await why() == "nothing_rewarded"
    await quick.group("g")
    ok(await quick.open("v"))
    await quick.candidates("v")
    assert await why() == "held_by_others"
    await quick.activate(1, 0)
    ok(await quick.open("w", 1))
    assert await why("w") == "all_stale"


async def test_a_worker_that_is_lost_produces_nothing(ledger: Ledger) -> None:
    quick = await Ledger.create(ledger.api, "quick", lost_after_seconds=0.3)
    await quick.worker()
    ok(await quick.open())
    await asyncio.sleep(0.35)
    assert (await quick.candidates())["empty"]["reason"] == "no_live_producers"


async def test_waiting_ends_when_the_groups_are_there(ledger: Ledger) -> None:
    ok(await ledger.open())
    waiting = asyncio.create_task(ledger.candidates(groups=1, wait=20))
    await asyncio.sleep(0.2)
    await ledger.group("g")
    there = time.monotonic()
    assert (await waiting)["groups"] == ["g"]
    assert time.monotonic() - there < 1


async def test_of_two_updates_exactly_one_wins(ledger: Ledger) -> None:
    groups = [await ledger.group(f"g{n}") for n in range(10)]
    ok(await ledger.open("u"))
    ok(await ledger.open("v", owner="t-2"))
    for ids in groups:
        u, v = await asyncio.gather(ledger.reserve(*ids), ledger.reserve(*reversed(ids), update="v", owner="t-2"))
        assert {tuple(u), tuple(v)} == {("reserved", "reserved"), ("revision_conflict", "revision_conflict")}


async def test_verdicts_of_rollouts_that_cannot_be_had(ledger: Ledger) -> None:
    ids = await ledger.group("g")
    await ledger.submit(ledger.rollout("raw", "h"))
    ok(await ledger.open())
    assert await ledger.reserve("none") == ["missing_rollout"]
    assert await ledger.reserve(("g:0", 0), ("g:1", 2)) == ["revision_conflict"] * 2
    assert await ledger.reserve(("raw", 1)) == ["revision_conflict"]  # comes before not_rewarded
    assert await ledger.reserve(("raw", 0)) == ["not_rewarded"]
    assert await ledger.reserve(*ids) == ["reserved"] * 2
    ok(await ledger.commit())
    assert await ledger.reserve(*ids, "none") == ["update_fenced", "update_fenced", "missing_rollout"]


async def test_versions_ahead_of_the_update(ledger: Ledger) -> None:
    """candidate_not_active until the switch; future_policy for a trainer that is behind. Neither moves anything."""
    await ledger.publish(1, 0)
    await ledger.worker("v")
    ok(await ledger.activation(1))
    await ledger.ack("w", 1)
    ids = await ledger.group("g", 1)
    ok(await ledger.open())
    assert (await ledger.candidates())["groups"] == []
    assert await ledger.reserve(*ids) == ["candidate_not_active"] * 2
    await ledger.ack("v", 1)
    assert await ledger.reserve(*ids) == ["future_policy"] * 2
    assert await ledger.state("g:0") == ("rewarded", None, 1)
    ok(await ledger.open("ahead", 1))
    assert await ledger.reserve(*ids, update="ahead") == ["reserved"] * 2


async def test_time_in_the_queue_counts_as_lag(ledger: Ledger) -> None:
    tight = await Ledger.create(ledger.api, "tight", max_lag=0)
    await tight.worker()
    ids = await tight.group("g")
    await tight.activate(1, 0)
    ok(await tight.open(version=1))
    answer = ok(await tight.try_reserve(*ids))
    assert [(v["verdict"], v["state"], v["lag"]) for v in answer["verdicts"]] == [("stale_policy", "offline", 1)] * 2
    assert await tight.reserve(*ids) == ["stale_policy"] * 2  # a retry replays the refusal
    assert await tight.state("g:0") == ("offline", "stale_policy", 2)
    refusals = (await tight.get("/updates/u/lineage"))["refusals"]
    assert [r["verdict"] for r in refusals] == ["stale_policy"] * 2


async def test_drift_is_admitted_up_to_the_limit_and_quarantined_above(ledger: Ledger) -> None:
    exact = await Ledger.create(ledger.api, "exact", max_drift=0.25, min_usable=1)
    await exact.worker()
    ok(await exact.open())
    assert await exact.reserve(*await exact.group("equal"), shift=0.25) == ["reserved"] * 2
    above = await exact.group("above")
    answer = ok(await exact.try_reserve(*above, shift=-0.2500001))
    assert [(v["verdict"], v["state"]) for v in answer["verdicts"]] == [("policy_drift", "quarantined")] * 2
    assert abs(answer["verdicts"][0]["drift"] - 0.2500001) < 1e-9
    assert answer["groups"] == [{"group_id": "above", "usable": 0, "refused_rewards": {"above:0": 0.0, "above:1": 1.0}}]
    history = (await exact.get("/rollouts/above:0/history"))["transitions"][-1]
    assert (history["event"], history["reason"], history["update_id"]) == ("quarantine", "policy_drift", "u")
    rows = await exact.api.rows(
        "SELECT drift, drift_max, drift_k3, drift_outside_share, drift_sample_size FROM update_members "
        "WHERE rollout_id = 'equal:0'"
    )
    assert rows[0].drift == rows[0].drift_max == 0.25
    assert abs(rows[0].drift_k3 - (2.718281828459045**0.25 - 1.25)) < 1e-12
    assert (rows[0].drift_outside_share, rows[0].drift_sample_size) == (0.0, 1.0)


async def test_a_group_falls_with_too_many_of_its_members(ledger: Ledger) -> None:
    """One of two drifts, two are needed: the other is refused with it, and a retry hears the same."""
    ids = await ledger.group("g")
    ok(await ledger.open())

    async def try_both() -> Json:
        body = {
            "owner": "t-1",
            "after_commit_no": 0,
            "rollouts": [
                {"rollout_id": r, "revision": 1, "current_log_probs": [None] * 3 + [-0.5 - shift] * 3}
                for r, shift in zip(ids, (0.0, 1.0), strict=True)
            ],
        }
        return ok(await ledger.call("POST", "/updates/u/reserve", body))

    first = await try_both()
    assert [(v["verdict"], v["state"]) for v in first["verdicts"]] == [
        ("group_refused", "offline"), ("policy_drift", "quarantined"),
    ]  # fmt: skip
    assert [v["verdict"] for v in (await try_both())["verdicts"]] == ["group_refused", "policy_drift"]
    refusals = (await ledger.get("/updates/u/lineage"))["refusals"]
    assert [r["verdict"] for r in refusals] == ["group_refused", "policy_drift"]
    assert ok(await ledger.commit())["commit_no"] == 1


@pytest.mark.parametrize(("settings", "shift"), [({"drift_gate": "observe"}, 5.0), ({"lag_gate": "observe"}, 0.0)])
async def test_an_observing_gate_records_what_it_would_refuse(ledger: Ledger, settings: Json, shift: float) -> None:
    run = await Ledger.create(ledger.api, "observe", max_lag=0, **settings)
    await run.worker()
    version = 0
    ids = await run.group("g")
    if "lag_gate" in settings:
        await run.activate(1, 0)
        version = 1
    ok(await run.open(version=version))
    verdicts = ok(await run.try_reserve(*ids, shift=shift))["verdicts"]
    expected = "stale_policy" if version else "policy_drift"
    assert [(v["verdict"], v["would_refuse"]) for v in verdicts] == [("reserved", expected)] * 2


async def test_without_a_drift_gate_no_log_probs_are_needed(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "off", drift_gate="off")
    await run.worker()
    ids = await run.group("g")
    ok(await run.open())
    body = {"owner": "t-1", "after_commit_no": 0, "rollouts": [{"rollout_id": r, "revision": 1} for r in ids]}
    verdicts = ok(await run.call("POST", "/updates/u/reserve", body))["verdicts"]
    assert [(v["verdict"], v["drift"]) for v in verdicts] == [("reserved", None)] * 2


async def test_one_misaligned_trainer_does_not_empty_the_buffer(ledger: Ledger) -> None:
    ids = [r for n in range(4) for r in await ledger.group(f"g{n}")]
    ok(await ledger.open())
    refused(await ledger.try_reserve(*ids, shift=1.0), 409, "drift_suspect")
    assert {(await ledger.state(r))[0] for r in ids} == {"rewarded"}
    assert await ledger.reserve(*ids, shift=1.0, confirm_drift=True) == ["policy_drift"] * 8


@pytest.mark.parametrize("log_probs", [None, [-0.5] * 5, [-0.5] * 7, [None] * 6, [None, None, None, -0.5, None, -0.5]])
async def test_log_probs_that_do_not_fit_refuse_the_call(ledger: Ledger, log_probs: Any) -> None:
    ids = await ledger.group("g")
    ok(await ledger.open())
    rollouts = [{"rollout_id": r, "revision": 1, "current_log_probs": [-0.5] * 6} for r in ids]
    rollouts[1]["current_log_probs"] = log_probs
    body = {"owner": "t-1", "after_commit_no": 0, "rollouts": rollouts}
    problem = refused(await ledger.call("POST", "/updates/u/reserve", body), 422, "invalid_log_probs")
    assert problem["item"] == "g:1"
    assert await ledger.state("g:0") == ("rewarded", None, 1)


async def test_a_group_is_named_whole_and_once(ledger: Ledger) -> None:
    await ledger.group("g")
    ok(await ledger.open())
    assert refused(await ledger.try_reserve("g:0"), 422, "partial_group")["item"] == "g:1"
    refused(await ledger.try_reserve("g:0", "g:1", "g:1"), 422, "invalid_request")
    assert await ledger.state("g:0") == ("rewarded", None, 1)


async def test_an_update_belongs_to_its_owner(ledger: Ledger) -> None:
    ids = await ledger.group("g")
    ok(await ledger.open())
    refused(await ledger.open(owner="t-2"), 409, "update_owned")
    refused(await ledger.try_reserve(*ids, owner="t-2"), 409, "update_owned")
    refused(await ledger.commit(owner="t-2"), 409, "update_owned")
    for action in ("renew", "abort", "candidates"):
        body = {"owner": "t-2"} | {"abort": {"reason": "x"}, "candidates": {"groups": 1}}.get(action, {})
        refused(await ledger.call("POST", f"/updates/u/{action}", body), 409, "update_owned")
    refused(await ledger.call("POST", "/updates/none/renew", {"owner": "t"}), 404, "update_unknown")


async def test_the_policy_may_be_restated_until_the_first_reservation(ledger: Ledger) -> None:
    ids = await ledger.group("g")
    await ledger.publish(1, 0)
    ok(await ledger.open())
    assert ok(await ledger.open(version=1))["policy_version"] == 1
    assert await ledger.reserve(*ids) == ["reserved"] * 2
    refused(await ledger.open(version=0), 409, "update_conflict")
    refused(await ledger.open("other", artifact_hash="0" * 64), 409, "policy_identity_conflict")


async def test_a_trainer_that_the_line_has_left_behind_can_neither_reserve_nor_commit(ledger: Ledger) -> None:
    g, h = await ledger.group("g"), await ledger.group("h")
    ok(await ledger.open("slow"))
    ok(await ledger.open("fast"))
    assert await ledger.reserve(*g, update="slow") == ["reserved"] * 2
    assert await ledger.reserve(*h, update="fast") == ["reserved"] * 2
    ok(await ledger.commit("fast"))
    refused(await ledger.commit("slow"), 409, "line_conflict")
    refused(await ledger.commit("slow", after=1), 409, "line_conflict")
    ok(await ledger.open("next"))
    refused(await ledger.try_reserve(*h, update="next", after=0), 409, "line_conflict")
    assert await ledger.state("g:0") == ("reserved", None, 2)
    assert (await ledger.get("/updates/slow"))["state"] == "open"


async def test_abort_releases_or_quarantines(ledger: Ledger) -> None:
    for name, quarantine, state in (("g", False, "rewarded"), ("h", True, "quarantined")):
        ids = await ledger.group(name)
        ok(await ledger.open(name))
        assert await ledger.reserve(*ids, update=name) == ["reserved"] * 2
        body = {"owner": "t-1", "reason": "loss was NaN", "quarantine": quarantine}
        assert ok(await ledger.call("POST", f"/updates/{name}/abort", body))["state"] == "aborted"
        ok(await ledger.call("POST", f"/updates/{name}/abort", body))
        assert (await ledger.state(ids[0]))[0::2] == (state, 3)
        refused(await ledger.commit(name), 409, "update_fenced")
    ok(await ledger.open("again"))
    assert await ledger.reserve(("g:0", 3), ("g:1", 3), update="again") == ["reserved"] * 2
    failures = (await ledger.get("/failures"))["failures"]
    assert [(f["stage"], f["kind"], f["update_id"], f["message"]) for f in failures] == [
        ("update", "aborted", "g", "loss was NaN"), ("update", "aborted", "h", "loss was NaN"),
    ]  # fmt: skip


async def test_a_lease_ends_by_the_database_s_clock_whether_or_not_anyone_swept(ledger: Ledger) -> None:
    short = await Ledger.create(ledger.api, "short", update_lease_seconds=1.5)
    await short.worker()
    ids = await short.group("g")
    ok(await short.open())
    assert await short.reserve(*ids) == ["reserved"] * 2
    ok(await short.call("POST", "/updates/u/renew", {"owner": "t-1"}))
    await asyncio.sleep(1.55)
    refused(await short.commit(), 409, "lease_expired")
    refused(await short.call("POST", "/updates/u/renew", {"owner": "t-1"}), 409, "lease_expired")
    ok(await short.open("v"))
    assert (await short.candidates("v"))["groups"] == ["g"]
    assert await short.reserve(("g:0", 3), ("g:1", 3), update="v") == ["reserved"] * 2
    assert (await short.get("/updates/u"))["state"] == "expired"
    assert await short.reserve(("g:0", 3), ("g:1", 3)) == ["update_fenced"] * 2
    failures = (await short.get("/failures"))["failures"]
    assert [(f["stage"], f["kind"]) for f in failures] == [("update", "expired")]


async def test_the_sweeper_ends_a_lease_that_nobody_asks_about(ledger: Ledger) -> None:
    short = await Ledger.create(ledger.api, "short", update_lease_seconds=1, on_expiry="quarantine")
    await short.worker()
    ids = await short.group("g")
    ok(await short.open())
    assert await short.reserve(*ids) == ["reserved"] * 2
    for _ in range(100):
        if (await short.state("g:0"))[0] != "reserved":
            break
        await asyncio.sleep(0.1)
    assert await short.state("g:0") == ("quarantined", "update_expired", 3)


async def test_only_what_is_held_may_be_discarded(ledger: Ledger) -> None:
    ids = await ledger.group("g")
    await ledger.group("h")
    ok(await ledger.open())
    assert await ledger.reserve(*ids) == ["reserved"] * 2
    problem = refused(await ledger.commit(discards=[{"rollout_id": "h:0", "reason": "x"}]), 422, "invalid_request")
    assert problem["item"] == "h:0"
    assert await ledger.state("g:0") == ("reserved", None, 2)


async def test_a_lease_that_ends_while_the_call_waits_binds_nothing(api: Api) -> None:
    ledger = await Ledger.create(api, update_lease_seconds=1)
    await ledger.worker()
    ids = await ledger.group("g")
    ok(await ledger.open())
    async with api.database.engine.begin() as other:
        await other.execute(text("SELECT FROM groups WHERE group_id = 'g' FOR UPDATE"))
        waiting = asyncio.create_task(ledger.reserve(*ids))
        await asyncio.sleep(1.5)
        assert not waiting.done()
    assert await waiting == ["update_fenced", "update_fenced"]
    assert await ledger.state("g:0") == ("rewarded", None, 1)


async def test_an_update_without_a_policy_is_opened_on_the_active_one_and_stays_there(ledger: Ledger) -> None:
    opening = {"owner": "t-1"}
    first = await ledger.call("PUT", "/updates/u", opening)
    assert first.status_code == 201
    view = ok(first)
    assert (view["policy_version"], view["artifact_hash"], view["lease_seconds"]) == (0, ledger.hashes[0], 120)
    await ledger.activate(1, 0)
    # The retry of a call whose answer was lost finds the same update, wherever the pointer is by now.
    again = await ledger.call("PUT", "/updates/u", opening)
    assert (again.status_code, again.json()) == (200, view)
    refused(await ledger.call("PUT", "/updates/u", {"owner": "t-2"}), 409, "update_owned")
    assert ok(await ledger.call("PUT", "/updates/v", opening))["policy_version"] == 1
    assert ok(await ledger.open("u", 1))["policy_version"] == 1  # restated by name
    ok(await ledger.call("POST", "/updates/u/abort", opening | {"reason": "no"}))
    assert ok(await ledger.call("PUT", "/updates/u", opening))["state"] == "aborted"


@pytest.mark.parametrize("part", [{"policy_version": 0}, {"artifact_hash": "0" * 64}])
async def test_half_a_policy_is_refused(ledger: Ledger, part: Json) -> None:
    refused(await ledger.call("PUT", "/updates/u", {"owner": "t-1"} | part), 422, "invalid_request")


async def test_a_commit_that_holds_nothing_takes_a_number(ledger: Ledger) -> None:
    ok(await ledger.open("empty"))
    assert ok(await ledger.commit("empty"))["commit_no"] == 1
    ids = await ledger.group("g")
    ok(await ledger.open("next"))
    refused(await ledger.try_reserve(*ids, update="next", after=0), 409, "line_conflict")
    assert await ledger.reserve(*ids, update="next", after=1) == ["reserved"] * 2
    assert ok(await ledger.commit("next", after=1))["commit_no"] == 2
    back = ok(await ledger.call("PUT", "/rewinds/r", {"to_commit_no": 1, "reason": "its checkpoint was restored"}))
    assert (back["rewound_updates"], back["released"]) == (["next"], 2)
