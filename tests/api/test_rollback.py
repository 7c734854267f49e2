"""Rollback and withdrawal: versions are taken back by number, and what was made with them is not used."""

from __future__ import annotations

import hashlib

from tests.api.ledger import BASE, Api, Json, Ledger, ok, refused


async def roll_back(ledger: Ledger, to: int, rollback_id: str = "back", **more: object) -> Json:
    body = {"to_version": to, "reason": "rewards fell to zero"} | more
    return ok(await ledger.call("PUT", f"/rollbacks/{rollback_id}", body))


async def withdraw(ledger: Ledger, version: int, **more: object) -> Json:
    return ok(await ledger.call("POST", f"/policies/{version}/withdraw", {"reason": "not finite"} | more))


async def line(ledger: Ledger, *numbers: int) -> None:
    """Each of these versions becomes active after the one before."""
    for version in numbers:
        await ledger.activate(version, version - 1)


async def test_an_earlier_artifact_comes_back_under_a_new_number(ledger: Ledger) -> None:
    await line(ledger, 1, 2, 3)
    answer = await roll_back(ledger, 1)
    assert (answer["withdrawn_versions"], answer["fenced_updates"], answer["activation_id"]) == ([2, 3], [], None)
    restored = answer["restoring"]
    assert (restored["version"], restored["state"], restored["parent_version"]) == (4, "committed", 1)
    assert (restored["artifact_hash"], restored["lag_clock"]) == (ledger.hashes[1], 1)
    # The pointer stays until the workers confirmed it.
    assert (await ledger.get(""))["active"]["version"] == 3
    ok(await ledger.activation(4))
    assert (await ledger.ack("w", 4, ledger.hashes[1]))["activation"]["activated"]
    assert await ledger.versions() == {0: "retired", 1: "retired", 2: "withdrawn", 3: "withdrawn", 4: "active"}
    # Sent again it finds the same, and the same id for another version is another rollback.
    assert (await roll_back(ledger, 1))["restoring"]["version"] == 4
    body = {"to_version": 0, "reason": "x"}
    refused(await ledger.call("PUT", "/rollbacks/back", body), 409, "rollback_conflict")
    assert [r["rollback_id"] for r in (await ledger.get("/rollbacks"))["rollbacks"]] == ["back"]
    told = [(e["event"], e["subject"]) for e in (await ledger.get("/journal"))["entries"]]
    assert ("policy.rolled_back", "4") in told and ("policy.withdrawn", "2") in told


async def test_a_version_names_the_one_to_go_back_to(ledger: Ledger) -> None:
    await line(ledger, 1, 2)
    ok(await ledger.prepare(3, 2, b"three", rollback_version=1))
    refused(await ledger.prepare(3, 2, b"three", rollback_version=2), 409, "policy_conflict")
    ok(await ledger.upload(3, b"three"))
    ok(await ledger.call("POST", "/policies/3/commit"))
    ok(await ledger.activation(3))
    assert (await ledger.ack("w", 3))["activation"]["activated"]
    assert (await ledger.get("/policies/3"))["rollback_version"] == 1
    answer = ok(await ledger.call("PUT", "/rollbacks/r", {"reason": "rewards fell"}))
    assert (answer["to_version"], answer["withdrawn_versions"]) == (1, [2, 3])
    assert ok(await ledger.call("PUT", "/rollbacks/r", {"reason": "rewards fell"}))["to_version"] == 1


async def test_without_a_name_it_is_the_nearest_durable_ancestor(ledger: Ledger) -> None:
    refused(await ledger.call("PUT", "/rollbacks/r", {"reason": "x"}), 409, "policy_not_durable")
    await line(ledger, 1)
    await stream(ledger, 2, 1)
    ok(await ledger.activation(2))
    await ledger.ack("w", 2)
    await line(ledger, 3)
    assert ok(await ledger.call("PUT", "/rollbacks/r", {"reason": "x"}))["to_version"] == 1


async def test_a_rollback_version_must_be_one_that_can_come_back(ledger: Ledger) -> None:
    await line(ledger, 1)
    await stream(ledger, 2, 1)
    ok(await ledger.prepare(3, 1))
    refused(await ledger.prepare(4, 1, rollback_version=9), 404, "policy_version_unknown")
    refused(await ledger.prepare(4, 1, rollback_version=2), 409, "policy_not_durable")
    refused(await ledger.prepare(4, 1, rollback_version=3), 409, "policy_state")


async def test_the_base_model_comes_back(ledger: Ledger) -> None:
    await line(ledger, 1)
    restored = (await roll_back(ledger, 0, version=7))["restoring"]
    assert (restored["version"], restored["kind"], restored["state"]) == (7, "base", "committed")


async def test_one_call_opens_the_activation_too(ledger: Ledger) -> None:
    await line(ledger, 1, 2)
    await ledger.publish(3, 2)
    ok(await ledger.activation(3))
    answer = await roll_back(ledger, 1, activation_id="to-the-good-one")
    assert answer["activation_id"] == "to-the-good-one"
    assert (await ledger.get("/activations/act-3"))["reason"].startswith("policy_withdrawn: rollback back")
    assert (await ledger.get("/watch"))["candidate"]["version"] == 4
    assert (await ledger.ack("w", 4, ledger.hashes[1]))["activation"]["activated"]


async def test_a_refused_rollback_changes_nothing(ledger: Ledger) -> None:
    await line(ledger, 1, 2)
    await ledger.publish(3, 2)
    before = await ledger.versions()
    body = {"to_version": 1, "reason": "x"}
    for to, code in ((2, "policy_state"), (3, "policy_state"), (9, "policy_version_unknown")):
        response = await ledger.call("PUT", "/rollbacks/r", body | {"to_version": to})
        refused(response, 404 if to == 9 else 409, code)
    refused(await ledger.call("PUT", "/rollbacks/r", body | {"version": 3}), 409, "non_monotonic_version")
    ok(await ledger.call("POST", "/workers/w/fence", {"reason": "test"}))
    response = await ledger.call("PUT", "/rollbacks/r", body | {"activation_id": "a"})
    refused(response, 409, "no_required_workers")
    assert await ledger.versions() == before
    assert (await ledger.get("/rollbacks"))["rollbacks"] == []
    await ledger.api.token("trainer", "trainer")
    refused(await ledger.call("PUT", "/rollbacks/r", body, who="trainer"), 403, "forbidden")


async def test_updates_and_rollouts_of_withdrawn_versions(api: Api) -> None:
    """As in a rewind: the open update is fenced, its rollouts are free, those of withdrawn versions quarantined."""
    ledger = await Ledger.create(api, max_lag=5)
    await ledger.worker()
    await line(ledger, 1)
    old = await ledger.group("old", 1)
    await line(ledger, 2)
    new = await ledger.group("new", 2)
    ok(await ledger.open("on-2", 2))
    assert await ledger.reserve(*old, update="on-2") == ["reserved", "reserved"]
    ok(await ledger.open("on-1", 1, owner="t-2"))
    answer = await roll_back(ledger, 1)
    assert (answer["fenced_updates"], answer["released"], answer["quarantined"]) == (["on-2"], 0, 2)
    assert (await ledger.state(old[0]))[:2] == ("rewarded", None)
    assert (await ledger.state(new[0]))[:2] == ("quarantined", "policy_withdrawn")
    assert (await ledger.get("/updates/on-1"))["state"] == "open"
    assert await ledger.reserve(*((i, 3) for i in old), update="on-1", owner="t-2") == ["reserved", "reserved"]
    # The restored version has the old lag clock: what version 1 made is fresh under it.
    ok(await ledger.activation(3))
    await ledger.ack("w", 3, ledger.hashes[1])
    ok(await ledger.commit("on-1", 0, "t-2"))
    assert (await ledger.get("/rollouts/old:0"))["state"] == "consumed"


async def test_what_a_withdrawn_version_made_stale_comes_back(api: Api) -> None:
    ledger = await Ledger.create(api, max_lag=0)
    await ledger.worker()
    old = await ledger.group("g", 0)
    await line(ledger, 1)
    ok(await ledger.open("u", 1))
    assert await ledger.reserve(*old, update="u") == ["stale_policy", "stale_policy"]
    answer = await roll_back(ledger, 0)
    assert (answer["fenced_updates"], answer["released"]) == (["u"], 2)
    assert (await ledger.state(old[0]))[:2] == ("rewarded", None)


async def test_withdrawing_a_candidate_fails_its_activation(ledger: Ledger) -> None:
    await line(ledger, 1)
    await ledger.publish(2, 1)
    await ledger.publish(3, 2)
    ok(await ledger.activation(2))
    ok(await ledger.activation(3))
    answer = await withdraw(ledger, 2)
    assert (answer["withdrawn_versions"], answer["restoring"]) == ([2, 3], None)
    states = {a["activation_id"]: a["state"] for a in (await ledger.get("/activations"))["activations"]}
    assert (states["act-2"], states["act-3"]) == ("failed", "failed")
    told = (await ledger.get(""))["event_no"]
    assert await withdraw(ledger, 2) == answer, "the same again is answered the same"
    entries = (await ledger.get("/journal"))["entries"]
    assert [e["subject"] for e in entries if e["event"] == "policy.withdrawal"] == ["2"]
    assert (await withdraw(ledger, 3))["withdrawn_versions"] == []
    assert (await ledger.get(""))["event_no"] == told + 1
    assert await ledger.versions() == {0: "retired", 1: "active", 2: "withdrawn", 3: "withdrawn"}


async def test_after_the_last_number_nothing_is_restored_and_bad_weights_are_taken_back_all_the_same(
    ledger: Ledger,
) -> None:
    last = 2**31 - 1
    await ledger.activate(last, 0)
    body = {"to_version": 0, "reason": "rewards fell to zero"}
    told = refused(await ledger.call("PUT", "/rollbacks/back", body), 409, "non_monotonic_version")
    assert told["detail"] == f"version {last} is taken, the last there can be: begin another run"
    assert await ledger.versions() == {0: "retired", last: "active"}
    answer = await withdraw(ledger, last)
    assert (answer["withdrawn_versions"], answer["restoring"], answer["no_restorable_version"]) == ([last], None, True)
    assert await withdraw(ledger, last) == answer


async def test_withdrawing_the_active_version_prepares_its_ancestor(ledger: Ledger) -> None:
    await line(ledger, 1, 2)
    answer = await withdraw(ledger, 2, restoring_version=5)
    restored = answer["restoring"]
    assert (restored["version"], restored["parent_version"], restored["state"]) == (5, 1, "committed")
    assert (await ledger.get(""))["active"]["version"] == 2
    ok(await ledger.activation(5))
    assert (await ledger.ack("w", 5, ledger.hashes[1]))["activation"]["activated"]
    nothing_left = await withdraw(ledger, 0)
    assert (nothing_left["withdrawn_versions"], nothing_left["no_restorable_version"]) == ([0, 1, 5], True)
    # The way on: a version without a parent, whose lag clock is its number.
    refused(await ledger.prepare(6, 5), 409, "policy_withdrawn")
    ok(await ledger.prepare(6, None, b"afresh"))
    ok(await ledger.upload(6, b"afresh"))
    view = ok(await ledger.call("POST", "/policies/6/commit"))
    assert (view["parent_version"], view["lag_clock"], view["state"]) == (None, 6, "committed")
    ok(await ledger.activation(6))
    assert (await ledger.ack("w", 6))["activation"]["activated"]


async def test_withdrawing_what_was_to_restore_looks_further_back(ledger: Ledger) -> None:
    await line(ledger, 1, 2)
    assert (await withdraw(ledger, 2))["restoring"]["version"] == 3
    again = await withdraw(ledger, 1)
    assert (again["withdrawn_versions"], again["no_restorable_version"]) == ([1, 3], False)
    assert again["restoring"]["parent_version"] == 0
    none = await withdraw(ledger, 0)
    assert (none["restoring"], none["no_restorable_version"]) == (None, True)


async def test_withdrawn_bytes_do_not_come_back_under_another_number(ledger: Ledger) -> None:
    await line(ledger, 1, 2)
    await roll_back(ledger, 1)
    ok(await ledger.activation(3))
    await ledger.ack("w", 3, ledger.hashes[1])
    assert (await withdraw(ledger, 3))["restoring"]["parent_version"] == 0


async def test_an_abandoned_version_needs_no_withdrawal(ledger: Ledger) -> None:
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    ok(await ledger.call("POST", "/activations/act-1/give-up", {"reason": "a bad batch"}))
    refused(await ledger.call("POST", "/policies/1/withdraw", {"reason": "x"}), 409, "policy_state")
    refused(await ledger.call("POST", "/policies/9/withdraw", {"reason": "x"}), 404, "policy_version_unknown")


async def stream(ledger: Ledger, version: int, parent: int) -> str:
    named = hashlib.sha256(f"tensors {version}".encode()).hexdigest()
    body = {"version": version, "parent_version": parent, "base_model": BASE, "kind": "stream", "artifact_hash": named}
    view = ok(await ledger.call("POST", "/policies", body))
    assert (view["state"], view["artifact_hash"], view["files"]) == ("prepared", named, [])
    ledger.hashes[version] = named
    assert ok(await ledger.call("POST", f"/policies/{version}/commit"))["state"] == "committed"
    return named


async def test_a_stream_is_activated_by_its_hash_and_cannot_come_back(ledger: Ledger) -> None:
    await line(ledger, 1)
    await stream(ledger, 2, 1)
    ok(await ledger.activation(2))
    assert (await ledger.get("/watch"))["candidate"]["kind"] == "stream"
    assert not (await ledger.ack("w", 2, "0" * 64))["matching"]
    assert (await ledger.ack("w", 2))["activation"]["activated"]
    await line(ledger, 3)
    refused(await ledger.call("PUT", "/rollbacks/r", {"to_version": 2, "reason": "x"}), 409, "policy_not_durable")
    # What is restored instead is the nearest version that left files.
    assert (await withdraw(ledger, 3))["restoring"]["parent_version"] == 1
    refused(await ledger.call("GET", "/policies/2/files/a/w.bin"), 404, "artifact_file_unknown")


async def test_a_stream_has_a_hash_and_no_files_and_others_have_files_and_no_hash(ledger: Ledger) -> None:
    body = {"version": 1, "parent_version": 0, "base_model": BASE}
    file = {"name": "w", "size": 1, "sha256": "0" * 64}
    for wrong in (
        {"kind": "stream"},
        {"kind": "stream", "artifact_hash": "0" * 64, "files": [file]},
        {"kind": "lora", "artifact_hash": "0" * 64, "files": [file]},
        {"kind": "full"},
    ):
        refused(await ledger.call("POST", "/policies", body | wrong), 422, "invalid_request")


async def test_a_rollback_to_what_the_store_has_lost_changes_nothing(ledger: Ledger) -> None:
    await line(ledger, 1, 2)
    store = ledger.api.app.state.artifacts
    sha256 = (await ledger.get("/policies/1"))["files"][0]["sha256"]
    store.path(sha256).unlink()
    before = await ledger.versions()
    body = {"to_version": 1, "reason": "x", "activation_id": "n"}
    refused(await ledger.call("PUT", "/rollbacks/r", body), 409, "policy_not_durable")
    assert await ledger.versions() == before
    # A withdrawal is made whatever the store holds; its restoring version waits for its file.
    answer = await withdraw(ledger, 2)
    assert (answer["restoring"]["version"], answer["restoring"]["state"]) == (3, "prepared")
    ok(await ledger.upload(3, b"weights 1"))
    assert ok(await ledger.call("POST", "/policies/3/commit"))["state"] == "committed"


async def test_one_rollback_id_is_one_rollback(ledger: Ledger) -> None:
    await line(ledger, 1, 2)
    await roll_back(ledger, 1)
    for other in ({"version": 9}, {"activation_id": "a"}, {"to_version": 0}):
        body = {"to_version": 1, "reason": "x"} | other
        refused(await ledger.call("PUT", "/rollbacks/back", body), 409, "rollback_conflict")
