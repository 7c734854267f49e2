"""From a generated rollout to an active policy, each step as its callers see it."""

from __future__ import annotations

from coordinator.wire.columns import ARROW_MEDIA_TYPE, decode_candidates, encode_rollouts, rollout_columns
from coordinator.wire.rollouts import Rollout
from tests.api.ledger import Ledger, ok


async def test_the_whole_chain(ledger: Ledger) -> None:
    await ledger.worker("v")
    ids = [*await ledger.group("g"), *await ledger.group("h")]
    assert ok(await ledger.open())["state"] == "open"
    found = await ledger.candidates()
    assert [r["rollout_id"] for r in found["rollouts"]] == ids
    assert found["rollouts"][0]["behavior_log_probs"] == [None, None, None, -0.5, -0.5, -0.5]
    assert found["groups"] == ["g", "h"]
    answer = ok(await ledger.try_reserve(*ids, shift=0.01))
    assert [v["verdict"] for v in answer["verdicts"]] == ["reserved"] * 4
    assert {g["group_id"]: g["usable"] for g in answer["groups"]} == {"g": 2, "h": 2}
    discards = [{"rollout_id": "h:0", "reason": "zero_advantage"}, {"rollout_id": "h:1", "reason": "zero_advantage"}]
    committed = ok(await ledger.commit(discards=discards))
    assert (committed["state"], committed["commit_no"]) == ("committed", 1)
    assert await ledger.state("g:0") == ("consumed", None, 3)
    assert await ledger.state("h:0") == ("offline", "zero_advantage", 3)

    ok(await ledger.prepare(1, 0, updates=["u"]))
    opened = ok(await ledger.activation(1))
    assert [(w["worker_id"], w["ack"]) for w in opened["required"]] == [("v", "missing"), ("w", "missing")]
    ok(await ledger.upload(1))
    assert ok(await ledger.call("POST", "/policies/1/commit"))["state"] == "committed"
    downloaded = await ledger.call("GET", "/policies/1/files/a/w.bin")
    assert downloaded.content == b"w"
    first = await ledger.ack("w", 1, digest={"layout": "l", "registered": "f" * 64})
    assert first["activation"]["reason"] == "missing_worker_ack"
    assert first["activation"]["missing_workers"] == ["v"]
    last = await ledger.ack("v", 1)
    assert last["activation"]["activated"]
    assert (await ledger.get(""))["active"] == {"version": 1, "artifact_hash": ledger.hashes[1]}
    states = {p["version"]: p["state"] for p in (await ledger.get("/policies"))["policies"]}
    assert states == {0: "retired", 1: "active"}

    lineage = await ledger.get("/updates/u/lineage")
    assert lineage["made_versions"] == [1]
    assert {m["rollout_id"]: m["outcome"] for m in lineage["members"]} == {
        "g:0": "consumed", "g:1": "consumed", "h:0": "discarded", "h:1": "discarded",
    }  # fmt: skip
    member = lineage["members"][0]
    assert member["policies"] == [{"version": 0, "artifact_hash": ledger.hashes[0]}]
    assert (member["ruleset_id"], member["worker_id"], member["lag"]) == ("rules", "w", 0)
    assert abs(member["drift"] - 0.01) < 1e-9

    entries = (await ledger.get("/journal"))["entries"]
    assert [e["event_no"] for e in entries] == list(range(1, len(entries) + 1))
    assert [e["event"] for e in entries if e["event"].startswith(("update", "policy", "activation"))] == [
        "update.opened", "update.committed", "policy.prepared", "activation.opened", "policy.committed",
        "policy.activated",
    ]  # fmt: skip
    history = (await ledger.get("/rollouts/g:0/history"))["transitions"]
    assert [(t["revision"], t["event"], t["from_state"], t["to_state"]) for t in history] == [
        (0, "arrive", None, "generated"),
        (1, "reward_ready", "generated", "rewarded"),
        (2, "reserve", "rewarded", "reserved"),
        (3, "commit", "reserved", "consumed"),
    ]
    reserve = history[2]
    assert (reserve["lag"], reserve["max_lag"], reserve["max_drift"]) == (0, 4, 0.2)
    assert reserve["actor"] == "admin:admin"
    counts = (await ledger.get("/counts"))["rollouts"]
    assert {state: n for state, n in counts.items() if n} == {"consumed": 2, "offline": 2}


async def test_json_and_arrow_are_the_same_content(ledger: Ledger) -> None:
    body = ledger.rollout("r")
    stream = encode_rollouts(rollout_columns([Rollout.model_validate(body)]))
    headers = {"content-type": ARROW_MEDIA_TYPE}
    first = ok(await ledger.call("POST", "/rollouts", content=stream, headers=headers))["verdicts"]
    assert first[0]["verdict"] == "accepted"
    assert [v["verdict"] for v in await ledger.submit(body)] == ["duplicate"]


async def test_candidates_in_arrow_are_those_in_json(ledger: Ledger) -> None:
    await ledger.group("g")
    ok(await ledger.open())
    in_json = await ledger.candidates()
    response = await ledger.call(
        "POST", "/updates/u/candidates", {"owner": "t-1", "groups": 1}, headers={"accept": ARROW_MEDIA_TYPE}
    )
    assert response.headers["content-type"] == ARROW_MEDIA_TYPE
    assert decode_candidates(response.content).to_model().model_dump(mode="json") == in_json


async def test_every_call_that_changes_something_may_be_sent_again(ledger: Ledger) -> None:
    ids = await ledger.group("g")
    before = (await ledger.open()).status_code, (await ledger.open()).status_code
    assert before == (201, 200)
    assert await ledger.reserve(*ids) == ["reserved"] * 2
    assert await ledger.reserve(*ids) == ["idempotent_retry"] * 2
    first, second = ok(await ledger.commit()), ok(await ledger.commit())
    assert first == second
    assert [(await ledger.prepare(1, 0)).status_code for _ in range(2)] == [201, 200]
    for _ in range(2):
        ok(await ledger.upload(1))
        ok(await ledger.call("POST", "/policies/1/commit"))
    assert [(await ledger.activation(1)).status_code for _ in range(2)] == [201, 200]
    await ledger.ack("w", 1)
    events = len((await ledger.get("/journal"))["entries"])
    await ledger.ack("w", 1)
    assert ok(await ledger.call("POST", "/policies/1/activate"))["activated"]
    # A repeated ack of a version that is active again counts for no activation; nothing else was written.
    assert len((await ledger.get("/journal"))["entries"]) <= events + 1
    assert len((await ledger.get("/rollouts/g:0/history"))["transitions"]) == 4


async def test_a_run_created_again_with_other_settings_is_refused(ledger: Ledger) -> None:
    again = await Ledger.create(ledger.api)
    assert again.view["run_id"] == "run"
    other = {
        "run_id": "run", "settings": {"group_size": 3}, "contract": ledger.view["contract"], "vocab_size": 100,
        "policy": {"version": 0, "base_model": {"name": "tiny", "revision": "1", "sha256": "0" * 64}},
    }  # fmt: skip
    response = await ledger.api.call("POST", "/runs", other)
    assert response.json()["code"] == "run_conflict"


async def test_two_runs_do_not_see_each_other(ledger: Ledger) -> None:
    other = await Ledger.create(ledger.api, "other")
    await other.worker()
    ids = await ledger.group("g")
    assert await other.group("g") == ids
    ok(await other.open())
    assert await other.reserve(*ids) == ["reserved"] * 2
    assert (await ledger.state("g:0"))[0] == "rewarded"


async def test_without_a_group_size_every_rollout_is_its_own_group(ledger: Ledger) -> None:
    single = await Ledger.create(ledger.api, "single", group_size=None)
    await single.worker()
    await single.submit(single.rollout("a", "g", 0), single.rollout("b", "g", 1))
    assert (await single.submit(single.rollout("c", "g", 1)))[0]["verdict"] == "conflict"
    await single.reward("b")
    ok(await single.open())
    assert [r["rollout_id"] for r in (await single.candidates())["rollouts"]] == ["b"]
    assert await single.reserve("b") == ["reserved"]
    ok(await single.commit())
    assert [await single.state(r) for r in ("a", "b")] == [("generated", None, 0), ("consumed", None, 3)]
