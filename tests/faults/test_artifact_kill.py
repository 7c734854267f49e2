"""Coordinators that are killed, and disks that are full, while artifacts are uploaded and verified."""

from __future__ import annotations

import hashlib
import itertools
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from coordinator.client import Coordinator, Refused, Run
from coordinator.wire.policies import ArtifactFile, PolicyView, PreparePolicy
from tests.client.runs import BASE, new_run
from tests.client.server_process import ServerProcess

MB = 1_000_000
LARGE = 1 << 30


@pytest.fixture
def pair(database_url: str) -> Iterator[list[ServerProcess]]:
    """Two coordinators over one database and one folder of artifacts."""
    folder = Path(tempfile.mkdtemp(prefix="coordinator-artifacts-"))
    servers = [ServerProcess(folder / name, database_url) for name in ("one", "two")]
    (folder / "artifacts").mkdir()
    for server in servers:
        server.data.mkdir()
        (server.data / "artifacts").symlink_to(folder / "artifacts")
        server.start()
    yield servers
    for server in servers:
        server.stop()
    shutil.rmtree(folder)


def write_model(folder: Path, size: int) -> bytes:
    content = os.urandom(size)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return content


def test_an_upload_goes_on_at_the_other_replica_when_its_own_is_killed(
    pair: list[ServerProcess], tmp_path: Path
) -> None:
    content = write_model(tmp_path / "v", 20 * MB)
    sent: list[int] = []

    def kill_midway(name: str, count: int, size: int) -> None:
        sent.append(count)
        if count > 12 * MB and not killed:
            killed.append(pair[0].pid)
            pair[0].kill()

    killed: list[int] = []
    with Coordinator(f"{pair[0].url},{pair[1].url}", pair[1].token) as coordinator:
        run = new_run(coordinator)
        view = run.publish(version=1, parent_version=0, folder=tmp_path / "v", base_model=BASE, progress=kill_midway)
        assert (view.state, len(killed)) == ("committed", 1)
        run.download(1, tmp_path / "w")
    assert (tmp_path / "w" / "model.safetensors").read_bytes() == content
    # It was not begun anew: what the other replica asked for lies near to where the first one was.
    broke_at = next(i for i, (a, b) in enumerate(itertools.pairwise(sent)) if b <= a)
    assert sent[broke_at + 1] > 4 * MB


def prepare_sparse(run: Run, server: ServerProcess, version: int) -> ArtifactFile:
    """A version whose file, a gigabyte of almost nothing but zeros, lies in the store already."""
    digest = hashlib.sha256(version.to_bytes(8, "big"))
    for _ in range((LARGE - 8) // (1 << 20)):
        digest.update(bytes(1 << 20))
    digest.update(bytes((LARGE - 8) % (1 << 20)))
    file = ArtifactFile(name="model.safetensors", size=LARGE, sha256=digest.hexdigest())
    body = PreparePolicy(version=version, parent_version=0, kind="full", base_model=BASE, files=(file,))
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
    url = f"{server.url}/v1/runs/{run.id}/policies"
    assert httpx.post(url, content=body.model_dump_json(), headers=headers, trust_env=False).status_code == 201
    path = server.data / "artifacts" / file.sha256[:2] / file.sha256
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:
        stream.write(version.to_bytes(8, "big"))
        stream.truncate(LARGE)
    return file


def ask_and_kill(run: Run, server: ServerProcess, version: int) -> None:
    """Asks for the commit, and kills the coordinator as soon as it has said that it verifies."""
    headers = {"Authorization": f"Bearer {server.token}"}
    url = f"{server.url}/v1/runs/{run.id}/policies/{version}/commit"
    response = httpx.post(url, headers=headers, trust_env=False)
    server.kill()
    assert response.status_code == 202
    assert response.json()["verification"]["state"] == "running"


def verified(run: Run, version: int) -> PolicyView:
    until = time.monotonic() + 60
    while True:
        view = run.policy(version)
        assert view.verification is not None
        if view.verification.state != "running":
            return view
        assert time.monotonic() < until, view
        time.sleep(0.1)


@pytest.mark.parametrize("damaged", [False, True])
def test_the_other_replica_ends_the_verification_of_one_that_is_killed(
    pair: list[ServerProcess], damaged: bool
) -> None:
    with Coordinator(pair[1].url, pair[1].token) as coordinator:
        run = new_run(coordinator)
        file = prepare_sparse(run, pair[0], 1)
        if damaged:
            path = pair[0].data / "artifacts" / file.sha256[:2] / file.sha256
            with path.open("r+b") as stream:
                stream.seek(LARGE - 1)
                stream.write(b"x")
        ask_and_kill(run, pair[0], 1)
        assert run.policy(1).state == "prepared", "the coordinator was faster than its death"
        view = verified(run, 1)
        if damaged:
            assert (view.state, view.verification and view.verification.faulty) == ("prepared", (file.name,))
        else:
            assert view.state == "committed"
        events = [e.event for e in run.journal()]
        assert events.count("policy.committed") == (0 if damaged else 1)


def test_a_verification_goes_on_after_the_only_coordinator_was_killed(database_url: str, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", database_url)
    server.start()
    with Coordinator(server.url, server.token) as coordinator:
        run = new_run(coordinator)
        prepare_sparse(run, server, 1)
        ask_and_kill(run, server, 1)
        server.start()
        assert run.counts().rollouts["generated"] == 0
        assert verified(run, 1).state == "committed"
    server.stop()


def test_a_disk_that_is_full_is_said_and_nothing_stays_behind(database_url: str, tmp_path: Path) -> None:
    """No file of this process may grow beyond 4 MB, as if the disk ended there."""
    server = ServerProcess(tmp_path / "data", database_url)
    server.start()
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (4 * MB, resource.RLIM_INFINITY))
    with Coordinator(server.url, server.token) as coordinator:
        run = new_run(coordinator)
        content = write_model(tmp_path / "v", 10 * MB)
        with pytest.raises(Refused) as caught:
            run.publish(version=1, parent_version=0, folder=tmp_path / "v", base_model=BASE)
        assert (caught.value.code, caught.value.status) == ("no_space", 507)
        assert [p.name for p in (server.data / "artifacts").rglob("*") if p.is_file()] == []
        assert run.counts().rollouts["generated"] == 0
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert run.publish(version=1, parent_version=0, folder=tmp_path / "v", base_model=BASE).state == "committed"
        run.download(1, tmp_path / "w")
        assert (tmp_path / "w" / "model.safetensors").read_bytes() == content
    server.stop()
