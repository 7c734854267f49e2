"""One coordinator for the tests of this folder, and its command line called within the test's own process."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.client import Coordinator
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
