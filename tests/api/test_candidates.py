"""Candidates: how many, why none, waiting for them, and binding them in the same call."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import text

from coordinator.wire.columns import ARROW_MEDIA_TYPE, decode_candidates
from tests.api.ledger import CONTRACT, Api, Json, Ledger, ok, refused


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, **settings)
    await ledger.worker()
    return ledger


async def ask(ledger: Ledger, update: str = "u", **body: Any) -> Json:
    return ok(await ledger.call("POST", f"/updates/{update}/candidates", {"owner": "t-1"} | body))


@pytest.mark.parametrize(
    ("rollouts", "groups"), [(1, "g0"), (2, "g0"), (3, "g0 g1"), (4, "g0 g1"), (5, "g0 g1 g2"), (100, "g0 g1 g2 g3")]
)
async def test_so_many_rollouts_in_whole_groups(ledger: Ledger, rollouts: int, groups: str) -> None:
    """The group that reaches the number ends the answer, and only what is answered is held."""
    for n in range(4):
        await ledger.group(f"g{n}")
    ok(await ledger.open())
    answer = await ask(ledger, rollouts=rollouts)
    assert answer["groups"] == groups.split()
    assert [r["group_id"] for r in answer["rollouts"]] == [g for g in groups.split() for _ in range(2)]
    held = await ledger.api.rows("SELECT group_id FROM groups WHERE held_by IS NOT NULL ORDER BY 1")
    assert [row.group_id for row in held] == groups.split()
    assert (await ask(ledger, rollouts=rollouts))["groups"] == groups.split()


@pytest.mark.parametrize(
    "body", [{}, {"groups": 1, "rollouts": 1}, {"groups": 0}, {"rollouts": 0}, {"groups": 4097}, {"rollouts": True},
             {"groups": 1, "reserve": True}, {"groups": 1, "after_commit_no": 0}, {"groups": 1, "wait_seconds": -1}],
)  # fmt: skip
async def test_one_measure_and_one_way(ledger: Ledger, body: Json) -> None:
    ok(await ledger.open())
    response = await ledger.call("POST", "/updates/u/candidates", {"owner": "t-1"} | body)
    refused(response, 422, "invalid_request")


async def why(ledger: Ledger, update: str = "u") -> tuple[str, str | None]:
    answer = await ask(ledger, update, groups=1)
    assert (answer["groups"], answer["rollouts"]) == ([], [])
    return answer["empty"]["reason"], answer["empty"]["since"]


async def test_no_live_producers_since_the_last_heartbeat(api: Api) -> None:
    ledger = await Ledger.create(api)
    ok(await ledger.open())
    assert await why(ledger) == ("no_live_producers", None)
    await ledger.worker()
    ok(await ledger.call("POST", "/workers/w/drain", {"incarnation": "w-1"}))
    [worker] = (await ledger.get("/workers"))["workers"]
    assert await why(ledger) == ("no_live_producers", worker["heartbeat_at"])


async def test_nothing_rewarded_since_the_last_commit(ledger: Ledger) -> None:
    ok(await ledger.open())
    await ledger.submit(ledger.rollout("r"))
    assert await why(ledger) == ("nothing_rewarded", None)
    await ledger.group("h")
    await ledger.reserve("h:0", "h:1")
    ok(await ledger.commit())
    ok(await ledger.open("v"))
    assert await why(ledger, "v") == ("nothing_rewarded", (await ledger.get("/updates/u"))["ended_at"])


async def test_groups_incomplete_since_the_first_arrival(api: Api) -> None:
    ledger = await ledger_of(api, group_size=3)
    ok(await ledger.open())
    await ledger.group("g", size=2)
    first = (await api.rows("SELECT first_arrival_at FROM groups"))[0].first_arrival_at
    reason, since = await why(ledger)
    assert (reason, datetime.fromisoformat(since or "")) == ("groups_incomplete", first)


async def test_all_stale(api: Api) -> None:
    ledger = await ledger_of(api, max_lag=0)
    await ledger.group("g")
    await ledger.activate(1, 0)
    ok(await ledger.open(version=1))
    assert (await why(ledger))[0] == "all_stale"


async def test_what_a_gate_only_observes_is_never_all_stale(api: Api) -> None:
    ledger = await ledger_of(api, max_lag=0, lag_gate="observe")
    await ledger.group("g")
    await ledger.activate(1, 0)
    ok(await ledger.open(version=1))
    ok(await ledger.open("v", version=1))
    assert (await ask(ledger, "v", groups=1))["groups"] == ["g"]
    assert (await why(ledger))[0] == "held_by_others"


async def test_held_by_others_since_the_hold_began(ledger: Ledger) -> None:
    await ledger.group("g")
    ok(await ledger.open())
    ok(await ledger.open("v"))
    [[before]] = await ledger.api.rows("SELECT clock_timestamp()")
    await ask(ledger, "v", groups=1)
    [[after]] = await ledger.api.rows("SELECT clock_timestamp()")
    reason, since = await why(ledger)
    assert reason == "held_by_others"
    assert before <= datetime.fromisoformat(since or "") <= after


async def test_ahead_of_the_update(ledger: Ledger) -> None:
    await ledger.activate(1, 0)
    await ledger.group("g", 1)
    ok(await ledger.open(version=0))
    assert (await why(ledger))[0] == "ahead_of_update"
    # A hold of an update that has ended is not what keeps it from this one.
    ok(await ledger.open("v", version=1))
    await ask(ledger, "v", groups=1)
    assert (await why(ledger))[0] == "held_by_others"
    ok(await ledger.call("POST", "/updates/v/abort", {"owner": "t-1", "reason": "x"}))
    assert (await why(ledger))[0] == "ahead_of_update"


async def test_other_contract_and_other_ruleset(api: Api) -> None:
    ledger = await ledger_of(api, other_contract="keep_apart", mix_rulesets=False)
    await ledger.group("g")
    await ledger.group("warm", contract=CONTRACT | {"temperature": 0.5})
    ok(await ledger.open())
    await ledger.reserve("g:0", "g:1")
    assert (await why(ledger))[0] == "other_contract"
    await ledger.submit(*(ledger.rollout(f"h:{i}", "h", i) for i in range(2)))
    for i in range(2):
        await ledger.reward(f"h:{i}", ruleset_id="other")
    assert (await why(ledger))[0] == "other_ruleset"


async def test_waiting_ends_with_what_is_there_when_the_time_is_up(ledger: Ledger) -> None:
    """Fewer than asked are answered all the same; the run's longest wait caps the caller's."""
    short = await Ledger.create(ledger.api, "short", longest_wait_seconds=0.2)
    await short.worker()
    ok(await short.open())
    await short.group("g")
    answer = await asyncio.wait_for(ask(short, groups=5, wait_seconds=3600), 30)
    assert (answer["groups"], answer["empty"]) == (["g"], None)
    ok(await short.open("v"))
    empty = await asyncio.wait_for(ask(short, "v", groups=1, wait_seconds=3600), 30)
    assert empty["empty"]["reason"] == "held_by_others"


async def test_waiting_for_so_many_rollouts(ledger: Ledger) -> None:
    ok(await ledger.open())
    await ledger.group("g")
    waiting = asyncio.create_task(ask(ledger, rollouts=3, wait_seconds=50))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await ledger.group("h")
    assert (await asyncio.wait_for(waiting, 30))["groups"] == ["g", "h"]


@pytest.mark.parametrize("end", ["abort", "rewind", "lease"])
async def test_waiting_ends_with_the_update(api: Api, end: str) -> None:
    ledger = await ledger_of(api)
    ok(await ledger.open())
    waiting = asyncio.create_task(
        ledger.call("POST", "/updates/u/candidates", {"owner": "t-1", "groups": 1, "wait_seconds": 50})
    )
    await asyncio.sleep(0.2)
    assert not waiting.done()
    code = "update_fenced"
    if end == "abort":
        ok(await ledger.call("POST", "/updates/u/abort", {"owner": "t-1", "reason": "x"}))
    elif end == "rewind":
        ok(await ledger.call("PUT", "/rewinds/back", {"to_commit_no": 0, "reason": "restored"}))
    else:
        code = "lease_expired"
        async with api.database.engine.begin() as connection:
            await connection.execute(text("UPDATE updates SET lease_until = clock_timestamp()"))
    refused(await asyncio.wait_for(waiting, 30), 409, code)


def bind(after: int = 0, **more: Any) -> Json:
    return {"reserve": True, "after_commit_no": after} | more


async def test_binding_in_the_same_call_is_only_for_runs_that_measure_no_drift(ledger: Ledger) -> None:
    observing = await Ledger.create(ledger.api, "observing", drift_gate="observe")
    await observing.worker()
    for run in (ledger, observing):
        await run.group("g")
        ok(await run.open())
        response = await run.call("POST", "/updates/u/candidates", {"owner": "t-1", "groups": 1} | bind())
        assert refused(response, 422, "invalid_request")["field"] == "reserve"
        assert await run.state("g:0") == ("rewarded", None, 1)
        [row] = await run.api.rows("SELECT count(*) AS n FROM groups WHERE held_by IS NOT NULL")
        assert row.n == 0


async def test_binding_in_the_same_call_may_be_sent_again(api: Api) -> None:
    """What the update holds already comes first; no group is bound beyond what was asked for."""
    ledger = await ledger_of(api, drift_gate="off")
    for n in range(4):
        await ledger.group(f"g{n}")
    ok(await ledger.open())
    first = await ask(ledger, groups=2, **bind())
    assert first["groups"] == ["g0", "g1"]
    assert [(v["rollout_id"], v["verdict"], v["state"], v["revision"]) for v in first["reserved"]] == [
        (f"g{n}:{i}", "reserved", "reserved", 2) for n in range(2) for i in range(2)
    ]
    assert [r["token_ids"] for r in first["rollouts"]] == [[1, 2, 3, 4, 5, 6]] * 4
    again = await ask(ledger, groups=2, **bind())
    assert again["groups"] == ["g0", "g1"]
    assert [(r["rollout_id"], r["reward"]) for r in again["rollouts"]] == [
        (r["rollout_id"], r["reward"]) for r in first["rollouts"]
    ]
    assert [(v["verdict"], v["revision"]) for v in again["reserved"]] == [("idempotent_retry", 2)] * 4
    more = await ask(ledger, groups=3, **bind())
    assert (more["groups"], [v["verdict"] for v in more["reserved"]]) == (
        ["g0", "g1", "g2"], ["idempotent_retry"] * 4 + ["reserved"] * 2,
    )  # fmt: skip
    assert (await ledger.get("/updates/u"))["reserved"] == 6
    assert await ledger.state("g3:0") == ("rewarded", None, 1)
    by_number = await ask(ledger, rollouts=7, **bind())
    assert (by_number["groups"], len(by_number["rollouts"])) == (["g0", "g1", "g2", "g3"], 8)
    ok(await ledger.commit())
    assert {(await ledger.state(f"g{n}:0"))[0] for n in range(4)} == {"consumed"}


async def test_calls_sent_at_once_bind_no_more_than_one_would(api: Api) -> None:
    ledger = await ledger_of(api, drift_gate="off")
    for n in range(6):
        await ledger.group(f"g{n}")
    ok(await ledger.open())
    answers = await asyncio.gather(*(ask(ledger, groups=2, **bind()) for _ in range(4)))
    assert {tuple(a["groups"]) for a in answers} == {("g0", "g1")}
    assert (await ledger.get("/updates/u"))["reserved"] == 4


async def test_two_updates_that_bind_at_once_share_nothing(api: Api) -> None:
    ledger = await ledger_of(api, drift_gate="off")
    for n in range(8):
        await ledger.group(f"g{n}")
    for update in ("u", "v"):
        ok(await ledger.open(update))
    answers = await asyncio.gather(*(ask(ledger, update, groups=4, **bind()) for update in ("u", "v")))
    bound = [v for a in answers for v in a["reserved"]]
    assert {v["verdict"] for v in bound} == {"reserved"}
    assert len({v["rollout_id"] for v in bound}) == len(bound)


async def test_binding_waits_and_holds_to_the_line(api: Api) -> None:
    ledger = await ledger_of(api, drift_gate="off")
    ok(await ledger.open())
    waiting = asyncio.create_task(ask(ledger, groups=2, wait_seconds=50, **bind()))
    await asyncio.sleep(0.2)
    await ledger.group("g")
    await ledger.group("h")
    assert (await asyncio.wait_for(waiting, 30))["groups"] == ["g", "h"]
    ok(await ledger.commit())
    await ledger.group("i")
    ok(await ledger.open("v"))
    body = {"owner": "t-1", "groups": 1} | bind(0)
    refused(await ledger.call("POST", "/updates/v/candidates", body), 409, "line_conflict")
    assert await ledger.state("i:0") == ("rewarded", None, 1)
    assert [v["verdict"] for v in (await ask(ledger, "v", groups=1, **bind(1)))["reserved"]] == ["reserved"] * 2


async def test_binding_tells_what_it_refused_of_a_group(api: Api) -> None:
    """One member became stale: it goes offline, and the other is bound without it."""
    ledger = await ledger_of(api, drift_gate="off", min_usable=1, max_lag=1)
    await ledger.submit(ledger.rollout("old", "g"))
    await ledger.reward("old")
    await ledger.activate(1, 0)
    await ledger.submit(ledger.rollout("new", "g", 1, version=1))
    await ledger.reward("new")
    await ledger.activate(2, 1)
    ok(await ledger.open(version=2))
    for verdicts in (["stale_policy", "reserved"], None):
        answer = await ask(ledger, groups=1, **bind())
        if verdicts is not None:
            assert [v["verdict"] for v in answer["reserved"]] == verdicts
        else:
            assert [(v["rollout_id"], v["verdict"]) for v in answer["reserved"]] == [("new", "idempotent_retry")]
    assert await ledger.state("old") == ("offline", "stale_policy", 2)


async def test_binding_in_arrow_is_the_same(api: Api) -> None:
    ledger = await ledger_of(api, drift_gate="off")
    await ledger.group("g")
    ok(await ledger.open())
    in_json = await ask(ledger, groups=1, **bind())
    response = await ledger.call(
        "POST", "/updates/u/candidates", {"owner": "t-1", "groups": 1} | bind(), headers={"accept": ARROW_MEDIA_TYPE}
    )
    in_arrow = decode_candidates(response.content).to_model().model_dump(mode="json")
    for answer in (in_json, in_arrow):
        answer.pop("reserved")
    assert in_arrow == in_json | {"rollouts": [r | {"revision": 2} for r in in_json["rollouts"]]}


async def test_a_latecomer_to_a_group_that_another_update_holds_is_not_offered_and_not_bound(api: Api) -> None:
    """Bound by itself it would split the group between two updates."""
    ledger = await Ledger.create(api, group_size=2, min_usable=1, max_attempts=2, hold_seconds=0.001)
    await ledger.worker()
    ids = await ledger.group("g")
    ok(await ledger.open("u"))
    assert await ledger.reserve(*ids) == ["reserved", "reserved"]
    await ledger.submit(ledger.rollout("late", "g", 1, attempt=1))
    await ledger.reward("late")
    ok(await ledger.open("other", owner="t-2"))
    for update, owner in (("other", "t-2"), ("u", "t-1")):
        assert (await ledger.candidates(update, owner=owner))["rollouts"] == []
    assert await ledger.reserve("late", update="other", owner="t-2") == ["group_refused"]
    assert (await ledger.state("late"))[:2] == ("rewarded", None)
    ok(await ledger.commit("u"))
    assert (await ledger.state("late"))[:2] == ("offline", "group_spent")
