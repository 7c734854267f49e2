"""Files of policy versions over HTTP: parts and offsets, URIs, and verification behind the call."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.policies import verification
from coordinator.storage.artifacts import ArtifactStore
from coordinator.storage.locations import Locations
from tests.api.ledger import Api, Json, Ledger, ok, refused

CONTENT = b"0123456789"


def store_of(ledger: Ledger) -> ArtifactStore:
    store: ArtifactStore = ledger.api.app.state.artifacts
    return store


async def here(ledger: Ledger, version: int = 1) -> tuple[int, bool]:
    answer = await ledger.get(f"/policies/{version}/uploads/a/w.bin")
    return answer["received"], answer["stored"]


async def part(ledger: Ledger, offset: int, content: bytes, version: int = 1) -> httpx.Response:
    return await ledger.call("PUT", f"/policies/{version}/files/a/w.bin?offset={offset}", content=content)


async def test_a_file_comes_in_parts_and_each_answer_says_how_much_is_on_disk(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, CONTENT))
    assert await here(ledger) == (0, False)
    assert ok(await part(ledger, 0, CONTENT[:4])) == {
        "name": "a/w.bin", "size": 10, "received": 4, "stored": False, "busy": False,
    }  # fmt: skip
    assert await here(ledger) == (4, False)
    problem = refused(await part(ledger, 5, CONTENT[5:]), 409, "upload_offset")
    assert problem["received"] == 4
    assert ok(await part(ledger, 2, CONTENT[2:7]))["received"] == 7
    refused(await ledger.call("GET", "/policies/1/files/a/w.bin"), 404, "artifact_file_missing")
    assert ok(await part(ledger, 7, CONTENT[7:]))["stored"]
    assert await here(ledger) == (10, True)
    assert (await ledger.call("GET", "/policies/1/files/a/w.bin")).content == CONTENT
    assert ok(await ledger.call("POST", "/policies/1/commit"))["verification"] is None


async def test_parts_that_do_not_make_the_file_are_dropped(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, CONTENT))
    ok(await part(ledger, 0, b"x123"))
    refused(await part(ledger, 4, CONTENT[4:]), 409, "artifact_file_mismatch")
    assert await here(ledger) == (0, False)
    ok(await part(ledger, 0, CONTENT[:4]))
    refused(await part(ledger, 4, CONTENT[4:] + b"x"), 409, "artifact_file_mismatch")
    assert await here(ledger) == (0, False)
    refused(await part(ledger, 11, b""), 409, "upload_offset")
    refused(await ledger.call("PUT", "/policies/1/files/a/w.bin?offset=-1", content=b""), 422, "invalid_request")
    assert [p.name for p in store_of(ledger).folder.iterdir()] == []


async def test_an_empty_file_is_a_file(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, b""))
    assert await here(ledger) == (0, False)
    assert ok(await part(ledger, 0, b""))["stored"]
    assert ok(await ledger.call("POST", "/policies/1/commit"))["state"] == "committed"
    answer = await ledger.call("GET", "/policies/1/files/a/w.bin")
    assert (answer.content, answer.headers["content-length"]) == (b"", "0")


async def test_two_who_send_the_same_file_at_once_do_no_harm(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, CONTENT))
    begun, first_may_go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> Any:
        yield CONTENT[:5]
        begun.set()
        await first_may_go_on.wait()
        yield CONTENT[5:]

    store, sha256 = store_of(ledger), hashlib.sha256(CONTENT).hexdigest()
    first = asyncio.create_task(store.put("run", sha256, 10, slowly(), 0))
    await begun.wait()
    assert (await ledger.get("/policies/1/uploads/a/w.bin"))["busy"]
    assert ok(await part(ledger, 0, CONTENT))["stored"]
    first_may_go_on.set()
    assert await first == 10
    assert [p.name for p in store.folder.rglob("*") if p.is_file()] == [sha256]
    assert store.path(sha256).read_bytes() == CONTENT


async def test_nobody_goes_on_with_what_another_is_writing(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, CONTENT))
    begun, may_go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> Any:
        yield CONTENT[3:5]
        begun.set()
        await may_go_on.wait()

    store, sha256 = store_of(ledger), hashlib.sha256(CONTENT).hexdigest()
    ok(await part(ledger, 0, CONTENT[:3]))
    first = asyncio.create_task(store.put("run", sha256, 10, slowly(), 3))
    await begun.wait()
    assert (await ledger.get("/policies/1/uploads/a/w.bin"))["busy"]
    refused(await part(ledger, 3, CONTENT[3:]), 409, "upload_busy")
    may_go_on.set()
    assert await first == 5
    assert ok(await part(ledger, 5, CONTENT[5:]))["stored"]


async def test_the_same_bytes_are_kept_once_over_versions_and_runs(ledger: Ledger) -> None:
    await ledger.publish(1, 0, CONTENT)
    other = await Ledger.create(ledger.api, "other")
    for run, version, parent in ((ledger, 2, 1), (other, 1, 0)):
        ok(await run.prepare(version, parent, CONTENT))
        assert await here(run, version) == (10, True)
        assert ok(await run.call("POST", f"/policies/{version}/commit"))["state"] == "committed"
    assert len([p for p in store_of(ledger).folder.rglob("*") if p.is_file()]) == 1


async def test_an_upload_of_one_run_is_not_anothers(ledger: Ledger) -> None:
    other = await Ledger.create(ledger.api, "run-2")
    for run in (ledger, other):
        ok(await run.prepare(1, 0, CONTENT))
    ok(await part(ledger, 0, b"wrong"))
    assert await here(other) == (0, False)
    refused(await part(other, 5, CONTENT[5:]), 409, "upload_offset")


async def test_a_link_in_the_store_leads_nowhere(ledger: Ledger, tmp_path: Path) -> None:
    await ledger.publish(1, 0, CONTENT)
    store, sha256 = store_of(ledger), hashlib.sha256(CONTENT).hexdigest()
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 10)
    store.path(sha256).unlink()
    store.path(sha256).symlink_to(secret)
    assert await here(ledger) == (0, False)
    refused(await ledger.call("GET", "/policies/1/files/a/w.bin"), 404, "artifact_file_missing")
    ok(await part(ledger, 0, CONTENT))
    assert secret.read_bytes() == b"s" * 10
    assert (await ledger.call("GET", "/policies/1/files/a/w.bin")).content == CONTENT
    store.path(sha256).unlink()
    store.path(sha256).parent.rmdir()
    (tmp_path / "elsewhere").mkdir()
    store.path(sha256).parent.symlink_to(tmp_path / "elsewhere")
    refused(await part(ledger, 0, CONTENT), 507, "no_space")
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def verified(ledger: Ledger, version: int = 1) -> Json:
    """The version once nobody verifies it any more."""
    async with asyncio.timeout(20):
        while True:
            view = await ledger.get(f"/policies/{version}")
            if view["verification"]["state"] != "running":
                return view
            await asyncio.sleep(0.02)


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "SMALL_BYTES", 0)


@pytest.mark.usefixtures("everything_is_large")
async def test_a_large_artifact_is_verified_behind_the_call(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, CONTENT))
    refused(await ledger.call("POST", "/policies/1/commit"), 409, "artifact_incomplete")
    ok(await ledger.upload(1, CONTENT))
    ok(await ledger.activation(1))
    assert not (await ledger.ack("w", 1))["activation"]["activated"]
    response = await ledger.call("POST", "/policies/1/commit")
    assert response.status_code == 202, response.text
    running = response.json()
    assert (running["state"], running["verification"]["state"]) == ("prepared", "running")
    assert running["verification"]["bytes_total"] == 10
    view = await verified(ledger)
    # The last thing that the switch waited for.
    assert (view["state"], view["verification"]["state"], view["verification"]["bytes_done"]) == (
        "active",
        "passed",
        10,
    )
    assert ok(await ledger.call("POST", "/policies/1/commit"))["state"] == "active"
    events = [e["event"] for e in (await ledger.get("/journal"))["entries"]]
    assert events.count("policy.committed") == 1


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("damage", [b"012345678", b"0123456780", b""])
async def test_a_large_artifact_that_changed_is_refused_by_file_name_and_can_be_mended(
    ledger: Ledger, damage: bytes
) -> None:
    ok(await ledger.prepare(1, 0, CONTENT))
    ok(await ledger.upload(1, CONTENT))
    store, sha256 = store_of(ledger), hashlib.sha256(CONTENT).hexdigest()
    store.path(sha256).write_bytes(damage)
    response = await ledger.call("POST", "/policies/1/commit")
    if len(damage) == 10:
        assert response.status_code == 202
        view = await verified(ledger)
        assert (view["state"], view["verification"]["state"]) == ("prepared", "refused")
        assert view["verification"]["faulty"] == ["a/w.bin"]
        assert not store.path(sha256).exists()
    else:
        assert refused(response, 409, "artifact_incomplete")["files"] == ["a/w.bin"]
    assert [f["kind"] for f in (await ledger.get("/failures"))["failures"]] == ["artifact_not_committed"]
    ok(await ledger.upload(1, CONTENT))
    assert (await ledger.call("POST", "/policies/1/commit")).status_code == 202
    assert (await verified(ledger))["state"] == "committed"


@pytest.mark.usefixtures("everything_is_large")
async def test_a_version_that_was_given_up_meanwhile_is_not_committed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok(await ledger.prepare(1, 0, CONTENT))
    ok(await ledger.upload(1, CONTENT))
    ok(await ledger.activation(1, "a"))
    reading = asyncio.Event()
    verify = verification.faulty_files

    async def when_told(*args: Any) -> list[str]:
        await reading.wait()
        return await verify(*args)

    monkeypatch.setattr(verification, "faulty_files", when_told)
    assert (await ledger.call("POST", "/policies/1/commit")).status_code == 202
    assert (await ledger.call("POST", "/policies/1/commit")).status_code == 202
    ok(await ledger.call("POST", "/activations/a/give-up", {"reason": "bad"}))
    reading.set()
    view = await verified(ledger)
    assert (view["state"], view["verification"]["state"], view["verification"]["faulty"]) == (
        "abandoned",
        "refused",
        [],
    )


@pytest.mark.usefixtures("everything_is_large")
async def test_whoever_lost_its_claim_changes_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that stood still while another took its verification over and refused the version."""
    ok(await ledger.prepare(1, 0, CONTENT))
    ok(await ledger.upload(1, CONTENT))
    reading = asyncio.Event()

    async def when_told(*_: Any) -> list[str]:
        await reading.wait()
        return []

    monkeypatch.setattr(verification, "faulty_files", when_told)
    assert (await ledger.call("POST", "/policies/1/commit")).status_code == 202
    database = ledger.api.database
    assert await database.transaction(verification._claim, "another", 8) == []  # it is claimed, and renewed
    async with database.engine.begin() as connection:
        await connection.exec_driver_sql("UPDATE verifications SET claimed_by = 'another'")
    reading.set()
    await asyncio.sleep(2.5)
    assert (await ledger.get("/policies/1"))["state"] == "prepared"


@pytest.fixture
def shared(api: Api, tmp_path: Path) -> Path:
    """A folder that the operator allows artifacts in."""
    folder = tmp_path / "shared"
    (folder / "v1" / "a").mkdir(parents=True)
    (folder / "v1" / "a" / "w.bin").write_bytes(CONTENT)
    api.app.state.locations.prefixes = Locations([f"file://{folder}"]).prefixes
    return folder


async def test_files_at_a_uri_are_verified_there_and_never_uploaded(ledger: Ledger, shared: Path) -> None:
    uri = f"file://{shared}/v1"
    assert ok(await ledger.prepare(1, 0, CONTENT, uri=f"{uri}/"))["uri"] == uri
    assert ok(await ledger.prepare(1, 0, CONTENT, uri=uri))["uri"] == uri
    refused(await ledger.prepare(1, 0, CONTENT), 409, "policy_conflict")
    refused(await ledger.upload(1, CONTENT), 409, "policy_state")
    refused(await ledger.call("GET", "/policies/1/files/a/w.bin"), 404, "artifact_file_missing")
    assert (await ledger.call("POST", "/policies/1/commit")).status_code == 202
    view = await verified(ledger)
    assert (view["state"], view["verification"]["state"]) == ("committed", "passed")
    assert [p for p in store_of(ledger).folder.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("damage", ["changed", "longer", "missing", "a folder", "a link"])
async def test_files_at_a_uri_that_are_not_the_ones_are_refused(
    ledger: Ledger, shared: Path, tmp_path: Path, damage: str
) -> None:
    ok(await ledger.prepare(1, 0, CONTENT, uri=f"file://{shared}/v1"))
    file = shared / "v1" / "a" / "w.bin"
    if damage in ("changed", "longer"):
        file.write_bytes(b"1123456789" if damage == "changed" else CONTENT + b"0")
    else:
        file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage == "a link":  # to the very bytes, but out of what is allowed
        (tmp_path / "secret").write_bytes(CONTENT)
        file.symlink_to(tmp_path / "secret")
    assert (await ledger.call("POST", "/policies/1/commit")).status_code == 202
    view = await verified(ledger)
    assert (view["state"], view["verification"]["faulty"]) == ("prepared", ["a/w.bin"])


async def test_a_uri_beyond_what_the_operator_allows_is_refused(ledger: Ledger, shared: Path) -> None:
    for uri in (
        f"file://{shared}/../secret",
        f"file://{shared}x",
        f"file://{shared.parent}",
        f"file://{shared}/v1/./a",
        f"file://{shared}//v1",
        f"file://{shared}/%2e%2e",
        f"file://{shared}/*",
        f"simplecache::file://{shared}/v1",
        f"local://{shared}/v1",
        f"FILE://{shared}/v1",
        f"{shared}/v1",
        "s3://bucket/v1",
        "file://v1",
        "",
    ):
        problem = refused(await ledger.prepare(1, 0, uri=uri), 422, "artifact_uri_not_allowed")
        assert problem["field"] == "uri"
    assert len((await ledger.get("/policies"))["policies"]) == 1


async def test_no_uri_is_allowed_unless_the_operator_says_so(ledger: Ledger, tmp_path: Path) -> None:
    problem = refused(await ledger.prepare(1, 0, uri=f"file://{tmp_path}"), 422, "artifact_uri_not_allowed")
    assert "(none)" in problem["detail"]
