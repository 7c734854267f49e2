"""Lineage: from an update to everything it came from, and from a version or a ruleset to the updates that used it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.ledger import Api, H, Json, Ledger, ok, refused


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, **settings)
    await ledger.worker()
    return ledger


async def bind(ledger: Ledger, update: str, *ids: str, version: int = 0, after: int = 0) -> None:
    ok(await ledger.open(update, version))
    assert set(await ledger.reserve(*ids, update=update, after=after)) == {"reserved"}


async def uses(ledger: Ledger, query: str) -> list[tuple[str, str, int]]:
    found = (await ledger.get(f"/lineage?{query}"))["uses"]
    return [(u["update_id"], u["state"], u["rollouts"]) for u in found]


async def test_a_member_has_everything_that_it_came_from(ledger: Ledger) -> None:
    await ledger.activate(1, 0)
    spans = [
        {"version": 0, "artifact_hash": ledger.hashes[0], "start": 0, "end": 4},
        {"version": 1, "artifact_hash": ledger.hashes[1], "start": 4, "end": 6},
    ]
    ids = await ledger.group("g", spans=spans)
    ok(await ledger.open(version=1))
    body = {
        "owner": "t-1",
        "after_commit_no": 0,
        "rollouts": [
            {"rollout_id": r, "revision": 1, "use": use, "current_log_probs": [None] * 3 + [-0.5, -0.5, -0.75]}
            for r, use in zip(ids, ("chosen", "rejected"), strict=True)
        ],
    }
    ok(await ledger.call("POST", "/updates/u/reserve", body))
    ok(await ledger.commit())
    ok(await ledger.prepare(2, 1, updates=["u"]))
    ok(await ledger.prepare(3, 2, b"other", updates=["u"]))
    lineage = await ledger.get("/updates/u/lineage")
    assert lineage["update"] == await ledger.get("/updates/u")
    assert (lineage["made_versions"], lineage["refusals"]) == ([2, 3], [])
    first, second = lineage["members"]
    drift = {k: first.pop(k) for k in list(first) if k.startswith("drift")}
    assert first == {
        "rollout_id": "g:0",
        "group_id": "g",
        "outcome": "consumed",
        "use": "chosen",
        "revision": 1,
        "policies": [
            {"version": 0, "artifact_hash": ledger.hashes[0]},
            {"version": 1, "artifact_hash": ledger.hashes[1]},
        ],
        "worker_id": "w",
        "incarnation": "w-1",
        "ruleset_id": "rules",
        "ruleset_hash": H,
        "reward": 0.0,
        "lag": 1,
        "would_refuse": None,
    }
    assert (round(drift["drift"], 9), drift["drift_max"]) == (round(0.25 / 3, 9), 0.25)
    assert drift["drift_outside_share"] == 0.0
    assert 0 < drift["drift_sample_size"] < 1
    assert drift["drift_k3"] > 0
    assert (second["rollout_id"], second["use"], second["reward"]) == ("g:1", "rejected", 1.0)


async def test_every_outcome_of_a_member(api: Api) -> None:
    ledger = await ledger_of(api, min_usable=1)
    outcomes: Json = {}
    for update, how in (("kept", None), ("done", "commit"), ("freed", "abort"), ("shut", "quarantine")):
        ids = await ledger.group(f"g-{update}")
        await bind(ledger, update, *ids)
        if how == "commit":
            discards = [{"rollout_id": ids[1], "reason": "no advantage"}]
            ok(await ledger.commit(update, discards=discards))
        elif how is not None:
            body = {"owner": "t-1", "reason": "x", "quarantine": how == "quarantine"}
            ok(await ledger.call("POST", f"/updates/{update}/abort", body))
        if how == "commit":
            ok(
                await ledger.call(
                    "PUT", "/rewinds/back", {"to_commit_no": 0, "reason": "restored", "consumed": "spent"}
                )
            )
    for update in ("kept", "done", "freed", "shut"):
        outcomes[update] = [m["outcome"] for m in (await ledger.get(f"/updates/{update}/lineage"))["members"]]
    assert outcomes == {
        "kept": ["released", "released"],  # the rewind fenced it
        "done": ["consumed", "discarded"],
        "freed": ["released", "released"],
        "shut": ["quarantined", "quarantined"],
    }
    await bind(ledger, "open", *await ledger.group("g-open"))
    assert {m["outcome"] for m in (await ledger.get("/updates/open/lineage"))["members"]} == {"reserved"}


async def test_what_was_refused_is_told_with_the_reason(api: Api) -> None:
    ledger = await ledger_of(api, min_usable=1)
    ids = await ledger.group("g")
    ok(await ledger.open())
    await ledger.reserve(*ids, shift=0.5)
    lineage = await ledger.get("/updates/u/lineage")
    assert lineage["members"] == []
    assert lineage["refusals"] == [
        {"rollout_id": r, "group_id": "g", "verdict": "policy_drift", "lag": 0, "drift": 0.5} for r in ids
    ]


async def test_back_by_version(api: Api) -> None:
    """Every update that bound rollouts with tokens of it, those whose commit was undone and open ones included."""
    ledger = await ledger_of(api, min_usable=1)
    old = [await ledger.group(name) for name in ("old1", "old2", "old3")]
    await ledger.activate(1, 0)
    spans = [
        {"version": 0, "artifact_hash": ledger.hashes[0], "start": 0, "end": 4},
        {"version": 1, "artifact_hash": ledger.hashes[1], "start": 4, "end": 6},
    ]
    both, new = await ledger.group("both", spans=spans), await ledger.group("new", 1)
    await bind(ledger, "u1", *old[0], *new, version=1)
    ok(await ledger.commit("u1"))
    await bind(ledger, "u2", *both, version=1, after=1)
    ok(await ledger.commit("u2", 1))
    await bind(ledger, "u3", *old[1], version=1, after=2)
    ok(await ledger.call("POST", "/updates/u3/abort", {"owner": "t-1", "reason": "x"}))
    assert await uses(ledger, "version=0") == [("u1", "committed", 2), ("u2", "committed", 2)]
    assert await uses(ledger, "version=1") == [("u1", "committed", 2), ("u2", "committed", 2)]
    assert await uses(ledger, "version=17") == []
    ok(await ledger.call("PUT", "/rewinds/back", {"to_commit_no": 1, "reason": "restored"}))
    await bind(ledger, "u4", *old[2], version=1, after=1)
    assert await uses(ledger, "version=0") == [("u1", "committed", 2), ("u2", "rewound", 2), ("u4", "open", 2)]
    [first, *_] = (await ledger.get("/lineage?version=0"))["uses"]
    assert (first["commit_no"], first["policy_version"]) == (1, 1)


async def test_back_by_ruleset(ledger: Ledger) -> None:
    rulesets = (("a", "rules", H), ("b", "rules", "0" * 64), ("c", "other", H))
    for n, (name, ruleset_id, ruleset_hash) in enumerate(rulesets):
        await ledger.submit(*(ledger.rollout(f"{name}:{i}", name, i) for i in range(2)))
        for i in range(2):
            await ledger.reward(f"{name}:{i}", ruleset_id=ruleset_id, ruleset_hash=ruleset_hash)
        await bind(ledger, f"u-{name}", f"{name}:0", f"{name}:1", after=n)
        ok(await ledger.commit(f"u-{name}", n))
    assert await uses(ledger, "ruleset_id=rules") == [("u-a", "committed", 2), ("u-b", "committed", 2)]
    assert await uses(ledger, f"ruleset_id=rules&ruleset_hash={H}") == [("u-a", "committed", 2)]
    assert await uses(ledger, "ruleset_id=other&version=0") == [("u-c", "committed", 2)]
    assert await uses(ledger, "ruleset_id=other&version=1") == []
    assert await uses(ledger, "ruleset_id=none") == []


async def test_the_ruleset_is_the_one_at_the_reservation(ledger: Ledger) -> None:
    """A rescore after an abort does not change what the first update had used."""
    ids = await ledger.group("g")
    await bind(ledger, "u", *ids)
    ok(await ledger.call("POST", "/updates/u/abort", {"owner": "t-1", "reason": "x"}))
    body = {"group_id": "g", "ruleset_id": "new", "ruleset_hash": H,
            "rewards": [{"rollout_id": r, "value": 2.0} for r in ids]}  # fmt: skip
    ok(await ledger.call("POST", "/rewards/rescore", body))
    ok(await ledger.open("v"))
    assert await ledger.reserve(*((r, 4) for r in ids), update="v") == ["reserved"] * 2
    assert {m["ruleset_id"] for m in (await ledger.get("/updates/u/lineage"))["members"]} == {"rules"}
    assert {m["ruleset_id"] for m in (await ledger.get("/updates/v/lineage"))["members"]} == {"new"}


@pytest.mark.parametrize("query", ["", f"ruleset_hash={H}", "version=-1", "version=x", f"version=0&ruleset_hash={H}"])
async def test_something_must_be_asked_for(ledger: Ledger, query: str) -> None:
    refused(await ledger.call("GET", f"/lineage?{query}"), 422, "invalid_request")


async def test_what_is_not_there(ledger: Ledger) -> None:
    refused(await ledger.call("GET", "/updates/none/lineage"), 404, "update_unknown")
    refused(await ledger.api.call("GET", "/runs/none/lineage?version=0"), 404, "run_unknown")
