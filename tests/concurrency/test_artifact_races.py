"""Files that retention removes while others name, upload and download the same bytes, on two replicas."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.client import Coordinator, Refused, Run
from coordinator.policies import removal
from coordinator.storage.artifacts import ArtifactStore
from tests.client.runs import BASE, new_run, new_worker
from tests.client.server_process import ServerProcess
from tests.concurrency.together import Retention, at_once, codes, everywhere

SOON = {"artifact_retention_seconds": 0.001}


@pytest.fixture
def sweeping(replicated_url: str, replicas: list[ServerProcess]) -> Iterator[Callable[[], removal.Removed]]:
    """Removal as one more replica's clock would do it, over the folder that all share."""
    store = ArtifactStore((replicas[0].data / "artifacts").resolve())
    with Retention(replicated_url) as clock:
        yield lambda: clock.removal(store)
    store.close()


@contextmanager
def again_and_again(work: Callable[[], object]) -> Iterator[None]:
    """Until the block ends; what it raises is raised there."""
    ended = threading.Event()
    faults: list[BaseException] = []

    def run() -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as fault:  # told below
            faults.append(fault)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert faults == []


def give_up(run: Run, version: int) -> None:
    """Ends the version, so that retention removes its files."""
    run.open_activation(version, f"a{version}")
    run.give_up(f"a{version}", "it was only to end")


def folder_of(path: Path, content: bytes) -> Path:
    path.mkdir()
    (path / "model").write_bytes(content)
    return path


def test_bytes_that_somebody_names_again_while_they_go_are_there_when_it_has_committed(
    coordinators: list[Coordinator], sweeping: Callable[[], removal.Removed], tmp_path: Path
) -> None:
    """What a version ended with is published again, by its own run and by another, while the files are removed."""
    ending = everywhere(coordinators, **SOON)
    keeping = [coordinators[1].run(new_run(coordinators[0]).id), coordinators[0].run(new_run(coordinators[0]).id)]
    new_worker(ending[0])
    removed = 0

    def sweep() -> None:
        nonlocal removed
        removed += sweeping().files

    with again_and_again(sweep):
        for number in range(1, 41):
            content = os.urandom(20_000)
            folder = folder_of(tmp_path / str(number), content)
            ending[0].publish(version=number, parent_version=0, folder=folder, base_model=BASE)
            give_up(ending[1], number)  # from now on its files may go

            def keep(run: Run, number: int = number, folder: Path = folder) -> None:
                run.publish(version=number, parent_version=number - 1, folder=folder, base_model=BASE)

            assert codes(at_once(*(lambda run=run: keep(run) for run in keeping))) == {"ok": 2}
            for index, run in enumerate(keeping):
                into = tmp_path / f"{number}-{index}"
                run.download(number, into)
                assert (into / "model").read_bytes() == content
    assert removed > 0


def test_what_nobody_names_any_more_is_gone_and_a_download_ends_whole_or_is_refused(
    coordinators: list[Coordinator],
    replicas: list[ServerProcess],
    sweeping: Callable[[], removal.Removed],
    tmp_path: Path,
) -> None:
    runs = everywhere(coordinators, **SOON)
    new_worker(runs[0])
    met: set[str] = set()
    removed = 0
    for number in range(1, 21):
        content = os.urandom(400_000)
        runs[0].publish(
            version=number, parent_version=0, folder=folder_of(tmp_path / str(number), content), base_model=BASE
        )

        def download(run: Run, into: Path, number: int = number) -> None:
            run.download(number, into)

        def end(number: int = number) -> None:
            nonlocal removed
            give_up(runs[1], number)
            removed += sweeping().files

        targets = [tmp_path / f"{number}-{index}" for index in range(2)]
        outcomes = at_once(
            end, *(lambda run=run, into=into: download(run, into) for run, into in zip(runs, targets, strict=True))
        )
        assert codes(outcomes[:1]) == {"ok": 1}
        for outcome, into in zip(outcomes[1:], targets, strict=True):
            met.add(outcome.code if isinstance(outcome, Refused) else "ok")
            assert into.exists() != isinstance(outcome, Refused)
            if into.exists():
                assert (into / "model").read_bytes() == content
    assert removed + sweeping().files >= 15  # a replica's clock may have been first
    assert met <= {"ok", "artifact_file_missing"}
    views = runs[0].policies()
    assert all(view.files_removed_at is not None for view in views[1:])
    store = ArtifactStore((replicas[0].data / "artifacts").resolve())
    assert not [f for view in views for f in view.files if store.has(f.sha256, f.size)]
    store.close()


def test_the_same_bytes_from_four_publishers_at_once(
    coordinators: list[Coordinator], replicas: list[ServerProcess], tmp_path: Path
) -> None:
    runs = [coordinators[index % 2].run(new_run(coordinators[0]).id) for index in range(2)]
    runs += [coordinators[1].run(runs[0].id), coordinators[0].run(runs[1].id)]
    for number in range(1, 4):
        content = os.urandom(3_000_000)
        folder = folder_of(tmp_path / str(number), content)

        def publish(run: Run, number: int = number, folder: Path = folder) -> None:
            run.publish(version=number, parent_version=number - 1, folder=folder, base_model=BASE)

        assert codes(at_once(*(lambda run=run: publish(run) for run in runs))) == {"ok": 4}
        for index, run in enumerate(runs):
            run.download(number, tmp_path / f"{number}-{index}")
            assert (tmp_path / f"{number}-{index}" / "model").read_bytes() == content
    assert list((replicas[0].data / "artifacts").glob("upload-*")) == []
