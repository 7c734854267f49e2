"""The backup that docs/backup.md describes, taken while all are at work, brings everything back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from coordinator.client import Coordinator, Run, Worker
from coordinator.storage.postgres_programs import installed_programs
from coordinator.wire.rollouts import Reward
from tests.client.runs import BASE, group, new_run, new_worker, reward, rewarded_groups, write_adapter
from tests.client.server_process import ServerProcess
from tests.database import Databases

ROOT = Path(__file__).parents[2]
COPYING, RESTORING = 0, 3
"""Which blocks of the page they are; after the first comes that for Compose, and the one that finds pg_dump."""
STATES = {"generated", "reward_failed", "rewarded", "reserved", "consumed", "quarantined"}


def plain(url: str) -> str:
    """The address as Postgres' own programs want it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def play(number: int, folder: Path, **environment: str) -> str:
    """Runs a block of the page, by its place among the blocks, in this folder; what it printed."""
    blocks = (ROOT / "docs" / "backup.md").read_text(encoding="utf-8").split("```bash\n")[1:]
    # This release's own commands, and Postgres' programs, before any that the machine has.
    path = f"{Path(sys.executable).parent}:{installed_programs() / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", blocks[number].split("```")[0]],
        cwd=folder, env=os.environ | environment | {"PATH": path}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    started: list[ServerProcess] = []
    yield started
    for server in started:
        server.stop()


def in_every_state(run: Run, worker: Worker) -> None:
    """A rollout in each state, the update `step-1` committed, `step-3` open, and version 1 made of the first."""
    rewarded_groups(run, worker, 3)
    with run.update("step-1") as update:
        candidates = update.candidates(groups=1)
        update.reserve(candidates, [row.copy() for row in candidates.behavior_log_probs])
        update.commit()
    with run.update("step-2") as update:
        candidates = update.candidates(groups=1)
        update.reserve(candidates, [row.copy() for row in candidates.behavior_log_probs])
        update.abort("a bad step", quarantine=True)
    held = run.update("step-3").__enter__()  # it stays open, with what it holds
    candidates = held.candidates(groups=1)
    held.reserve(candidates, [row.copy() for row in candidates.behavior_log_probs])
    rewarded_groups(run, worker, 1, "waits")
    active = run.view().active
    run.submit([*group(worker, active, "unscored"), *group(worker, active, "failed")])
    timeout = Reward(rollout_id="failed:0.0", status="timeout", ruleset_id="count", ruleset_hash="d" * 64)
    assert [verdict.verdict for verdict in run.reward([timeout]).verdicts] == ["recorded_failure"]


@contextmanager
def at_work(run: Run, worker: Worker, folder: Path) -> Iterator[None]:
    """Rollouts, rewards and versions without a pause, on a thread."""
    done, begun, faults = threading.Event(), threading.Event(), list[Exception]()

    def work() -> None:
        number = 1
        try:
            while not done.is_set():
                number += 1
                rollouts = group(worker, run.view().active, f"meanwhile-{number}")
                run.submit(rollouts)
                reward(run, rollouts)
                files = write_adapter(folder / str(number), b"%d" % number)
                run.publish(version=number, parent_version=number - 1, folder=files, base_model=BASE)
                begun.set()
        except Exception as error:  # noqa: BLE001 - the test looks at them
            faults.append(error)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert faults == []


def test_a_dump_and_the_artifact_folder_bring_everything_back(
    postgres: Databases, database_url: str, tmp_path: Path, servers: list[ServerProcess]
) -> None:
    old = ServerProcess(tmp_path / ".data", plain(database_url))
    servers.append(old)
    old.start()
    token = old.token
    with Coordinator(old.url, token) as coordinator:
        run = new_run(coordinator, min_usable=1)
        worker = new_worker(run)
        in_every_state(run, worker)
        folder = write_adapter(tmp_path / "adapter")
        run.publish(version=1, parent_version=0, updates=["step-1"], folder=folder, base_model=BASE)
        before = run.lineage("step-1")
        with at_work(run, worker, tmp_path / "versions"):
            play(COPYING, tmp_path, DATABASE_URL=plain(database_url))
        written = run.counts().rollouts
    old.kill()  # the machine is gone
    fresh = plain(postgres.empty())
    said = play(RESTORING, tmp_path, NEW_URL=fresh)
    assert "breaches 0" in said
    new = ServerProcess(tmp_path / "new", fresh)
    servers.append(new)
    new.start()
    with Coordinator(new.url, token) as coordinator:
        run = coordinator.run(run.id)
        counts = run.counts().rollouts
        assert {state for state, count in counts.items() if count} >= STATES, counts
        assert 0 < sum(counts.values()) <= sum(written.values())
        assert run.lineage("step-1") == before
        # Each version that the dump has as committed has its files.
        for policy in run.policies():
            if policy.kind != "base" and policy.state == "committed":
                run.download(policy.version, tmp_path / "downloaded" / str(policy.version))
        # And work goes on.
        with run.update("step-4") as update:
            candidates = update.candidates(groups=1)
            update.reserve(candidates, [row.copy() for row in candidates.behavior_log_probs])
            update.commit()
    for file in (f for f in folder.rglob("*") if f.is_file()):
        assert (tmp_path / "downloaded" / "1" / file.relative_to(folder)).read_bytes() == file.read_bytes()
