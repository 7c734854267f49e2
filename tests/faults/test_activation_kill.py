"""The coordinator is killed between each pair of steps of an activation, and in the middle of each."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from coordinator.client import Coordinator, Run, Worker
from coordinator.storage.postgres import EmbeddedPostgres
from tests.client.runs import BASE, new_run, new_worker, write_adapter
from tests.client.server_process import ServerProcess
from tests.ledger_checker import check_ledger

ROUNDS = 4


@pytest.fixture
def owner() -> Iterator[ServerProcess]:
    """A coordinator with a Postgres of its own, both killed together."""
    folder = Path(tempfile.mkdtemp(prefix="coordinator-activation-"))
    folder.chmod(0o755)  # as root, Postgres runs as another user
    server = ServerProcess(folder / "data")
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def standing(run: Run) -> object:
    """All that an activation is made of."""
    watch = run.watch(-1, 0)
    return (
        watch.active,
        watch.candidate,
        [p.model_dump() for p in run.policies()],
        [a.model_dump() for a in run.activations()],
        [(w.worker_id, w.incarnation, w.fenced_reason) for w in run.workers()],
    )


def steps(run: Run, workers: list[Worker], folder: Path, version: int) -> list[Callable[[], object]]:
    """From nothing to active; each may be sent again."""
    publish = partial(run.publish, version=version, parent_version=version - 1, folder=folder, base_model=BASE)

    def ack(worker: Worker) -> object:
        return worker.ack(version, run.policy(version).artifact_hash)

    return [
        publish,
        partial(run.open_activation, version, f"a{version}"),
        *(partial(worker.stage, version, "loading") for worker in workers),
        *(partial(ack, worker) for worker in workers),
    ]


def test_killed_between_each_pair_of_steps_it_stands_as_before(owner: ServerProcess, tmp_path: Path) -> None:
    kills = 0
    with Coordinator(owner.url, owner.token) as coordinator:
        run = new_run(coordinator, lost_after_seconds=3600)  # nobody sends heartbeats here
        workers = [new_worker(run, f"w{n}") for n in range(2)]
        for number, step in enumerate(steps(run, workers, write_adapter(tmp_path / "one", b"1"), 1)):
            step()
            before = standing(run)
            owner.kill()
            owner.start()
            kills += 1
            assert standing(run) == before, f"after step {number}"
        assert run.view().active.version == 1
    assert kills == 6
    url = EmbeddedPostgres(owner.data / "postgres", progress=lambda _: None).start()
    assert check_ledger(url) == []


@pytest.mark.long
def test_killed_in_the_middle_of_each_step_the_client_gets_through_and_nothing_is_half_done(
    owner: ServerProcess, tmp_path: Path
) -> None:
    kills = 0
    with Coordinator(owner.url, owner.token) as coordinator:
        run = new_run(coordinator, lost_after_seconds=3600)  # nobody sends heartbeats here
        workers = [new_worker(run, f"w{n}") for n in range(2)]
        for version in range(1, ROUNDS + 1):
            folder = write_adapter(tmp_path / str(version), b"%d" % version)
            for step in steps(run, workers, folder, version):
                failed: list[BaseException] = []
                thread = threading.Thread(target=kept, args=(step, failed))
                thread.start()
                time.sleep(0.004 * (kills % 5))
                owner.kill()
                kills += 1
                owner.start()
                thread.join(60)
                assert not thread.is_alive()
                assert failed == []
                active = [p.version for p in run.policies() if p.state == "active"]
                assert active == [run.view().active.version]
            assert run.view().active.version == version
    assert kills == 6 * ROUNDS
    url = EmbeddedPostgres(owner.data / "postgres", progress=lambda _: None).start()
    assert check_ledger(url) == []


def kept(step: Callable[[], object], failed: list[BaseException]) -> None:
    try:
        step()
    except BaseException as error:  # noqa: BLE001 - looked at by the test
        failed.append(error)
