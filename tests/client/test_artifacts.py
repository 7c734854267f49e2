"""Artifacts over wires that break, in stores that are damaged, and at places of their own."""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.client import ArtifactCorrupt, Coordinator, Refused, Unreachable
from coordinator.client import slow as slow_module
from tests.client.cutting import Cutting
from tests.client.runs import BASE, new_run, write_adapter
from tests.client.server_process import ServerProcess

MB = 1_000_000


def write_large(folder: Path, size: int = 12 * MB) -> bytes:
    """One file of bytes that no other test has."""
    content = random.Random(os.urandom(8)).randbytes(size)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    return content


def stored(server: ServerProcess, content: bytes) -> Path:
    sha256 = hashlib.sha256(content).hexdigest()
    return server.data / "artifacts" / sha256[:2] / sha256


def test_an_upload_goes_on_from_where_it_broke_off(server: ServerProcess, tmp_path: Path) -> None:
    content = write_large(tmp_path / "v")
    with (
        Cutting(server.url, up=[5 * MB, 4 * MB]) as wire,
        Coordinator(wire.url, server.token) as coordinator,
    ):
        run = new_run(coordinator)
        view = run.publish(version=1, parent_version=0, folder=str(tmp_path / "v"), base_model=BASE)
        assert (view.state, wire.cuts_left) == ("committed", 0)
        assert stored(server, content).read_bytes() == content
        # What was under way on the wire when it broke is sent twice, and not the rest.
        assert len(content) < wire.carried["up"] < len(content) + 8 * MB
        carried = wire.carried["up"]
        run.publish(version=2, parent_version=1, folder=tmp_path / "v", base_model=BASE)
        assert wire.carried["up"] - carried < MB


def test_a_download_goes_on_from_where_it_broke_off(server: ServerProcess, tmp_path: Path) -> None:
    content = write_large(tmp_path / "v")
    seen: list[int] = []
    with (
        Cutting(server.url, down=[5 * MB, 4 * MB]) as wire,
        Coordinator(wire.url, server.token) as coordinator,
    ):
        run = new_run(coordinator)
        run.publish(version=1, parent_version=0, folder=tmp_path / "v", base_model=BASE)
        run.download(1, str(tmp_path / "w"), progress=lambda _, count, size: seen.append(count))
        assert wire.cuts_left == 0
        assert wire.carried["down"] < len(content) + 2 * MB
    assert (tmp_path / "w" / "model.safetensors").read_bytes() == content
    assert seen == sorted(seen)


def test_a_wire_that_lets_nothing_through_is_given_up(server: ServerProcess, tmp_path: Path) -> None:
    """Bytes that were sent and never arrive do not keep an upload going for ever."""
    write_large(tmp_path / "v", 3 * MB)
    with (
        Cutting(server.url, up=[1500] * 1000) as wire,
        Coordinator(server.url, server.token) as direct,
        Coordinator(wire.url, server.token, retry_seconds=3) as coordinator,
    ):
        run = coordinator.run(new_run(direct).id)
        with pytest.raises(Unreachable):
            run.publish(version=1, parent_version=0, folder=tmp_path / "v", base_model=BASE)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(MB)
        byte = file.read(1)
        file.seek(MB)
        file.write(bytes([byte[0] ^ 1]))


def swap(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(b"s" * size)


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, swap])
def test_what_changed_after_the_commit_is_found_by_whoever_downloads_it_and_named(
    coordinator: Coordinator, server: ServerProcess, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run = new_run(coordinator)
    content = write_large(tmp_path / "v" / "deep", 2 * MB)
    (tmp_path / "v" / "config.json").write_text("{}")
    run.publish(version=1, parent_version=0, folder=tmp_path / "v", base_model=BASE)
    stored(server, content).chmod(0o600)
    damage(stored(server, content))
    with pytest.raises(ArtifactCorrupt, match=r"^deep/model\.safetensors is 1?\d{6,7} bytes"):
        run.download(1, tmp_path / "w")
    assert not (tmp_path / "w").exists()
    # The next version with this file finds the damage, and mends it.
    view = run.publish(version=2, parent_version=1, folder=tmp_path / "v", base_model=BASE)
    assert view.state == "committed"
    run.download(1, tmp_path / "w")
    assert (tmp_path / "w" / "deep" / "model.safetensors").read_bytes() == content


def test_what_an_earlier_upload_left_damaged_is_sent_anew(
    coordinator: Coordinator, server: ServerProcess, tmp_path: Path
) -> None:
    """As a machine that lost its power may leave it: as long as it was, and not what it was."""
    run = new_run(coordinator)
    content = write_large(tmp_path / "v", 3 * MB)
    sha256 = hashlib.sha256(content).hexdigest()
    (server.data / "artifacts" / f"upload-{sha256}~{run.id}~left").write_bytes(bytes(MB))
    assert run.publish(version=1, parent_version=0, folder=tmp_path / "v", base_model=BASE).state == "committed"
    assert stored(server, content).read_bytes() == content


def test_a_file_that_changes_while_it_is_published_is_no_success(coordinator: Coordinator, tmp_path: Path) -> None:
    run = new_run(coordinator)
    for number, (change, fault) in enumerate(((cut_short, ValueError), (swap, Refused))):
        folder = tmp_path / str(number)
        write_large(folder, 3 * MB)
        (folder / "a_first").write_bytes(b"x")
        path = folder / "model.safetensors"

        def once(name: str, count: int, size: int, path: Path = path, change: Callable[[Path], None] = change) -> None:
            if name == "a_first":
                change(path)

        with pytest.raises(fault):
            run.publish(version=number + 1, parent_version=0, folder=folder, base_model=BASE, progress=once)
        assert run.policy(number + 1).state == "prepared"


def test_what_takes_long_says_how_far_it_is(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow_module, "SAY_EVERY_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "coordinator.client")
    run = new_run(coordinator)
    write_large(tmp_path / "v", 70 * MB)
    view = run.publish(version=1, parent_version=0, folder=tmp_path / "v", base_model=BASE)
    assert view.verification is not None
    assert (view.verification.state, view.verification.bytes_done) == ("passed", 70 * MB)
    run.download(1, tmp_path / "w")
    said = [record.getMessage() for record in caplog.records]
    for what in (f"{tmp_path / 'v'} is hashed", "model.safetensors is uploaded", "version 1 is downloaded"):
        assert f"{what}: 70.0 of 70.0 MB, 100 %" in said
    assert any(line.startswith("version 1 is verified: ") for line in said)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def neighbour(shared: Path, database_url: str, tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator that allows artifacts in a folder of this machine."""
    server = ServerProcess(tmp_path / "data", database_url, artifact_uris=f"memory://models, file://{shared}")
    server.start()
    with Coordinator(server.url, server.token) as coordinator:
        yield coordinator
    server.stop()


def test_files_at_a_uri_are_read_there_by_everybody(neighbour: Coordinator, shared: Path, tmp_path: Path) -> None:
    run = new_run(neighbour)
    source = write_adapter(shared / "v1")
    view = run.publish(version=1, parent_version=0, folder=source, base_model=BASE, uri=f"file://{source}")
    assert (view.state, view.uri) == ("committed", f"file://{source}")
    run.download(1, tmp_path / "w")
    assert (tmp_path / "w" / "more files" / "empty").read_bytes() == b""
    assert (tmp_path / "w" / "adapter_model.safetensors").read_bytes() == b"weights" * 300_000
    swap(source / "adapter_model.safetensors")
    with pytest.raises(ArtifactCorrupt, match=r"^adapter_model\.safetensors is 2100000 bytes"):
        run.download(1, tmp_path / "x")
    with pytest.raises(Refused) as caught:
        run.publish(version=2, parent_version=1, folder=write_adapter(tmp_path / "y"), base_model=BASE, uri=view.uri)
    assert caught.value.code == "artifact_incomplete"
    assert "adapter_model.safetensors" in caught.value.detail
    (source / "adapter_config.json").unlink()
    with pytest.raises(ArtifactCorrupt, match=r"^adapter_config\.json is not at file://"):
        run.download(1, tmp_path / "z")
