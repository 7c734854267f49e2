"""Artifacts and activations through the client, against a real coordinator."""

import hashlib
from pathlib import Path

import pytest

from coordinator.client import ArtifactCorrupt, Coordinator, NotActivated, Refused
from coordinator.wire.workers import WeightDigest
from tests.client.runs import BASE, new_run, new_worker, write_adapter
from tests.client.server_process import ServerProcess


def stored_files(server: ServerProcess, content: bytes) -> list[Path]:
    """Where the coordinator keeps files of this content."""
    return [p for p in (server.data / "artifacts").rglob("*") if p.is_file() and p.read_bytes() == content]


def test_a_published_policy_comes_back_whole(coordinator: Coordinator, tmp_path: Path) -> None:
    run = new_run(coordinator)
    source = write_adapter(tmp_path / "adapter")
    seen: dict[str, int] = {}
    view = run.publish(
        version=1,
        parent_version=0,
        folder=source,
        base_model=BASE,
        progress=lambda name, sent, size: seen.update({name: sent}),
    )
    assert view.state == "committed"
    assert seen["adapter_model.safetensors"] == 2_100_000
    downloaded = tmp_path / "cache" / "v1"
    run.download(1, downloaded, artifact_hash=view.artifact_hash)
    assert {p.relative_to(downloaded).as_posix(): p.read_bytes() for p in downloaded.rglob("*") if p.is_file()} == {
        p.relative_to(source).as_posix(): p.read_bytes() for p in source.rglob("*") if p.is_file()
    }
    assert list(downloaded.parent.iterdir()) == [downloaded]
    with pytest.raises(FileExistsError):
        run.download(1, downloaded)


def test_publishing_again_is_a_success_and_other_content_is_refused(coordinator: Coordinator, tmp_path: Path) -> None:
    run = new_run(coordinator)
    source = write_adapter(tmp_path / "adapter")
    first = run.publish(version=1, parent_version=0, folder=source, base_model=BASE)
    again = run.publish(version=1, parent_version=0, folder=source, base_model=BASE)
    assert again.artifact_hash == first.artifact_hash
    (source / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(Refused) as caught:
        run.publish(version=1, parent_version=0, folder=source, base_model=BASE)
    assert caught.value.code == "policy_conflict"


@pytest.mark.parametrize("damage", [b"\0" * 2_100_007, b"\0" * 2_100_008, b""])
def test_a_corrupted_artifact_is_refused_and_leaves_nothing(
    coordinator: Coordinator, server: ServerProcess, tmp_path: Path, damage: bytes
) -> None:
    run = new_run(coordinator)
    content = hashlib.sha256(tmp_path.name.encode()).digest()[:7]
    source = write_adapter(tmp_path / "adapter", content)
    with (source / "adapter_model.safetensors").open("ab") as file:
        file.write(content)
    run.publish(version=1, parent_version=0, folder=source, base_model=BASE)
    (stored,) = stored_files(server, (source / "adapter_model.safetensors").read_bytes())
    stored.chmod(0o600)
    stored.write_bytes(damage)
    into = tmp_path / "cache" / "v1"
    with pytest.raises((ArtifactCorrupt, Refused)):
        run.download(1, into)
    assert list(into.parent.iterdir()) == []


def test_a_version_of_another_hash_is_not_downloaded(coordinator: Coordinator, tmp_path: Path) -> None:
    run = new_run(coordinator)
    run.publish(version=1, parent_version=0, folder=write_adapter(tmp_path / "a"), base_model=BASE)
    with pytest.raises(ArtifactCorrupt, match="has hash"):
        run.download(1, tmp_path / "v1", artifact_hash="e" * 64)
    with pytest.raises(ValueError, match="base model itself"):
        run.download(0, tmp_path / "v0")


def test_an_empty_folder_is_no_artifact(coordinator: Coordinator, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no files"):
        new_run(coordinator).publish(version=1, parent_version=0, folder=tmp_path, base_model=BASE)


def test_a_policy_becomes_active_once_its_worker_confirmed(coordinator: Coordinator, tmp_path: Path) -> None:
    run = new_run(coordinator)
    worker = new_worker(run)
    policy = run.publish(version=1, parent_version=0, folder=write_adapter(tmp_path / "a"), base_model=BASE)
    with pytest.raises(NotActivated) as caught:
        run.activate(1, wait_seconds=0.5)
    assert [(w.worker_id, w.ack) for w in caught.value.activation.required] == [("w1", "missing")]
    candidate = worker.heartbeat().candidate
    assert candidate is not None
    assert (candidate.version, candidate.artifact_hash) == (1, policy.artifact_hash)
    verdict = worker.ack(
        1, policy.artifact_hash, digest=WeightDigest(layout="l", registered="f" * 64), caches_reset=["prefix"]
    )
    assert verdict.activation is not None
    assert verdict.activation.activated
    assert run.activate(1).state == "succeeded"
    assert run.view().active.version == 1
    assert [p.state for p in run.policies()] == ["retired", "active"]


def test_an_activation_that_is_given_up_is_raised(coordinator: Coordinator, tmp_path: Path) -> None:
    run = new_run(coordinator)
    new_worker(run)
    run.publish(version=1, parent_version=0, folder=write_adapter(tmp_path / "a"), base_model=BASE)
    run.open_activation(1, "try-1")
    run.give_up("try-1", "found a bug")
    with pytest.raises((NotActivated, Refused)):
        run.activate(1, "try-1")
