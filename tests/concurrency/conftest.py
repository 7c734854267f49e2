"""Two coordinator processes over one database and one folder of artifacts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.client import Coordinator
from tests.client.server_process import ServerProcess
from tests.database import Databases


@pytest.fixture(scope="session")
def replicated_url(postgres: Databases) -> str:
    """The database that the replicas share."""
    return postgres.migrated()


@pytest.fixture(scope="session")
def replicas(replicated_url: str) -> Iterator[list[ServerProcess]]:
    folder = Path(tempfile.mkdtemp(prefix="coordinator-replicas-"))
    servers = [ServerProcess(folder / name, replicated_url) for name in ("one", "two")]
    (folder / "artifacts").mkdir()
    try:
        for server in servers:
            server.data.mkdir()
            (server.data / "artifacts").symlink_to(folder / "artifacts")
            server.start()
        yield servers
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(folder)


@pytest.fixture
def coordinators(replicas: list[ServerProcess]) -> Iterator[list[Coordinator]]:
    clients = [Coordinator(server.url, server.token) for server in replicas]
    yield clients
    for client in clients:
        client.close()
