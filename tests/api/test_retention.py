"""Retention: what is over loses its tokens, then its row; nothing live does, and no id is ever used twice."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from coordinator.rollouts import retention
from coordinator.runs.queries import FOLD_COUNTS
from tests.api.ledger import Api, Json, Ledger, ok, refused

SHORT = {"evidence_retention_seconds": 0.001, "rollout_retention_seconds": 0.002, "rewind_commits": 0}


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, **settings)
    await ledger.worker()
    return ledger


async def consumed(ledger: Ledger, group: str = "g", update: str = "u", after: int = 0) -> list[str]:
    ids = await ledger.group(group)
    ok(await ledger.open(update))
    assert set(await ledger.reserve(*ids, update=update, after=after)) == {"reserved"}
    ok(await ledger.commit(update, after))
    return ids


async def test_tokens_go_first_and_the_rest_is_still_told(api: Api) -> None:
    ledger = await ledger_of(api, evidence_retention_seconds=0.001, rewind_commits=0)
    ids = await consumed(ledger)
    live = await ledger.group("live")
    assert await retention.sweep(api.database) == {"run": 2}
    assert await retention.sweep(api.database) == {}
    view = await ledger.get(f"/rollouts/{ids[0]}")
    assert (view["state"], view["tokens"], view["spans"][0]["version"]) == ("consumed", 6, 0)
    refused(await ledger.call("GET", f"/rollouts/{ids[0]}/evidence"), 404, "rollout_unknown")
    body = {"rollout_ids": [*ids, *live]}
    answer = ok(await ledger.call("POST", "/rollouts/evidence", body))
    assert (answer["missing"], [r["rollout_id"] for r in answer["rollouts"]]) == (ids, live)
    assert (await ledger.get("/counts"))["evidence_bytes"] == 2 * 6 * 9
    ok(await ledger.open("v"))
    assert await ledger.reserve(*live, update="v", after=1) == ["reserved"] * 2


async def test_a_tombstone_keeps_the_id_and_the_member_for_ever(api: Api) -> None:
    ledger = await ledger_of(api, **SHORT)
    ids = await consumed(ledger)
    assert await retention.sweep(api.database) == {"run": 4}
    assert (await ledger.get("/rollouts"))["rollouts"] == []
    refused(await ledger.call("GET", f"/rollouts/{ids[0]}"), 404, "rollout_unknown")
    again, other, member = await ledger.submit(
        ledger.rollout(ids[0], "g", 0),
        ledger.rollout(ids[1], "elsewhere", 0),
        ledger.rollout("new", "g", 1),
    )
    assert (again["verdict"], again["state"], again["revision"]) == ("duplicate", "consumed", 3)
    assert (other["verdict"], member["verdict"]) == ("conflict", "conflict")
    assert (await ledger.reward(ids[0]))["verdict"] == "missing_rollout"
    ok(await ledger.open("v"))
    assert await ledger.reserve((ids[0], 3), update="v", after=1) == ["missing_rollout"]
    # Audit, members and the group live on: a latecomer is still told that its group is spent.
    assert len((await ledger.get(f"/rollouts/{ids[0]}/history"))["transitions"]) == 4
    lineage = await ledger.get("/updates/u/lineage")
    assert [(m["rollout_id"], m["outcome"], m["worker_id"]) for m in lineage["members"]] == [
        (ids[0], "consumed", None), (ids[1], "consumed", None),
    ]  # fmt: skip
    assert (await ledger.get("/lineage?version=0"))["uses"] == [
        {"update_id": "u", "state": "committed", "commit_no": 1, "policy_version": 0, "rollouts": 2}
    ]
    counts = await ledger.get("/counts")
    assert (counts["rollouts"]["consumed"], counts["evidence_bytes"]) == (0, 0)


async def test_what_is_live_stays_whatever_its_age(api: Api) -> None:
    ledger = await ledger_of(api, **SHORT, group_size=3, min_usable=2)
    await ledger.submit(*(ledger.rollout(f"g:{i}", "g", i) for i in range(2)))
    await ledger.reward("g:0")
    # Quarantined, but its group may still enter an update: the tokens go, the row stays and counts.
    unknown: Json = {"spans": [{"version": 9, "artifact_hash": ledger.hashes[0], "start": 0, "end": 6}]}
    await ledger.submit(ledger.rollout("g:2", "g", 2, **unknown))
    assert await retention.sweep(api.database) == {"run": 1}
    assert await ledger.state("g:2") == ("quarantined", "policy_unknown", 1)
    for rollout_id in ("g:0", "g:1"):
        assert len((await ledger.get(f"/rollouts/{rollout_id}/evidence"))["token_ids"]) == 6
    answer = ok(await ledger.call("POST", "/rollouts/release", {"rollout_ids": ["g:2"]}))["verdicts"]
    assert [(v["verdict"], v["reason"]) for v in answer] == [("stays", "beyond_retention")]


async def test_what_a_rewind_may_bring_back_is_kept(api: Api) -> None:
    ledger = await ledger_of(api, **(SHORT | {"rewind_commits": 1}))
    first = await consumed(ledger, "g1", "u1")
    assert await retention.sweep(api.database) == {}
    second = await consumed(ledger, "g2", "u2", after=1)
    drifted = await ledger.group("g3")
    ok(await ledger.open("u3"))
    assert await ledger.reserve(*drifted, update="u3", after=2, shift=0.5) == ["policy_drift"] * 2
    assert await retention.sweep(api.database) == {"run": 4}
    for rollout_id in first:
        refused(await ledger.call("GET", f"/rollouts/{rollout_id}"), 404, "rollout_unknown")
    body = {"to_commit_no": 1, "reason": "the checkpoint of commit 1 was restored"}
    assert ok(await ledger.call("PUT", "/rewinds/r", body))["released"] == 4
    ok(await ledger.open("u4"))
    offered = (await ledger.candidates("u4"))["rollouts"]
    assert {r["rollout_id"] for r in offered} == {*second, *drifted}


async def test_counts_are_folded_and_stay_the_same(ledger: Ledger) -> None:
    await consumed(ledger)
    await ledger.group("h")
    before = await ledger.get("/counts")
    for _ in range(2):
        async with ledger.api.database.engine.begin() as connection:
            await connection.execute(FOLD_COUNTS)
            assert (await connection.execute(text("SELECT count(*) FROM count_deltas"))).scalar_one() == 0
        assert await ledger.get("/counts") == before
    assert before["rollouts"] == {
        "generated": 0, "rewarded": 2, "reserved": 0, "consumed": 2, "generation_failed": 0, "reward_failed": 0,
        "quarantined": 0, "offline": 0,
    }  # fmt: skip
    assert before["evidence_bytes"] == 4 * 6 * 9
