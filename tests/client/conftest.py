"""One coordinator for the tests of this folder, and one of its own for a test that kills it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.client import Coordinator
from tests.client.server_process import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("client") / "data")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def coordinator(server: ServerProcess) -> Iterator[Coordinator]:
    with Coordinator(server.url, server.token) as coordinator:
        yield coordinator


@pytest.fixture
def mortal_server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "data")
    server.start()
    yield server
    server.stop()
