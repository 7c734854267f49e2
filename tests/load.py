"""A load of client processes over one run, and what they were told in the end. The client is `load_client.py`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator.client import Coordinator, Run
from coordinator.errors import is_connection_fault
from coordinator.rollouts import retention
from coordinator.storage.database import connect
from coordinator.wire.policies import PolicyRef
from tests.client.runs import BASE, new_run
from tests.ledger_checker import Acknowledged

CLIENT = Path(__file__).with_name("load_client.py")
SETTINGS = {"group_size": 4, "max_lag": 2, "update_lease_seconds": 1.5, "hold_seconds": 1.0, "lost_after_seconds": 600}


def start_run(coordinator: Coordinator, run_id: str, **settings: object) -> Run:
    """A run for this load."""
    return new_run(coordinator, run_id, **SETTINGS | settings)


class Clients:
    """The client processes of one load, started together."""

    def __init__(self, folder: Path, run: Run, servers: Sequence[tuple[str, str]]) -> None:
        self._folder, self._run_id, self._servers = folder, run.id, servers
        self._end = folder / "end"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, name: str) -> None:
        addresses = [part for server in self._servers for part in server]
        report = str(self._folder / f"{name}.report")
        with (self._folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(CLIENT), role, name, self._run_id, report, str(self._end), *addresses],
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        """Ends whoever still runs, as after a failed test."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def count(self, *kinds: str) -> int:
        """How many acknowledgements of these kinds there are so far."""
        reports = [report.read_text() for report in self._folder.glob("*.report")]
        return sum(text.count(f'["{kind}"') for text in reports for kind in kinds)

    def wait_for(self, kind: str, count: int, seconds: float = 120) -> None:
        """Waits for progress, on a machine of any speed."""
        until = time.monotonic() + seconds
        while self.count(kind) < count:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended: {(self._folder / f'{name}.log').read_text()[-1500:]}"
            assert time.monotonic() < until, f"{self.count(kind)} of {count} acknowledgements of a {kind}"
            time.sleep(0.1)

    def told(self) -> tuple[Acknowledged, list[str], list[str]]:
        """Lets all of them end: what they were told, their faults, and their retries."""
        self._end.touch()
        faults = []
        for name, process in self.processes.items():
            code = process.wait(90)
            if code != 0:
                faults.append(f"{name} ended with {code}: {(self._folder / f'{name}.log').read_text()[-1500:]}")
        told, said, retries = self.so_far()
        return told, [*faults, *said], retries

    def so_far(self) -> tuple[Acknowledged, list[str], list[str]]:
        """What they were told until now, the faults that they named, and their retries."""
        told, faults, retries = Acknowledged(), [], []
        for name in self.processes:
            report = self._folder / f"{name}.report"
            # The last line may be half written.
            for line in report.read_text().split("\n")[:-1] if report.exists() else ():
                match json.loads(line):
                    case ["rollout", rollout_id]:
                        told.rollouts.add(rollout_id)
                    case ["reward", rollout_id, value]:
                        told.rewards[rollout_id] = value
                    case ["reserve", update_id, rollout_id, revision]:
                        told.reserves.add((update_id, rollout_id, revision))
                    case ["commit", update_id, number]:
                        told.commits[update_id] = number
                    case ["active", version]:
                        told.versions.add(version)
                    case ["retry", text]:
                        retries.append(f"{name}: {text}")
                    case ["fault", text]:
                        faults.append(f"{name}: {text}")
        return told, faults, retries


class Retention:
    """Retention of a database again and again on a thread, as the clock of one more replica in more of a hurry."""

    def __init__(self, database_url: str) -> None:
        self._url = database_url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._sweep()), name="retention")
        self.faults: list[BaseException] = []
        self.dropped = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    async def _sweep(self) -> None:
        database = connect(self._url, pool_size=1)
        try:
            while not self._ended.is_set():
                try:
                    self.dropped += sum((await retention.sweep(database)).values())
                except Exception as error:  # noqa: BLE001 - the test looks at them
                    if not is_connection_fault(error):
                        self.faults.append(error)
                await asyncio.sleep(0.3)
        finally:
            await database.close()


def publish(run: Run, folder: Path, version: int) -> PolicyRef:
    """Makes and activates the next version of a single small file."""
    files = folder / f"version-{version}"
    files.mkdir(parents=True, exist_ok=True)
    (files / "adapter.bin").write_bytes(b"%d" % version)
    run.publish(version=version, parent_version=version - 1, folder=files, base_model=BASE)
    activation = run.activate(version, f"activate-{version}")
    return PolicyRef(version=activation.version, artifact_hash=run.policy(version).artifact_hash)
