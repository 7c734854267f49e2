"""One coordinator with one run, and one browser, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from coordinator.client import Coordinator
from tests.browser.scene import Scene
from tests.browser.watching import chromium
from tests.client.server_process import ServerProcess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(folder / "data")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def coordinator(server: ServerProcess) -> Iterator[Coordinator]:
    with Coordinator(server.url, server.token) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def scene(coordinator: Coordinator, folder: Path) -> Scene:
    return Scene(coordinator, folder)


@pytest.fixture(scope="module")
def viewer(coordinator: Coordinator) -> str:
    """A token that may only look."""
    return coordinator.create_token("night", "viewer").token


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser
