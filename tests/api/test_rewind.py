"""Rewind: what came after a restored checkpoint's commit is undone, once, and nothing else is."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from tests.api.ledger import Api, Json, Ledger, ok, refused


async def commit(ledger: Ledger, update: str, group: str, after: int, version: int = 0) -> int:
    """One update over one group, from open to commit; answers its number."""
    ids = await ledger.group(group, version)
    ok(await ledger.open(update, version))
    assert set(await ledger.reserve(*ids, update=update, after=after)) == {"reserved"}
    body = {"owner": "t-1", "after_commit_no": after}
    return int(ok(await ledger.call("POST", f"/updates/{update}/commit", body))["commit_no"])


async def publish(ledger: Ledger, version: int, updates: list[str], parent: int = 0, ack: bool = True) -> None:
    """Prepares and commits a version, and activates it unless nobody acks."""
    content = f"weights {version}".encode()
    ok(await ledger.prepare(version, parent, content, updates=updates))
    ok(await ledger.upload(version, content))
    ok(await ledger.call("POST", f"/policies/{version}/commit"))
    if ack:
        ok(await ledger.activation(version))
        assert (await ledger.ack("w", version))["matching"]
        assert (await ledger.get(""))["active"]["version"] == version


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, **settings)
    await ledger.worker()
    return ledger


async def rewind(ledger: Ledger, to: int, rewind_id: str = "back", **more: Any) -> Json:
    body = {"to_commit_no": to, "reason": "the checkpoint was restored"} | more
    return ok(await ledger.call("PUT", f"/rewinds/{rewind_id}", body))


async def states(ledger: Ledger, *ids: str) -> list[tuple[str, str | None, int]]:
    return [await ledger.state(rollout_id) for rollout_id in ids]


async def test_what_later_updates_consumed_comes_back_once(ledger: Ledger) -> None:
    await commit(ledger, "u1", "g1", 0)
    await commit(ledger, "u2", "g2", 1)
    answer = await rewind(ledger, 1)
    assert answer["rewound_updates"] == ["u2"]
    assert (answer["released"], answer["quarantined"]) == (2, 0)
    assert (answer["withdrawn_versions"], answer["restoring"], answer["no_restorable_version"]) == ([], None, False)
    assert await states(ledger, "g1:0", "g2:0", "g2:1") == [
        ("consumed", None, 3), ("rewarded", None, 4), ("rewarded", None, 4),
    ]  # fmt: skip
    assert (await ledger.get(""))["last_commit_no"] == 1
    assert (await ledger.get("/updates/u2"))["state"] == "rewound"
    # Sent again it changes nothing; the zombie that still thinks of u2 as the last commit cannot go on.
    assert await rewind(ledger, 1) == answer
    refused(await ledger.call("PUT", "/rewinds/back", {"to_commit_no": 0, "reason": "x"}), 409, "rewind_conflict")
    ok(await ledger.open("u3"))
    refused(await ledger.try_reserve(("g2:0", 4), ("g2:1", 4), update="u3", after=2), 409, "line_conflict")
    assert await ledger.reserve(("g2:0", 4), ("g2:1", 4), update="u3", after=1) == ["reserved", "reserved"]
    view = ok(await ledger.call("POST", "/updates/u3/commit", {"owner": "t-1", "after_commit_no": 1}))
    assert view["commit_no"] == 3
    # A commit that was answered stays answered, as what it is now.
    again = ok(await ledger.call("POST", "/updates/u2/commit", {"owner": "t-1", "after_commit_no": 1}))
    assert (again["state"], again["commit_no"]) == ("rewound", 2)
    # The commit that no longer is on the line cannot be gone back to.
    body = {"to_commit_no": 2, "reason": "x"}
    told = refused(await ledger.call("PUT", "/rewinds/other", body), 409, "commit_rewound")
    assert (told["field"], told["detail"]) == (
        "to_commit_no",
        "commit 2 was undone (rewind back: the checkpoint was restored); the surviving line ends at 3",
    )
    # One that was never made is another mistake, before and after rewinds.
    told = refused(await ledger.call("PUT", "/rewinds/other", body | {"to_commit_no": 4}), 404, "commit_unknown")
    assert (told["field"], told["detail"]) == ("to_commit_no", "the run has made 3 commits, no commit 4")


async def test_what_was_consumed_may_stay_spent(ledger: Ledger) -> None:
    await commit(ledger, "u1", "g1", 0)
    answer = await rewind(ledger, 0, consumed="spent")
    assert answer == (await ledger.get("/rewinds"))["rewinds"][0]
    assert answer["consumed"] == "spent"
    assert (answer["rewound_updates"], answer["released"]) == (["u1"], 0)
    assert await ledger.state("g1:0") == ("consumed", None, 3)
    [late] = await ledger.submit(ledger.rollout("late", "g1", 0, attempt=0) | {"rollout_id": "g1:0"})
    assert late["verdict"] == "duplicate"


async def test_open_updates_are_fenced_and_what_they_held_is_free(ledger: Ledger) -> None:
    ids = await ledger.group("g")
    ok(await ledger.open("u"))
    assert await ledger.reserve(*ids) == ["reserved", "reserved"]
    answer = await rewind(ledger, 0)
    assert answer["fenced_updates"] == ["u"]
    assert (await ledger.get("/updates/u"))["state"] == "fenced"
    refused(
        await ledger.call("POST", "/updates/u/commit", {"owner": "t-1", "after_commit_no": 0}), 409, "update_fenced"
    )
    assert await ledger.reserve(*ids, update="u") == ["update_fenced", "update_fenced"]
    assert await states(ledger, *ids) == [("rewarded", None, 3), ("rewarded", None, 3)]


async def test_discards_left_overs_and_refusals_come_back(api: Api) -> None:
    """Group `a` is spent with a discard and a left-over that never got a reward; group `b` falls by drift."""
    ledger = await ledger_of(api, group_size=3, min_usable=2)
    ok(await ledger.open("u"))
    await ledger.submit(*(ledger.rollout(f"a:{i}", "a", i) for i in range(3)))
    for i in range(2):
        await ledger.reward(f"a:{i}")
    await ledger.reward("a:2", None, status="timeout")
    b = await ledger.group("b", size=3)
    assert await ledger.reserve("a:0", "a:1") == ["reserved", "reserved"]
    assert await ledger.reserve(*b, shift=0.5, confirm_drift=True) == ["policy_drift"] * 3
    body = {"owner": "t-1", "after_commit_no": 0, "discards": [{"rollout_id": "a:1", "reason": "no advantage"}]}
    ok(await ledger.call("POST", "/updates/u/commit", body))
    assert await states(ledger, "a:0", "a:1", "a:2") == [
        ("consumed", None, 3), ("offline", "no advantage", 3), ("offline", "group_spent", 2),
    ]  # fmt: skip
    answer = await rewind(ledger, 0)
    assert answer["released"] == 6
    assert await states(ledger, "a:0", "a:1", "a:2", *b) == [
        ("rewarded", None, 4), ("rewarded", None, 4), ("reward_failed", None, 3), *[("rewarded", None, 3)] * 3,
    ]  # fmt: skip
    ok(await ledger.open("v"))
    offered = {r["rollout_id"] for r in (await ledger.candidates("v"))["rollouts"]}
    assert offered == {"a:0", "a:1", *b}


async def test_a_quarantine_that_was_there_before_the_group_was_spent_stays(api: Api) -> None:
    ledger = await ledger_of(api, group_size=3, min_usable=2)
    unknown = {"spans": [{"version": 9, "artifact_hash": ledger.hashes[0], "start": 0, "end": 6}]}
    await ledger.submit(*(ledger.rollout(f"g:{i}", "g", i, **(unknown if i == 2 else {})) for i in range(3)))
    assert await ledger.state("g:2") == ("quarantined", "policy_unknown", 1)
    for i in range(2):
        await ledger.reward(f"g:{i}")
    ok(await ledger.open())
    await ledger.reserve("g:0", "g:1")
    ok(await ledger.call("POST", "/updates/u/commit", {"owner": "t-1", "after_commit_no": 0}))
    assert await ledger.state("g:2") == ("offline", "group_spent", 2)
    assert (await rewind(ledger, 0))["released"] == 2
    assert await ledger.state("g:2") == ("offline", "group_spent", 2)


async def test_versions_of_rewound_updates_are_withdrawn_and_an_older_one_is_restored(ledger: Ledger) -> None:
    await commit(ledger, "u1", "g1", 0)
    await publish(ledger, 1, ["u1"])
    fresh = await ledger.group("fresh", 1)
    await commit(ledger, "u2", "g2", 1, 1)
    await publish(ledger, 2, ["u2"], parent=1)
    await ledger.submit(ledger.rollout("new:0", "new", 0, 2), ledger.rollout("new:1", "new", 1, 2))
    await publish(ledger, 3, [], parent=2, ack=False)
    answer = await rewind(ledger, 1)
    assert answer["withdrawn_versions"] == [2, 3]
    # g2 came back from consumed; both of new were made with version 2.
    assert (answer["released"], answer["quarantined"]) == (2, 2)
    restoring = answer["restoring"]
    assert (restoring["version"], restoring["state"], restoring["parent_version"]) == (4, "committed", 1)
    assert (restoring["artifact_hash"], restoring["lag_clock"]) == (ledger.hashes[1], 1)
    # What was made with version 2 cannot be used; what was made with 1 can.
    assert await states(ledger, "new:0", *fresh) == [
        ("quarantined", "policy_withdrawn", 1), ("rewarded", None, 1), ("rewarded", None, 1),
    ]  # fmt: skip
    assert [p["state"] for p in (await ledger.get("/policies"))["policies"]] == [
        "retired", "retired", "withdrawn", "withdrawn", "committed",
    ]  # fmt: skip
    refused(await ledger.open("x", 2), 409, "policy_withdrawn")
    [late] = await ledger.submit(ledger.rollout("later", "later", 0, 2))
    assert (late["state"], late["reason"]) == ("quarantined", "policy_withdrawn")
    refused(await ledger.prepare(9, 2), 409, "policy_withdrawn")
    refused(await ledger.prepare(9, 1, updates=["u2"]), 409, "update_not_committed")
    # The restoring version becomes active like any other; rollouts of version 1 have lag 0 under it.
    ledger.hashes[4] = restoring["artifact_hash"]
    ok(await ledger.call("POST", "/policies/4/activations", {"activation_id": "restore"}))
    assert (await ledger.ack("w", 4))["matching"]
    assert (await ledger.get(""))["active"]["version"] == 4
    ok(await ledger.open("u3", 4))
    offered = (await ledger.candidates("u3"))["rollouts"]
    assert {(r["rollout_id"], r["lag"]) for r in offered} == {(r, 0) for r in (*fresh, "g2:0", "g2:1")}


async def test_an_open_activation_of_a_withdrawn_version_fails(ledger: Ledger) -> None:
    await commit(ledger, "u1", "g1", 0)
    await publish(ledger, 1, ["u1"], ack=False)
    ok(await ledger.call("POST", "/policies/1/activations", {"activation_id": "a1"}))
    answer = await rewind(ledger, 0)
    assert (answer["withdrawn_versions"], answer["restoring"]) == ([1], None)
    activation = await ledger.get("/activations/a1")
    assert (activation["state"], activation["reason"].split(":")[0]) == ("failed", "policy_withdrawn")
    assert (await ledger.ack("w", 1))["reason"] == "policy_withdrawn"
    assert not (await ledger.get("/workers"))["workers"][0]["fenced"]


async def test_what_the_failed_candidate_made_is_counted_among_the_quarantined(ledger: Ledger) -> None:
    await ledger.worker("slow")
    await commit(ledger, "u1", "g1", 0)
    await publish(ledger, 1, ["u1"], ack=False)
    ok(await ledger.activation(1))
    assert (await ledger.ack("w", 1))["matching"]
    await ledger.group("early", 1)
    answer = await rewind(ledger, 0)
    assert (answer["withdrawn_versions"], answer["released"], answer["quarantined"]) == ([1], 2, 2)
    assert await states(ledger, "early:0", "early:1") == [("quarantined", "candidate_not_activated", 2)] * 2


async def test_stale_against_a_withdrawn_version_comes_back(api: Api) -> None:
    ledger = await ledger_of(api, max_lag=0, group_size=1)
    await commit_single(ledger, "u1", "g1")
    await publish(ledger, 1, ["u1"])
    [stale] = await ledger.submit(ledger.rollout("old", "old", 0, 0))
    assert (stale["state"], stale["reason"]) == ("offline", "stale_policy")
    answer = await rewind(ledger, 0)
    assert answer["withdrawn_versions"] == [1]
    assert await ledger.state("old") == ("generated", None, 2)


async def commit_single(ledger: Ledger, update: str, group: str) -> None:
    ids = await ledger.group(group, size=1)
    ok(await ledger.open(update))
    assert await ledger.reserve(*ids, update=update) == ["reserved"]
    ok(await ledger.call("POST", f"/updates/{update}/commit", {"owner": "t-1", "after_commit_no": 0}))


async def test_further_back_than_the_run_keeps_is_refused(api: Api) -> None:
    ledger = await ledger_of(api, rewind_commits=1)
    await commit(ledger, "u1", "g1", 0)
    await commit(ledger, "u2", "g2", 1)
    body = {"to_commit_no": 0, "reason": "x"}
    refused(await ledger.call("PUT", "/rewinds/r", body), 409, "beyond_retention")
    assert (await rewind(ledger, 1))["rewound_updates"] == ["u2"]
    assert [r["rewind_id"] for r in (await ledger.get("/rewinds"))["rewinds"]] == ["back"]


async def test_nothing_restorable_is_said(api: Api) -> None:
    """A withdrawn active version whose only ancestor left no files behind."""
    ledger = await ledger_of(api)
    await commit(ledger, "u1", "g1", 0)
    await publish(ledger, 1, ["u1"])
    async with api.database.engine.begin() as connection:
        await connection.execute(text("UPDATE policy_versions SET kind = 'stream' WHERE version = 0"))
    answer = await rewind(ledger, 0)
    assert (answer["restoring"], answer["no_restorable_version"]) == (None, True)


async def test_a_worker_that_comes_back_before_the_restoring_version_is_active_can_confirm_it(ledger: Ledger) -> None:
    await commit(ledger, "u1", "g1", 0)
    await publish(ledger, 1, ["u1"])
    restoring = (await rewind(ledger, 0))["restoring"]
    first = (await ledger.get("/diagnosis"))["blockers"][0]
    assert (first["code"], first["next_step"]) == ("active_withdrawn", "Open an activation of version 2.")
    await ledger.worker("w", "w-2", ack=False)
    verdict = await ledger.ack("w", 1, incarnation="w-2")
    assert (verdict["matching"], verdict["reason"]) == (False, "policy_withdrawn")
    ledger.hashes[2] = restoring["artifact_hash"]
    ok(await ledger.activation(2))
    assert (await ledger.ack("w", 2, incarnation="w-2"))["matching"]
    assert (await ledger.get(""))["active"]["version"] == 2
    assert "active_withdrawn" not in {b["code"] for b in (await ledger.get("/diagnosis"))["blockers"]}
