"""Two coordinator processes over one database, to be killed, and so may be its Postgres."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.server_process import ServerProcess
from tests.database import databases


@pytest.fixture
def replica_pair() -> Iterator[tuple[str, list[ServerProcess]]]:
    """The database's address and the replicas, which share a folder of artifacts.

    The Postgres is their own: after a crash it serves nobody until its recovery, which reads all of its files.
    """
    with databases() as postgres:
        yield from _pair_on(postgres.migrated())


def _pair_on(url: str) -> Iterator[tuple[str, list[ServerProcess]]]:
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
