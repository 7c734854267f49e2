"""One coordinator for the tests of this folder, and its command line called within the test's own process."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from coordinator.cli import main
from coordinator.client import Coordinator, Run
from tests.client.runs import group, new_run, new_worker, rewarded_groups
from tests.client.server_process import ServerProcess


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as the one JSON document that it is."""
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """Standard output as a table without its head; cells have two blanks or more between them."""
        return [re.split(r" {2,}", line) for line in self.out.splitlines()[1:]]


Command = Callable[..., Ended]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("cli") / "data")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def coordinator(server: ServerProcess) -> Iterator[Coordinator]:
    with Coordinator(server.url, server.token) as coordinator:
        yield coordinator


@pytest.fixture(scope="session")
def sums(server: ServerProcess) -> Iterator[Run]:
    """A run to be read: one committed update, one that two of four rollouts drifted in, one that is open."""
    with Coordinator(server.url, server.token, owner="trainer-0") as coordinator:
        run = new_run(coordinator, "sums", drift_gate="enforce")
        worker = new_worker(run, "gpu-0")
        rewarded_groups(run, worker, 3)
        with run.update("step-1") as update:
            candidates = update.candidates(groups=1)
            update.reserve(candidates, [np.asarray(row, dtype=np.float64) for row in candidates.behavior_log_probs])
            update.commit()
        with run.update("step-2") as update:
            candidates = update.candidates(groups=1)
            update.reserve(candidates, [np.asarray(row) - 1.0 for row in candidates.behavior_log_probs])
            update.abort("most of it drifted")
        run.submit(group(worker, run.view().active, "unrewarded"))
        yield run


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`coordinator` with these arguments, by `main`, in an environment without settings."""
    for name in list(os.environ):
        if name.startswith("COORDINATOR_") or name == "DATABASE_URL":
            monkeypatch.delenv(name)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["coordinator", *arguments])
        capfd.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Ended(code, out, err)

    return run


@pytest.fixture
def cli(command: Command, server: ServerProcess) -> Command:
    """The same for the coordinator of this folder's tests, found by its data folder."""
    return lambda *arguments: command(*arguments, "--data", str(server.data))
