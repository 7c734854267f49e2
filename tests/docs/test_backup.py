"""The backup that docs/operating.md describes brings everything back: rows, tokens and artifacts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from coordinator.client import Coordinator
from coordinator.storage.postgres_programs import installed_programs
from tests.client.runs import BASE, new_run, new_worker, rewarded_groups, write_adapter
from tests.client.server_process import ServerProcess
from tests.database import Databases


def plain(url: str) -> str:
    """The address as Postgres' own programs want it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def program(name: str, *arguments: str) -> None:
    subprocess.run([str(installed_programs() / "bin" / name), *arguments], check=True, timeout=60)


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    started: list[ServerProcess] = []
    yield started
    for server in started:
        server.stop()


def test_a_dump_and_the_artifact_folder_bring_everything_back(
    postgres: Databases, database_url: str, tmp_path: Path, servers: list[ServerProcess]
) -> None:
    old = ServerProcess(tmp_path / "old", plain(database_url))
    servers.append(old)
    old.start()
    token = old.token
    with Coordinator(old.url, token) as coordinator:
        run = new_run(coordinator)
        rewarded_groups(run, new_worker(run), 1)
        with run.update("step-1") as update:
            candidates = update.candidates(groups=1)
            update.reserve(candidates, [row.copy() for row in candidates.behavior_log_probs])
            update.commit()
        folder = write_adapter(tmp_path / "adapter")
        run.publish(version=1, parent_version=0, updates=["step-1"], folder=folder, base_model=BASE)
        before = run.lineage("step-1")

    # The old coordinator goes on: a backup needs no pause.
    program("pg_dump", "--format=custom", f"--file={tmp_path / 'coordinator.dump'}", plain(database_url))
    shutil.copytree(old.data / "artifacts", tmp_path / "new" / "artifacts")
    fresh = plain(postgres.empty())
    program("pg_restore", "--no-owner", f"--dbname={fresh}", str(tmp_path / "coordinator.dump"))

    new = ServerProcess(tmp_path / "new", fresh)
    servers.append(new)
    new.start()
    with Coordinator(new.url, token) as coordinator:
        run = coordinator.run(run.id)
        assert run.lineage("step-1") == before
        run.download(1, tmp_path / "downloaded")
    for file in (f for f in folder.rglob("*") if f.is_file()):
        assert (tmp_path / "downloaded" / file.relative_to(folder)).read_bytes() == file.read_bytes()
