"""Runs side by side: the same ids everywhere, and nothing of one run touches another."""

from __future__ import annotations

from typing import Any

from coordinator.rollouts import retention
from tests.api.ledger import Api, Ledger, ok, refused

NAMES = ("left", "right")


async def whole(ledger: Ledger) -> dict[str, Any]:
    """Everything that a run shows, but for times and for what is counted over all runs."""
    rollouts = (await ledger.get("/rollouts"))["rollouts"]
    updates = (await ledger.get("/updates"))["updates"]
    return {
        "rollouts": [(r["rollout_id"], r["state"], r["reason"], r["revision"], r["reward"]) for r in rollouts],
        "updates": [(u["update_id"], u["state"], u["commit_no"], u["reserved"]) for u in updates],
        "journal": [(e["event_no"], e["event"]) for e in (await ledger.get("/journal"))["entries"]],
        "counts": await ledger.get("/counts"),
        "active": (await ledger.get(""))["active"],
        "policies": [(p["version"], p["state"]) for p in (await ledger.get("/policies"))["policies"]],
        "workers": [(w["worker_id"], w["state"], w["fenced"]) for w in (await ledger.get("/workers"))["workers"]],
        "failures": len((await ledger.get("/failures"))["failures"]),
        "audit": len((await ledger.get("/audit"))["entries"]),
    }


async def pair(api: Api) -> tuple[Ledger, Ledger]:
    """Two runs in which the very same has happened."""
    runs = []
    for name in NAMES:
        ledger = await Ledger.create(api, name, evidence_retention_seconds=0.001, rewind_commits=0)
        await ledger.worker()
        ids = await ledger.group("g")
        await ledger.group("h")
        ok(await ledger.open("u"))
        assert await ledger.reserve(*ids) == ["reserved", "reserved"]
        ok(await ledger.commit("u"))
        ok(await ledger.open("v"))
        runs.append(ledger)
    return runs[0], runs[1]


async def test_what_happens_in_one_run_stays_there(api: Api) -> None:
    left, right = await pair(api)
    before = await whole(right)
    assert before == await whole(left)
    # Each of these names things that the other run has too.
    assert await left.reserve("h:0", "h:1", update="v", after=1) == ["reserved", "reserved"]
    ok(await left.call("POST", "/updates/v/abort", {"owner": "t-1", "reason": "x", "quarantine": True}))
    ok(await left.call("POST", "/rollouts/release", {"update_id": "v", "reason": "update_aborted"}))
    body = {"group_id": "h", "ruleset_id": "other", "ruleset_hash": left.hashes[0]}
    rewards = [{"rollout_id": f"h:{i}", "value": 9.0} for i in range(2)]
    ok(await left.call("POST", "/rewards/rescore", body | {"rewards": rewards}))
    await left.activate(1, 0)
    ok(await left.call("POST", "/workers/w/fence", {"reason": "x"}))
    ok(await left.call("PUT", "/rewinds/r", {"to_commit_no": 1, "reason": "x"}))
    assert await whole(right) == before
    assert await whole(left) != before
    # Retention by the settings of each run alone.
    assert await retention.sweep(api.database) == {"left": 2, "right": 2}


async def test_a_token_of_one_run_sees_nothing_of_another(api: Api) -> None:
    left, right = await pair(api)
    await api.token("viewer-left", "viewer", "left")
    assert [r["run_id"] for r in ok(await api.call("GET", "/runs", who="viewer-left"))["runs"]] == ["left"]
    ok(await left.call("GET", "/rollouts", who="viewer-left"))
    for path in ("", "/rollouts", "/rollouts/g:0", "/audit", "/diagnosis", "/lineage?version=0", "/updates/u"):
        refused(await right.call("GET", path, who="viewer-left"), 403, "forbidden")
