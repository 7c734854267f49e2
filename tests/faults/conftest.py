"""Two coordinator processes over one database, to be killed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.server_process import ServerProcess
from tests.database import Databases


@pytest.fixture
def replica_pair(postgres: Databases) -> Iterator[tuple[str, list[ServerProcess]]]:
    """The database's address and the replicas, which share a folder of artifacts."""
    url = postgres.migrated()
    folder = Path(tempfile.mkdtemp(prefix="coordinator-pair-"))
    servers = [ServerProcess(folder / name, url) for name in ("one", "two")]
    (folder / "artifacts").mkdir()
    try:
        for server in servers:
            server.data.mkdir()
            (server.data / "artifacts").symlink_to(folder / "artifacts")
            server.start()
        yield url, servers
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(folder)
