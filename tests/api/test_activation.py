"""A version becomes active only when its artifact is there and every required worker confirmed it."""

from __future__ import annotations

import asyncio

import pytest

from tests.api.ledger import BASE, H, Json, Ledger, ok, refused


async def activate(ledger: Ledger, version: int) -> Json:
    return ok(await ledger.call("POST", f"/policies/{version}/activate"))


async def active(ledger: Ledger) -> int:
    version: int = (await ledger.get(""))["active"]["version"]
    return version


async def test_reasons_in_their_order(ledger: Ledger) -> None:
    await ledger.worker("v")
    ok(await ledger.prepare(1, 0))
    ok(await ledger.activation(1))
    await ledger.ack("w", 1, "0" * 64)
    verdict = await activate(ledger, 1)
    assert (verdict["reason"], verdict["missing_workers"], verdict["mismatched_workers"]) == (
        "artifact_not_committed", ["v"], ["w"],
    )  # fmt: skip
    ok(await ledger.upload(1))
    ok(await ledger.call("POST", "/policies/1/commit"))
    assert (await activate(ledger, 1))["reason"] == "missing_worker_ack"
    assert (await ledger.ack("v", 1))["activation"]["reason"] == "worker_mismatch"
    assert await active(ledger) == 0
    assert (await ledger.ack("w", 1))["activation"]["reason"] == "activated"
    assert await active(ledger) == 1


async def test_a_wrong_ack_fences_and_vouches_for_nothing_until_the_right_one(ledger: Ledger) -> None:
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    assert not (await ledger.ack("w", 1, "0" * 64))["matching"]
    worker = (await ledger.get("/workers"))["workers"][0]
    assert (worker["fenced"], worker["fenced_reason"]) == (True, "worker_mismatch")
    assert (await ledger.submit(ledger.rollout("r", version=1)))[0]["reason"] == "worker_not_acked"
    tickets = ok(await ledger.call("POST", "/workers/w/tickets", {"incarnation": "w-1", "group_ids": ["x"]}))
    assert (tickets["granted"], tickets["capacity"]) == ([], 0)
    assert (await ledger.ack("w", 1))["activation"]["activated"]
    assert not (await ledger.get("/workers"))["workers"][0]["fenced"]


async def test_the_last_ack_may_come_before_the_commit(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0))
    ok(await ledger.activation(1))
    assert (await ledger.ack("w", 1))["activation"]["reason"] == "artifact_not_committed"
    ok(await ledger.upload(1))
    ok(await ledger.call("POST", "/policies/1/commit"))
    assert await active(ledger) == 1


async def test_what_each_required_worker_said(ledger: Ledger) -> None:
    for worker in ("v", "x"):
        await ledger.worker(worker)
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    await ledger.ack("v", 1)
    await ledger.ack("w", 1, "0" * 64)
    required = (await ledger.get("/activations/act-1"))["required"]
    assert [(w["worker_id"], w["ack"], w["acked_at"] is not None) for w in required] == [
        ("v", "matching", True), ("w", "mismatched", True), ("x", "missing", False),
    ]  # fmt: skip
    assert required[1]["detail"].startswith("serves " + "0" * 64)


async def test_a_version_that_was_given_up_takes_no_files_and_no_commit(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0))
    ok(await ledger.activation(1))
    ok(await ledger.call("POST", "/activations/act-1/give-up", {"reason": "a bad batch"}))
    assert (await ledger.get("/policies/1"))["state"] == "abandoned"
    refused(await ledger.upload(1), 409, "policy_state")
    refused(await ledger.call("POST", "/policies/1/commit"), 409, "policy_state")
    refused(await ledger.activation(1, "again"), 409, "policy_state")
    refused(await ledger.open(version=1), 409, "policy_withdrawn")
    assert (await ledger.ack("w", 1))["reason"] == "worker_mismatch"


async def test_a_deregistered_worker_must_register_before_it_speaks(ledger: Ledger) -> None:
    ok(await ledger.call("POST", "/workers/w/deregister", {"incarnation": "w-1"}))
    assert (await ledger.get("/workers"))["workers"][0]["state"] == "deregistered"
    body = {"incarnation": "w-1"}
    for path, more in (("heartbeat", {}), ("drain", {}), ("tickets", {"group_ids": ["g"]})):
        refused(await ledger.call("POST", f"/workers/w/{path}", body | more), 409, "incarnation_unknown")
    await ledger.worker("w", "w-2")
    assert (await ledger.get("/workers"))["workers"][0]["state"] == "live"


async def test_a_file_that_no_disk_can_take(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, files=[{"name": "w", "size": 2**53, "sha256": H}]))
    refused(await ledger.upload(1, b"w", "w"), 507, "no_space")


async def test_by_hand(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "hand", activation="by_hand")
    await run.worker()
    await run.worker("v")
    await run.publish(1, 0)

    def word(verdict: Json) -> tuple[bool, str, bool]:
        return verdict["activated"], verdict["reason"], verdict["waits_for_hand"]

    ok(await run.activation(1))
    assert word((await run.ack("w", 1))["activation"]) == (False, "missing_worker_ack", False)
    assert word((await run.ack("v", 1))["activation"]) == (False, "activated", True)
    assert await active(run) == 0
    assert word(await activate(run, 1)) == (True, "activated", False)
    assert word(await activate(run, 1)) == (True, "activated", False)
    assert await active(run) == 1


async def test_caches_that_the_run_asks_for_must_be_reset(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "caches", required_caches=["prefix"])
    await run.worker(ack=False)
    await run.publish(1, 0)
    ok(await run.activation(1))
    verdict = await run.ack("w", 1)
    assert (verdict["matching"], verdict["reason"]) == (False, "caches_not_reset")
    assert (await run.ack("w", 1, caches_reset=["prefix", "encoder"]))["activation"]["activated"]


async def test_an_ack_counts_only_for_the_activation_it_was_given_to(ledger: Ledger) -> None:
    await ledger.publish(1, 0)
    assert (await ledger.ack("w", 1))["activation"] is None
    assert ok(await ledger.activation(1))["required"][0]["ack"] == "missing"
    assert await active(ledger) == 0
    assert (await ledger.ack("w", 1))["activation"]["activated"]


async def test_a_restarted_worker_must_ack_again(ledger: Ledger) -> None:
    await ledger.worker("v")
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    await ledger.ack("w", 1)
    await ledger.worker("w", "w-2", ack=False)
    refused(await ledger.call("POST", "/workers/w/heartbeat", {"incarnation": "w-1"}), 409, "incarnation_superseded")
    refused(
        await ledger.call("PUT", "/workers/w", {"incarnation": "w-1", "engine": "e", "engine_version": "1"}),
        409,
        "incarnation_superseded",
    )
    assert (await ledger.ack("v", 1))["activation"]["missing_workers"] == ["w"]
    assert (await ledger.ack("w", 1, incarnation="w-2"))["activation"]["activated"]


@pytest.mark.parametrize("way", ["drain", "deregister"])
async def test_a_worker_that_leaves_is_not_waited_for(ledger: Ledger, way: str) -> None:
    await ledger.worker("v")
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    await ledger.ack("w", 1)
    ok(await ledger.call("POST", f"/workers/v/{way}", {"incarnation": "v-1"}))
    assert await active(ledger) == 1
    events = [e for e in (await ledger.get("/journal"))["entries"] if e["event"] == "activation.dropped"]
    assert [e["detail"]["worker_id"] for e in events] == ["v"]


async def test_joiners_lost_draining_and_fenced_workers_are_not_required(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "fleet", lost_after_seconds=1.5)
    for name in ("lost", "draining", "fenced", "live"):
        await run.worker(name)
    ok(await run.call("POST", "/workers/draining/drain", {"incarnation": "draining-1"}))
    ok(await run.call("POST", "/workers/fenced/fence", {"reason": "test"}))
    await run.publish(1, 0)
    await asyncio.sleep(1.55)
    for name in ("draining", "fenced", "live"):
        ok(await run.call("POST", f"/workers/{name}/heartbeat", {"incarnation": f"{name}-1"}))
    opened = ok(await run.activation(1))
    assert [w["worker_id"] for w in opened["required"]] == ["live"]
    await run.worker("joiner")
    assert (await run.ack("live", 1))["activation"]["activated"]


async def test_nobody_to_confirm_is_a_refusal(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "empty")
    await run.publish(1, 0)
    refused(await run.activation(1), 409, "no_required_workers")
    refused(await run.activation(1, required_workers=["w"]), 404, "worker_unknown")
    assert (await run.get("/activations"))["activations"] == []


async def test_one_activation_at_a_time(ledger: Ledger) -> None:
    await ledger.publish(1, 0)
    await ledger.publish(2, 1)
    ok(await ledger.activation(2))
    refused(await ledger.activation(1), 409, "activation_open")
    refused(await ledger.activation(2, "again"), 409, "activation_open")
    refused(await ledger.activation(1, "act-2"), 409, "activation_conflict")
    watch = await ledger.get("/watch")
    assert (watch["active"]["version"], watch["candidate"]["version"]) == (0, 2)


async def test_an_overtaken_version_cannot_become_active(ledger: Ledger) -> None:
    await ledger.publish(1, 0)
    await ledger.activate(2, 1)
    refused(await ledger.activation(1), 409, "non_monotonic_version")
    refused(await ledger.prepare(1, 0, b"other"), 409, "policy_conflict")
    refused(await ledger.call("POST", "/policies/9/activate"), 404, "activation_unknown")


async def test_the_deadline_fails_an_activation_and_it_can_be_tried_again(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "late", activation_deadline_seconds=1.5)
    await run.worker()
    await run.publish(1, 0)
    ok(await run.activation(1))
    for _ in range(100):
        view = await run.get("/activations/act-1")
        if view["state"] != "open":
            break
        await asyncio.sleep(0.1)
    assert (view["state"], view["reason"]) == ("failed", "deadline: missing_worker_ack (w)")
    assert await active(run) == 0
    refused(await run.call("POST", "/policies/1/activate"), 409, "activation_ended")
    ok(await run.activation(1, "again"))
    assert (await run.ack("w", 1))["activation"]["activated"]
    failures = (await run.get("/failures"))["failures"]
    assert [(f["stage"], f["kind"], f["version"]) for f in failures] == [("activation", "failed", 1)]


async def test_a_failed_load_is_recorded_and_fences(ledger: Ledger) -> None:
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    body = {"incarnation": "w-1", "version": 1, "stage": "verify", "message": "w.bin has another hash"}
    worker = ok(await ledger.call("POST", "/workers/w/failures", body))
    assert worker["fenced_reason"] == "verify of version 1 failed"
    failure = (await ledger.get("/failures"))["failures"][0]
    assert (failure["stage"], failure["kind"], failure["worker_id"], failure["version"]) == (
        "distribution", "verify", "w", 1,
    )  # fmt: skip
    assert (await ledger.ack("w", 1))["activation"]["activated"]


async def test_files_that_are_not_the_manifest_s_are_refused(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, b"right"))
    for wrong in (b"wrong", b"righ", b"rightt", b""):
        refused(await ledger.upload(1, wrong), 409, "artifact_file_mismatch")
    refused(await ledger.upload(1, b"right", "b.bin"), 404, "artifact_file_unknown")
    refused(await ledger.upload(1, b"right", "../../etc/passwd"), 404, "not_found")
    refused(await ledger.call("GET", "/policies/1/files/a/w.bin"), 404, "artifact_file_missing")
    problem = refused(await ledger.call("POST", "/policies/1/commit"), 409, "artifact_incomplete")
    assert problem["files"] == ["a/w.bin"]
    assert (await ledger.get("/failures"))["failures"][0]["stage"] == "artifact"
    ok(await ledger.upload(1, b"right"))
    assert ok(await ledger.call("POST", "/policies/1/commit"))["state"] == "committed"


async def test_a_file_that_changed_in_the_store_is_found_at_commit(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, b"right"))
    ok(await ledger.upload(1, b"right"))
    store = ledger.api.app.state.artifacts
    sha256 = (await ledger.get("/policies/1"))["files"][0]["sha256"]
    store.path(sha256).write_bytes(b"wrong")
    refused(await ledger.call("POST", "/policies/1/commit"), 409, "artifact_incomplete")


@pytest.mark.parametrize("name", ["../w", "/w", "a/../w", "a\\w", "a//w", ".hidden", "w\n", "a/", "C:w"])
async def test_a_name_that_would_leave_its_folder_is_refused(ledger: Ledger, name: str) -> None:
    file = {"name": name, "size": 1, "sha256": H}
    refused(await ledger.prepare(1, 0, files=[file]), 422, "invalid_file_name")
    assert len((await ledger.get("/policies"))["policies"]) == 1


async def test_a_version_comes_from_committed_updates_and_a_known_parent(ledger: Ledger) -> None:
    ok(await ledger.open())
    refused(await ledger.prepare(1, 0, updates=["u"]), 409, "update_not_committed")
    refused(await ledger.prepare(2, 1), 404, "policy_version_unknown")
    refused(await ledger.prepare(0, 0), 409, "policy_conflict")
    body = {"version": 1, "parent_version": 0, "base_model": BASE, "files": []}
    refused(await ledger.call("POST", "/policies", body), 422, "invalid_request")


async def test_lag_clocks_count_version_numbers(ledger: Ledger) -> None:
    ok(await ledger.prepare(5, 0))
    assert (await ledger.get("/policies/5"))["lag_clock"] == 5


async def test_watching_hears_of_a_change(ledger: Ledger) -> None:
    seen = (await ledger.get("/watch"))["event_no"]
    waiting = asyncio.create_task(ledger.get(f"/watch?after={seen}&wait_seconds=20"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    ok(await ledger.prepare(1, 0))
    assert (await asyncio.wait_for(waiting, 10))["event_no"] > seen


async def test_tickets_hold_workers_back(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "brake", max_lag=1, groups_per_update=2)
    await run.worker()
    await run.worker("v")

    async def ask(worker: str, *groups: str) -> list[str]:
        body = {"incarnation": f"{worker}-1", "group_ids": groups}
        granted: list[str] = ok(await run.call("POST", f"/workers/{worker}/tickets", body))["granted"]
        return granted

    assert await ask("w", "a", "b", "c") == ["a", "b", "c"]
    assert await ask("w", "a", "b", "c") == ["a", "b", "c"]
    assert await ask("v", "a", "d", "e") == ["d"]
    await run.group("a")
    assert await ask("v", "e") == []
    ok(await run.open())
    assert await run.reserve("a:0", "a:1") == ["reserved"] * 2
    ok(await run.commit())
    assert await ask("v", "e") == ["e"]
    assert await ask("v", "a") == []


async def test_a_new_life_of_a_worker_goes_on_with_the_tickets_of_the_last(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "brake", max_lag=1, groups_per_update=1)
    await run.worker()
    await run.worker("v")

    async def ask(worker: str, incarnation: str, *groups: str) -> list[str]:
        body = {"incarnation": incarnation, "group_ids": groups}
        granted: list[str] = ok(await run.call("POST", f"/workers/{worker}/tickets", body))["granted"]
        return granted

    assert await ask("w", "w-1", "a", "b") == ["a", "b"]
    await run.worker("w", "w-2")
    assert await ask("v", "v-1", "a", "c") == []
    assert await ask("w", "w-2", "a", "b", "c") == ["a", "b"]


@pytest.mark.parametrize("fenced_by", ["failure", "fence", "mismatch"])
async def test_an_ack_that_was_followed_by_a_fence_does_not_count(ledger: Ledger, fenced_by: str) -> None:
    await ledger.worker("w2")
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    await ledger.ack("w", 1)
    if fenced_by == "failure":
        body = {"incarnation": "w-1", "version": 1, "stage": "load", "message": "out of memory after all"}
        ok(await ledger.call("POST", "/workers/w/failures", body))
    elif fenced_by == "fence":
        ok(await ledger.call("POST", "/workers/w/fence", {"reason": "its disk is dying"}))
    else:
        assert not (await ledger.ack("w", 0, artifact_hash="f" * 64))["matching"]
    verdict = (await ledger.ack("w2", 1))["activation"]
    assert (verdict["activated"], verdict["reason"]) == (False, "missing_worker_ack")
    assert verdict["missing_workers"] == ["w"]
    assert (await ledger.ack("w", 1))["activation"]["activated"]


@pytest.mark.parametrize("fenced_by", ["failure", "fence", "mismatch", "mismatch while fenced"])
async def test_a_fence_that_was_lifted_does_not_bring_earlier_acks_back(ledger: Ledger, fenced_by: str) -> None:
    """Serving the active version again says nothing of the candidate, which must be confirmed anew."""
    await ledger.worker("w2")
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    await ledger.ack("w", 1)
    if fenced_by == "failure":
        body = {"incarnation": "w-1", "version": 1, "stage": "load", "message": "out of memory after all"}
        ok(await ledger.call("POST", "/workers/w/failures", body))
    elif fenced_by == "fence":
        ok(await ledger.call("POST", "/workers/w/fence", {"reason": "its disk is dying"}))
    else:
        if "while" in fenced_by:
            ok(await ledger.call("POST", "/workers/w/fence", {"reason": "its disk is dying"}))
        assert not (await ledger.ack("w", 0, artifact_hash="f" * 64))["matching"]
    assert (await ledger.ack("w", 0))["matching"]
    assert not (await ledger.get("/workers"))["workers"][0]["fenced"]
    verdict = (await ledger.ack("w2", 1))["activation"]
    assert (verdict["reason"], verdict["missing_workers"]) == ("missing_worker_ack", ["w"])
    # What it makes with the candidate is still vouched for by the ack.
    assert (await ledger.submit(ledger.rollout("r", version=1)))[0]["reason"] is None
    assert (await ledger.ack("w", 1))["activation"]["activated"]


async def test_draining_again_changes_nothing_though_the_worker_is_lost_by_now(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "fleet", lost_after_seconds=0.2)
    await run.worker("w")
    await run.worker("v")
    ok(await run.call("POST", "/workers/w/drain", {"incarnation": "w-1"}))
    await run.publish(1, 0)
    ok(await run.activation(1, required_workers=["w", "v"]))
    await asyncio.sleep(0.3)
    assert ok(await run.call("POST", "/workers/w/drain", {"incarnation": "w-1"}))["state"] == "lost"
    assert [r["worker_id"] for r in (await run.get("/activations/act-1"))["required"]] == ["v", "w"]
    events = [e["subject"] for e in (await run.get("/journal"))["entries"] if e["event"] == "worker.draining"]
    assert events == ["w"]


async def test_an_ended_activation_keeps_what_was_said(ledger: Ledger) -> None:
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    await ledger.ack("w", 1)
    ended = await ledger.get("/activations/act-1")
    assert [(r["ack"], r["incarnation"]) for r in ended["required"]] == [("matching", "w-1")]
    await ledger.ack("w", 1)
    await ledger.ack("w", 1, "0" * 64)
    await ledger.worker("w", "w-2", ack=False)
    assert await ledger.get("/activations/act-1") == ended
    assert (await ledger.get("/activations"))["activations"] == [ended]


async def test_a_manifest_with_a_wrong_size_harms_nobody_s_file(ledger: Ledger) -> None:
    """The bytes of one sha256 are kept once, for every run: another run's mistake takes nothing out."""
    await ledger.publish(1, 0, b"shared")
    sha256 = (await ledger.get("/policies/1"))["files"][0]["sha256"]
    other = await Ledger.create(ledger.api, "other")
    ok(await other.prepare(1, 0, files=[{"name": "a", "size": 7, "sha256": sha256}]))
    refused(await other.call("POST", "/policies/1/commit"), 409, "artifact_incomplete")
    assert (await ledger.call("GET", "/policies/1/files/a/w.bin")).content == b"shared"
    twice = [{"name": name, "size": size, "sha256": sha256} for name, size in (("a", 6), ("b", 7))]
    refused(await other.prepare(2, 0, files=twice), 422, "invalid_request")


async def test_the_last_part_sent_again_is_there_already(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, b"whole file"))
    path = "/policies/1/files/a/w.bin?offset="
    assert not ok(await ledger.call("PUT", path + "0", content=b"whole "))["stored"]
    for _ in range(2):
        answer = ok(await ledger.call("PUT", path + "6", content=b"file"))
        assert (answer["received"], answer["stored"]) == (10, True)
