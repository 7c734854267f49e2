"""What every test may ask for."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.server_process import ServerProcess
from tests.database import Databases, databases

# Threads of several engines that wait for each other on few cores cost more than they bring. Torch reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# By default a sixth of the time of these tests goes into looking for garbage among the engines' million objects.
gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Databases]:
    """One embedded Postgres for this test process."""
    with databases() as server:
        yield server


@pytest.fixture
def database_url(postgres: Databases) -> Iterator[str]:
    """A database of this test's own, at the newest schema."""
    url = postgres.migrated()
    yield url
    postgres.give_back(url)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A coordinator process of this test's own, with an embedded Postgres."""
    server = ServerProcess(tmp_path / "data")
    server.start()
    yield server
    server.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", default=34, type=int, help="kills of a coordinator in tests/faults/test_kill_campaign.py"
    )
    parser.addoption(
        "--model-examples",
        default=None,
        type=int,
        help="random runs of each model in tests/model, new ones each time; left out: the same 40",
    )
