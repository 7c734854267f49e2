"""Files of versions that ended long ago go, and none that anything still needs."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from coordinator.operations.access import Caller
from coordinator.policies import removal, service
from coordinator.storage.artifacts import ArtifactStore
from coordinator.storage.locations import Locations
from coordinator.wire.policies import PreparePolicy
from tests.api.ledger import BASE, Api, Ledger, ok, refused

SOON = {"artifact_retention_seconds": 0.001}


@pytest.fixture
async def ledger(api: Api) -> Ledger:
    """A run that keeps no files longer than something needs them, with one worker that confirmed version 0."""
    ledger = await Ledger.create(api, **SOON)
    await ledger.worker()
    return ledger


async def sweep(ledger: Ledger) -> list[int]:
    """The versions of the run that lost their files."""
    store: ArtifactStore = ledger.api.app.state.artifacts
    return (await removal.sweep(ledger.api.database, store)).versions.get(ledger.run_id, [])


def stored(ledger: Ledger) -> set[str]:
    folder: Path = ledger.api.app.state.artifacts.folder
    return {path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith("removed-")}


def sha256(version: int) -> str:
    """Of the file of a version that the ledger published."""
    return hashlib.sha256(f"weights {version}".encode()).hexdigest()


async def line_of(ledger: Ledger, newest: int) -> None:
    """Versions 1 to `newest`, each activated; the worker serves the newest one."""
    for version in range(1, newest + 1):
        await ledger.activate(version, version - 1)


async def test_what_ended_goes_and_the_active_one_and_the_one_before_it_stay(ledger: Ledger) -> None:
    await line_of(ledger, 4)
    assert await sweep(ledger) == [1, 2]
    assert await sweep(ledger) == []
    assert stored(ledger) == {sha256(3), sha256(4)}
    views = {p["version"]: p for p in (await ledger.get("/policies"))["policies"]}
    assert [v for v, p in views.items() if p["files_removed_at"] is not None] == [1, 2]
    # What is known about the version stays.
    assert (views[1]["state"], views[1]["files"][0]["sha256"]) == ("retired", sha256(1))
    problem = refused(await ledger.call("GET", "/policies/1/files/a/w.bin"), 404, "artifact_file_missing")
    assert "retention" in problem["detail"]
    refused(await ledger.upload(1, b"weights 1"), 409, "policy_state")
    refused(await ledger.call("GET", "/policies/1/uploads/a/w.bin"), 409, "policy_state")
    events = [(e["event"], e["subject"]) for e in (await ledger.get("/journal"))["entries"]]
    assert events[-2:] == [("policy.files_removed", "1"), ("policy.files_removed", "2")]


async def test_what_the_active_version_names_to_go_back_to_stays(ledger: Ledger) -> None:
    await line_of(ledger, 3)
    ok(await ledger.prepare(4, 3, b"weights 4", rollback_version=1))
    ok(await ledger.upload(4, b"weights 4"))
    ok(await ledger.call("POST", "/policies/4/commit"))
    ok(await ledger.activation(4))
    await ledger.ack("w", 4)
    assert await sweep(ledger) == [2]
    assert ok(await ledger.call("PUT", "/rollbacks/r", {"reason": "x"}))["to_version"] == 1


async def test_a_run_keeps_its_files_for_ever_unless_it_says_otherwise(api: Api) -> None:
    ledger = await Ledger.create(api)
    await ledger.worker()
    await line_of(ledger, 4)
    assert await sweep(ledger) == []
    assert len(stored(ledger)) == 4


async def test_what_ended_only_just_now_stays(api: Api) -> None:
    ledger = await Ledger.create(api, artifact_retention_seconds=3600)
    await ledger.worker()
    await line_of(ledger, 3)
    assert await sweep(ledger) == []
    async with api.database.engine.begin() as connection:
        await connection.execute(
            text("UPDATE policy_versions SET ended_at = ended_at - interval '1 hour' WHERE version = 1")
        )
    assert await sweep(ledger) == [1]


async def test_what_a_live_worker_serves_stays(ledger: Ledger) -> None:
    await line_of(ledger, 2)
    await ledger.worker("late")
    await ledger.ack("late", 1)
    for version in (3, 4):
        await ledger.activate(version, version - 1, "w", "late")
    await ledger.ack("late", 1)
    assert await sweep(ledger) == [2]
    await ledger.ack("late", 4)
    assert await sweep(ledger) == [1]


async def test_a_worker_that_is_gone_holds_nothing(ledger: Ledger) -> None:
    await ledger.worker("late")
    for version in (1, 2, 3):
        await ledger.activate(version, version - 1, "w", "late")
    await ledger.ack("late", 1)
    assert await sweep(ledger) == []
    ok(await ledger.call("POST", "/workers/late/deregister", {"incarnation": "late-1"}))
    assert await sweep(ledger) == [1]


async def test_what_is_loading_stays_and_goes_when_it_was_given_up(ledger: Ledger) -> None:
    await line_of(ledger, 1)
    await ledger.publish(2, 1)
    ok(await ledger.activation(2, "a"))
    assert await sweep(ledger) == []
    ok(await ledger.call("POST", "/activations/a/give-up", {"reason": "bad"}))
    assert await sweep(ledger) == [2]
    assert stored(ledger) == {sha256(1)}


async def test_what_may_still_become_active_stays_and_what_was_overtaken_goes(ledger: Ledger) -> None:
    await line_of(ledger, 1)
    await ledger.publish(2, 1)
    await ledger.publish(3, 1)
    assert await sweep(ledger) == []
    ok(await ledger.activation(3))
    await ledger.ack("w", 3)
    assert await sweep(ledger) == [2]
    refused(await ledger.activation(2), 409, "non_monotonic_version")
    assert ok(await ledger.call("POST", "/policies/2/commit"))["state"] == "committed"


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("until", ["generated", "rewarded", "reserved", "reward_failed"])
async def test_what_a_live_rollout_refers_to_stays(api: Api, until: str, grouped: bool) -> None:
    ledger = await Ledger.create(api, **SOON, max_lag=10, max_attempts=2, group_size=2 if grouped else None)
    await ledger.worker()
    await line_of(ledger, 1)
    ids = ["g:0", "g:1"] if grouped else ["g:0"]
    await ledger.submit(*(ledger.rollout(r, "g", i, version=1) for i, r in enumerate(ids)))
    for rollout_id in ids if until in ("rewarded", "reserved") else ():
        await ledger.reward(rollout_id)
    if until == "reward_failed":
        await ledger.reward("g:0", None, status="timeout")
    for version in (2, 3):
        await ledger.activate(version, version - 1)
    if until == "reserved":
        ok(await ledger.open("u", 3))
        assert set(await ledger.reserve(*ids)) == {"reserved"}
    assert (await ledger.state("g:0"))[0] == until
    assert await sweep(ledger) == []
    if until == "reserved":
        ok(await ledger.commit())
        assert await sweep(ledger) == [1]


async def test_bytes_that_another_version_or_run_has_stay(ledger: Ledger) -> None:
    other = await Ledger.create(ledger.api, "other")
    await line_of(ledger, 1)
    ok(await other.prepare(1, 0, b"weights 1"))
    for version in (2, 3):
        await ledger.activate(version, version - 1)
    assert await sweep(ledger) == [1]
    assert sha256(1) in stored(ledger)
    assert ok(await other.call("POST", "/policies/1/commit"))["state"] == "committed"
    assert (await other.call("GET", "/policies/1/files/a/w.bin")).content == b"weights 1"
    refused(await ledger.call("GET", "/policies/1/files/a/w.bin"), 404, "artifact_file_missing")


async def test_files_at_a_uri_are_left_alone(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "v" / "a").mkdir(parents=True)
    (tmp_path / "v" / "a" / "w.bin").write_bytes(b"w")
    ledger.api.app.state.locations.prefixes = Locations([f"file://{tmp_path}"]).prefixes
    ok(await ledger.prepare(1, 0, b"w", uri=f"file://{tmp_path}/v"))
    assert (await ledger.call("POST", "/policies/1/commit")).status_code == 202
    async with asyncio.timeout(20):
        seen = -1
        while (await ledger.get("/policies/1"))["state"] == "prepared":
            seen = (await ledger.get(f"/watch?after={seen}&wait_seconds=5"))["event_no"]
    assert await sweep(ledger) == []
    assert (tmp_path / "v" / "a" / "w.bin").read_bytes() == b"w"


async def test_a_rewind_restores_the_nearest_version_that_has_its_files(ledger: Ledger) -> None:
    await ledger.activate(1, 0)
    await ledger.group("g", 1)
    ok(await ledger.open("u", 1))
    assert set(await ledger.reserve("g:0", "g:1")) == {"reserved"}
    ok(await ledger.commit())
    await ledger.publish(2, 1)
    await ledger.publish(3, 1)
    ok(await ledger.prepare(4, 1, b"weights 4", updates=["u"]))
    ok(await ledger.upload(4, b"weights 4"))
    ok(await ledger.call("POST", "/policies/4/commit"))
    ok(await ledger.activation(4))
    await ledger.ack("w", 4)
    assert await sweep(ledger) == [2, 3]
    answer = ok(await ledger.call("PUT", "/rewinds/r", {"to_commit_no": 0, "reason": "lost"}))
    assert (answer["restoring"]["parent_version"], answer["restoring"]["state"]) == (1, "committed")


async def test_a_file_that_arrives_while_its_version_goes_is_taken_out_again(ledger: Ledger) -> None:
    await line_of(ledger, 3)
    store: ArtifactStore = ledger.api.app.state.artifacts
    removed = asyncio.Event()
    put = store.put

    async def slowly(*args: Any) -> int:
        await removed.wait()
        return await put(*args)

    store.put = slowly  # type: ignore[method-assign]
    uploading = asyncio.create_task(ledger.upload(1, b"weights 1"))
    await asyncio.sleep(0.2)
    assert await sweep(ledger) == [1]
    removed.set()
    ok(await uploading)
    assert sha256(1) in stored(ledger)
    assert await sweep(ledger) == []
    assert sha256(1) not in stored(ledger)


async def test_a_download_that_has_begun_ends_well(ledger: Ledger) -> None:
    await line_of(ledger, 3)
    store: ArtifactStore = ledger.api.app.state.artifacts
    with store.open(sha256(1)) as file:
        assert await sweep(ledger) == [1]
        store.tidy()
        assert file.read() == b"weights 1"


async def test_who_names_bytes_while_they_go_waits_and_finds_them_gone(ledger: Ledger) -> None:
    await line_of(ledger, 3)
    other = await Ledger.create(ledger.api, "other")
    store: ArtifactStore = ledger.api.app.state.artifacts
    loop, begun, may_go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    remove = store.remove

    def slowly(sha256: str) -> None:
        loop.call_soon_threadsafe(begun.set)
        may_go_on.wait(20)
        remove(sha256)

    store.remove = slowly  # type: ignore[method-assign]
    removing = asyncio.create_task(sweep(ledger))
    await begun.wait()
    preparing = asyncio.create_task(other.prepare(1, 0, b"weights 1"))
    await asyncio.sleep(0.3)
    assert not preparing.done()
    may_go_on.set()
    ok(await preparing)
    assert await removing == [1]
    assert not (await other.get("/policies/1/uploads/a/w.bin"))["stored"]
    ok(await other.upload(1, b"weights 1"))
    assert ok(await other.call("POST", "/policies/1/commit"))["state"] == "committed"


async def test_bytes_that_are_just_being_named_wait_for_it_and_stay(ledger: Ledger) -> None:
    await line_of(ledger, 3)
    await Ledger.create(ledger.api, "other")
    file = {"name": "w", "size": 9, "sha256": sha256(1)}
    body = PreparePolicy.model_validate({"version": 1, "parent_version": 0, "base_model": BASE, "files": [file]})
    admin = Caller("t", "t", "admin", None, None)
    async with ledger.api.database.engine.begin() as connection:
        await service.prepare(connection, "other", body, admin, Locations())
        removing = asyncio.create_task(sweep(ledger))
        await asyncio.sleep(0.3)
        assert not removing.done()
    assert await removing == [1]
    assert sha256(1) in stored(ledger)


async def test_nobody_rolls_back_to_a_version_whose_files_are_gone(ledger: Ledger) -> None:
    await line_of(ledger, 3)
    assert await sweep(ledger) == [1]
    problem = refused(
        await ledger.call("PUT", "/rollbacks/r", {"to_version": 1, "reason": "worse"}), 409, "policy_not_durable"
    )
    assert "retention" in problem["detail"]
    answer = ok(await ledger.call("PUT", "/rollbacks/s", {"to_version": 2, "reason": "worse"}))
    assert (answer["restoring"]["version"], answer["restoring"]["state"]) == (4, "committed")
    # Version 2 and the one that restores it have the same bytes, which nothing may take away now.
    assert await sweep(ledger) == []
    assert sha256(2) in stored(ledger)
