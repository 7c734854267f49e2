"""Release from quarantine: what passes the arrival checks now comes out, and everything else says why it stays."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from tests.api.ledger import Api, H, Json, Ledger, ok, refused


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, **settings)
    await ledger.worker()
    return ledger


async def release(ledger: Ledger, *rollout_ids: str, **named: Any) -> list[Json]:
    body = named or {"rollout_ids": rollout_ids}
    verdicts: list[Json] = ok(await ledger.call("POST", "/rollouts/release", body))["verdicts"]
    return verdicts


def said(verdicts: list[Json]) -> list[tuple[str, str, str | None, str | None]]:
    return [(v["rollout_id"], v["verdict"], v["state"], v["reason"]) for v in verdicts]


async def put(ledger: Ledger, rollout_id: str = "r", **changes: Any) -> str | None:
    """One rollout in a group of its own; answers the reason that it was refused for."""
    [verdict] = await ledger.submit(ledger.rollout(rollout_id, f"g-{rollout_id}", **changes))
    reason: str | None = verdict["reason"]
    return reason


@pytest.fixture
async def loose(api: Api) -> Ledger:
    """A run whose groups stand by one usable member of two, so that a quarantined one does not end them."""
    return await ledger_of(api, min_usable=1)


async def test_policy_unknown_stays_until_the_version_is_known_and_acked(loose: Ledger) -> None:
    """It then waits for the switch like any candidate: first it was never acked, then it is ahead of the pointer."""
    content = b"weights 1"
    ok(await loose.prepare(1, 0, content))  # only to learn its hash
    spans = [{"version": 1, "artifact_hash": loose.hashes[1], "start": 0, "end": 6}]
    other = await ledger_of(loose.api, min_usable=1, run_id="other")
    assert await put(other, spans=spans) == "policy_unknown"
    assert said(await release(other, "r")) == [("r", "stays", "quarantined", "policy_unknown")]
    ok(await other.prepare(1, 0, content))
    assert said(await release(other, "r")) == [("r", "stays", "quarantined", "worker_not_acked")]
    ok(await other.upload(1, content))
    ok(await other.call("POST", "/policies/1/commit"))
    await other.ack("w", 1)
    assert said(await release(other, "r")) == [("r", "stays", "quarantined", "future_policy")]
    assert await other.state("r") == ("quarantined", "policy_unknown", 1)
    ok(await other.activation(1))
    assert said(await release(other, "r")) == [("r", "released", "generated", None)]
    assert await other.state("r") == ("generated", None, 2)


async def test_policy_identity_conflict_stays_for_good(loose: Ledger) -> None:
    wrong = [{"version": 0, "artifact_hash": "0" * 64, "start": 0, "end": 6}]
    assert await put(loose, spans=wrong) == "policy_identity_conflict"
    assert said(await release(loose, "r")) == [("r", "stays", "quarantined", "policy_identity_conflict")]
    assert await loose.state("r") == ("quarantined", "policy_identity_conflict", 1)


async def test_worker_not_acked_comes_out_once_the_worker_acked(loose: Ledger) -> None:
    await loose.worker("w", "w-2", ack=False)
    assert await put(loose, incarnation="w-2") == "worker_not_acked"
    assert said(await release(loose, "r")) == [("r", "stays", "quarantined", "worker_not_acked")]
    await loose.ack("w", 0, incarnation="w-2")
    [verdict] = await release(loose, "r")
    assert (verdict["verdict"], verdict["state"], verdict["revision"]) == ("released", "generated", 2)
    history = (await loose.get("/rollouts/r/history"))["transitions"]
    assert [(t["event"], t["from_state"], t["to_state"], t["reason"], t["actor"]) for t in history[1:]] == [
        ("quarantine", "generated", "quarantined", "worker_not_acked", "admin:admin"),
        ("release", "quarantined", "generated", None, "admin:admin"),
    ]  # fmt: skip


async def test_policy_withdrawn_stays_for_good(loose: Ledger) -> None:
    """What was made from a commit that a rewind undid is quarantined, by the rewind and on arrival."""
    await loose.group("used")
    ok(await loose.open())
    await loose.reserve("used:0", "used:1")
    ok(await loose.commit())
    ok(await loose.prepare(1, 0, b"w", updates=["u"]))
    ok(await loose.upload(1))
    ok(await loose.call("POST", "/policies/1/commit"))
    ok(await loose.activation(1))
    await loose.ack("w", 1)
    assert await put(loose, "before", version=1) is None
    await loose.reward("before", 2.0)
    ok(await loose.call("PUT", "/rewinds/back", {"to_commit_no": 0, "reason": "restored"}))
    assert await loose.state("before") == ("quarantined", "policy_withdrawn", 2)
    assert await put(loose, "after", version=1) == "policy_withdrawn"
    assert said(await release(loose, "before", "after")) == [
        ("after", "stays", "quarantined", "policy_withdrawn"), ("before", "stays", "quarantined", "policy_withdrawn"),
    ]  # fmt: skip


async def test_candidate_not_activated_comes_out_when_the_version_is_tried_again(loose: Ledger) -> None:
    """A failed activation, unlike one that was given up, may be retried; what was made with its candidate waits."""
    await loose.worker("v")
    await loose.publish(1, 0)
    ok(await loose.activation(1))
    await loose.ack("w", 1)
    assert await put(loose, version=1) is None
    ok(await loose.call("POST", "/workers/v/drain", {"incarnation": "v-1"}))
    assert (await loose.get(""))["active"]["version"] == 1  # v left: the ack of w was the last one
    await loose.publish(2, 1)
    await loose.worker("x")
    ok(await loose.activation(2, required_workers=["x"]))
    await loose.ack("w", 2)
    assert await put(loose, "s", version=2) is None
    ok(await loose.call("POST", "/workers/x/drain", {"incarnation": "x-1"}))  # the last required one leaves: failed
    assert await loose.state("s") == ("quarantined", "candidate_not_activated", 1)
    assert await put(loose, "late", version=2) == "candidate_not_activated"
    stays = [(r, "stays", "quarantined", "candidate_not_activated") for r in ("late", "s")]
    assert said(await release(loose, "s", "late")) == stays
    ok(await loose.activation(2, "again"))
    assert said(await release(loose, "s", "late")) == [(r, "released", "generated", None) for r in ("late", "s")]
    await loose.ack("w", 2)
    assert (await loose.get(""))["active"]["version"] == 2


async def test_a_version_that_was_overtaken_can_vouch_for_nothing_any_more(loose: Ledger) -> None:
    """It can never become active: what it made would wait for its switch for ever."""
    await loose.publish(1, 0)
    await loose.ack("w", 1)
    await loose.activate(2, 1)
    assert await put(loose, version=1) == "candidate_not_activated"
    assert said(await release(loose, "r")) == [("r", "stays", "quarantined", "candidate_not_activated")]


async def test_future_policy_comes_out_after_the_switch(loose: Ledger) -> None:
    await loose.publish(1, 0)
    await loose.ack("w", 1)
    assert await put(loose, version=1) == "future_policy"
    assert said(await release(loose, "r")) == [("r", "stays", "quarantined", "future_policy")]
    ok(await loose.activation(1))
    await loose.ack("w", 1)
    assert said(await release(loose, "r")) == [("r", "released", "generated", None)]
    await loose.reward("r")
    await loose.submit(loose.rollout("s", "g-r", 1, version=1))
    await loose.reward("s")
    ok(await loose.open(version=1))
    assert [c["rollout_id"] for c in (await loose.candidates())["rollouts"]] == ["r", "s"]
    assert await loose.reserve(("r", 3), "s") == ["reserved"] * 2


async def test_a_stale_one_in_quarantine_stays(api: Api) -> None:
    ledger = await ledger_of(api, min_usable=1, max_lag=0, stale_to="quarantined")
    await ledger.activate(1, 0)
    assert await put(ledger) == "stale_policy"
    assert said(await release(ledger, "r")) == [("r", "stays", "quarantined", "stale_policy")]


@pytest.mark.parametrize(
    ("reward", "state"),
    [(None, "generated"), ({"value": 1.0}, "rewarded"), ({"value": None, "status": "timeout"}, "reward_failed")],
)
async def test_it_goes_where_its_stored_reward_has_it(loose: Ledger, reward: Json | None, state: str) -> None:
    await loose.worker("w", "w-2", ack=False)
    await put(loose, incarnation="w-2")
    if reward is not None:
        assert (await loose.reward("r", **reward))["state"] == "quarantined"
    await loose.ack("w", 0, incarnation="w-2")
    assert said(await release(loose, "r")) == [("r", "released", state, None)]


async def test_all_that_one_update_quarantined_for_one_reason(loose: Ledger) -> None:
    """By drift at reserve, or with an aborted update; what others quarantined, or for other reasons, stays."""
    drifted, held, other = [await loose.group(name) for name in ("drifted", "held", "other")]
    ok(await loose.open())
    ok(await loose.open("v"))
    assert await loose.reserve(*drifted, shift=1.0) == ["policy_drift"] * 2
    assert await loose.reserve(*held) == ["reserved"] * 2
    assert await loose.reserve(*other, update="v", shift=1.0) == ["policy_drift"] * 2
    body = {"owner": "t-1", "reason": "NaN", "quarantine": True}
    ok(await loose.call("POST", "/updates/u/abort", body))
    assert await release(loose, update_id="u", reason="worker_not_acked") == []
    unknown = {"update_id": "none", "reason": "policy_drift"}
    refused(await loose.call("POST", "/rollouts/release", unknown), 404, "update_unknown")
    assert said(await release(loose, update_id="u", reason="policy_drift")) == [
        (r, "released", "rewarded", None) for r in drifted
    ]
    assert said(await release(loose, update_id="u", reason="update_aborted")) == [
        (r, "released", "rewarded", None) for r in held
    ]
    assert await loose.state(other[0]) == ("quarantined", "policy_drift", 2)
    assert await release(loose, update_id="u", reason="policy_drift") == []
    ok(await loose.open("w"))
    named = [*((r, 3) for r in drifted), *((r, 4) for r in held)]
    assert await loose.reserve(*named, update="w") == ["reserved"] * 4


async def test_what_is_quarantined_again_by_somebody_else_is_no_more_the_first_update_s(loose: Ledger) -> None:
    ids = await loose.group("g")
    ok(await loose.open())
    ok(await loose.open("v"))
    await loose.reserve(*ids, shift=1.0)
    await release(loose, *ids)
    assert await loose.reserve(*((r, 3) for r in ids), update="v", shift=1.0) == ["policy_drift"] * 2
    assert await release(loose, update_id="u", reason="policy_drift") == []
    assert len(await release(loose, update_id="v", reason="policy_drift")) == 2


async def test_siblings_that_fell_with_a_group_come_along(ledger: Ledger) -> None:
    """One of two drifts, so that both fall; releasing the one opens the group again for both."""
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
    assert [await ledger.state(r) for r in ids] == [
        ("offline", "group_refused", 2), ("quarantined", "policy_drift", 2),
    ]  # fmt: skip
    assert said(await release(ledger, "g:1")) == [
        ("g:0", "released", "rewarded", None), ("g:1", "released", "rewarded", None),
    ]  # fmt: skip
    ok(await ledger.open("v"))
    assert await ledger.reserve(("g:0", 3), ("g:1", 3), update="v") == ["reserved"] * 2


async def test_a_refused_group_can_be_released_by_any_of_its_members(ledger: Ledger) -> None:
    """It is judged anew: where it is as hopeless as before, it is set aside again."""
    await ledger.worker("w", "w-2", ack=False)
    await ledger.submit(ledger.rollout("a"), ledger.rollout("b", index=1, incarnation="w-2"))
    assert await ledger.state("a") == ("offline", "group_refused", 1)
    assert said(await release(ledger, "a")) == [("a", "set_aside", "offline", "group_refused")]
    await ledger.ack("w", 0, incarnation="w-2")
    assert said(await release(ledger, "b")) == [
        ("a", "released", "generated", None),
        ("b", "released", "generated", None),
    ]


async def test_one_that_stays_brings_no_sibling_back(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("a"), ledger.rollout("b", index=1, version=9))
    before = await ledger.state("a")
    assert said(await release(ledger, "b")) == [("b", "stays", "quarantined", "policy_unknown")]
    assert await ledger.state("a") == before == ("offline", "group_refused", 1)


async def test_what_belongs_to_a_spent_group_is_set_aside(api: Api) -> None:
    quick = await ledger_of(api, group_size=3, group_deadline_seconds=0.1)
    await quick.worker("v", ack=False)
    await quick.submit(quick.rollout("a"), quick.rollout("b", index=1))
    await quick.reward("a")
    await quick.reward("b")
    ok(await quick.open())
    await quick.candidates(groups=1, wait=5)
    assert await quick.reserve("a", "b") == ["reserved"] * 2
    ok(await quick.commit())
    [late] = await quick.submit(quick.rollout("late", index=2, worker_id="v", incarnation="v-1"))
    assert (late["state"], late["reason"]) == ("quarantined", "worker_not_acked")
    await quick.ack("v", 0)
    [verdict] = await release(quick, "late")
    assert (verdict["verdict"], verdict["state"], verdict["reason"], verdict["revision"]) == (
        "set_aside", "offline", "group_spent", 2,
    )  # fmt: skip
    history = (await quick.get("/rollouts/late/history"))["transitions"]
    assert [(t["event"], t["from_state"], t["to_state"], t["reason"]) for t in history[-1:]] == [
        ("set_aside", "quarantined", "offline", "group_spent")
    ]


async def test_what_is_not_in_quarantine_cannot_be_released(api: Api) -> None:
    ledger = await ledger_of(api, max_lag=0, min_usable=1)
    await ledger.group("rewarded")
    reserved, consumed = await ledger.group("reserved"), await ledger.group("consumed")
    ok(await ledger.open())
    await ledger.reserve(*consumed)
    ok(await ledger.commit())
    ok(await ledger.open("v"))
    await ledger.reserve(*reserved, update="v", after=1)
    await ledger.activate(1, 0)
    assert await put(ledger, "stale") == "stale_policy"
    before = await ledger.api.rows("SELECT * FROM rollouts ORDER BY rollout_id")
    assert said(await release(ledger, "rewarded:0", "reserved:0", "consumed:0", "stale", "none", "none")) == [
        ("consumed:0", "not_releasable", "consumed", None), ("none", "missing_rollout", None, None),
        ("reserved:0", "not_releasable", "reserved", None), ("rewarded:0", "not_releasable", "rewarded", None),
        ("stale", "not_releasable", "offline", "stale_policy"),
    ]  # fmt: skip
    assert await ledger.api.rows("SELECT * FROM rollouts ORDER BY rollout_id") == before


async def test_sent_again_a_release_changes_nothing(loose: Ledger) -> None:
    await loose.worker("w", "w-2", ack=False)
    await put(loose, incarnation="w-2")
    await loose.ack("w", 0, incarnation="w-2")
    await release(loose, "r")
    assert said(await release(loose, "r")) == [("r", "not_releasable", "generated", None)]
    assert await loose.state("r") == ("generated", None, 2)


async def test_without_its_tokens_it_stays(loose: Ledger) -> None:
    await loose.worker("w", "w-2", ack=False)
    await put(loose, incarnation="w-2")
    await loose.ack("w", 0, incarnation="w-2")
    async with loose.api.database.engine.begin() as connection:
        await connection.execute(
            text("UPDATE rollout_evidence SET token_ids = NULL, action_mask = NULL, behavior_log_probs = NULL")
        )
    assert said(await release(loose, "r")) == [("r", "stays", "quarantined", "beyond_retention")]


@pytest.mark.parametrize(
    "body",
    [{}, {"update_id": "u"}, {"reason": "policy_drift"}, {"rollout_ids": []}, {"rollout_ids": ["r"], "update_id": "u"},
     {"rollout_ids": ["r"], "update_id": "u", "reason": "policy_drift"}, {"rollout_ids": ["r"], "reason": "x"}],
)  # fmt: skip
async def test_either_ids_or_an_update_with_a_reason(loose: Ledger, body: Json) -> None:
    response = await loose.call("POST", "/rollouts/release", body)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")


async def test_of_several_faults_the_first_in_the_order_is_the_reason(api: Api) -> None:
    """Each pair of faults in one rollout, one span each: whichever comes first in the text, the order decides."""
    ledger = await ledger_of(api, max_lag=2, min_usable=1)
    await ledger.worker("v")
    used = await ledger.group("used")
    ok(await ledger.open())
    await ledger.reserve(*used)
    ok(await ledger.commit())
    for version in (1, 2, 3):
        await ledger.publish(version, version - 1)
        ok(await ledger.activation(version, required_workers=["w"]))
        await ledger.ack("w", version)
    for version, updates in ((4, ["u"]), (5, []), (6, [])):
        content = f"weights {version}".encode()
        ok(await ledger.prepare(version, 3, content, updates=updates))
        ok(await ledger.upload(version, content))
        ok(await ledger.call("POST", f"/policies/{version}/commit"))
        await ledger.ack("v", version)
    await ledger.ack("v", 3)
    ok(await ledger.call("PUT", "/rewinds/back", {"to_commit_no": 0, "reason": "restored"}))
    ok(await ledger.activation(5, required_workers=["w"]))
    ok(await ledger.call("POST", "/activations/act-5/give-up", {"reason": "test"}))
    faults = {
        "policy_unknown": (99, H),
        "policy_identity_conflict": (3, H),
        "policy_withdrawn": (4, ledger.hashes[4]),
        "worker_not_acked": (1, ledger.hashes[1]),
        "candidate_not_activated": (5, ledger.hashes[5]),
        "future_policy": (6, ledger.hashes[6]),
        "stale_policy": (0, ledger.hashes[0]),
    }
    names = list(faults)
    pairs = [(a, b) for n, a in enumerate(names) for b in names[n:]]
    bodies = []
    for a, b in pairs:
        for n, (first, second) in enumerate(((a, b), (b, a))):
            spans = [
                {"version": version, "artifact_hash": artifact, "start": start, "end": end}
                for (version, artifact), start, end in ((faults[first], 0, 4), (faults[second], 4, 6))
            ]
            name = f"{a}.{b}.{n}"
            body = ledger.rollout(name, f"g-{name}", spans=spans, worker_id="v", incarnation="v-1")
            bodies.append(body)
    verdicts = await ledger.submit(*bodies)
    assert [v["verdict"] for v in verdicts] == ["accepted"] * len(bodies)
    got = {v["rollout_id"]: v["reason"] for v in verdicts}
    assert got == {name: name.split(".")[0] for name in got}
