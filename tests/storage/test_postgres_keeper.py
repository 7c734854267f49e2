"""An embedded Postgres that dies is started again as what it was, or it is said why not."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from coordinator.storage.postgres import EmbeddedPostgres
from coordinator.storage.postgres_keeper import kept_running


class Said:
    """What the keeper says, to be waited for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._news:
            self.lines.append(line)
            self._news.notify_all()

    def wait_for(self, text: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: any(text in line for line in self.lines), 60), self.lines


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="coordinator-keeper-") as name:
        Path(name).chmod(0o755)  # as root, Postgres runs as another user
        yield Path(name)


def value(url: str, statement: str) -> object:
    async def run() -> object:
        session = await asyncpg.connect(url.replace("+asyncpg", ""))
        try:
            return await session.fetchval(statement)
        finally:
            await session.close()

    return asyncio.run(run())


def main_process(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "data" / "postmaster.pid").read_text().split()[0]))


def kill(folder: Path) -> None:
    main = main_process(folder)
    main.send_signal(signal.SIGKILL)
    until = time.monotonic() + 30
    while main.is_running() and main.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_killed_server_comes_back_on_its_url_with_all_that_was_committed(folder: Path) -> None:
    said = Said()
    with kept_running(EmbeddedPostgres(folder), said) as url:
        value(url, "CREATE TABLE kept AS SELECT 7 AS number")
        kill(folder)
        said.wait_for("Postgres runs again")
        assert value(url, "SELECT number FROM kept") == 7
        assert said.lines == ["Postgres has died and is started again", "Postgres runs again"]
        main = main_process(folder)
    assert not main.is_running()


def test_it_waits_for_its_port_and_says_so_once(folder: Path) -> None:
    said = Said()
    server = EmbeddedPostgres(folder)
    with kept_running(server, said) as url:
        port = int((folder / "port").read_text())
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with server._mutex:  # so that the port is taken before the keeper can start anything
                server.stop()
                other.bind(("127.0.0.1", port))
                other.listen()
            said.wait_for(f"port {port} was taken by another program")
            time.sleep(2.5)  # two more tries
        said.wait_for("Postgres runs again")
        assert value(url, "SELECT 1") == 1
        assert len(said.lines) == 3


def test_who_shares_a_server_takes_it_over_when_its_owner_ends(folder: Path) -> None:
    said = Said()
    owner = EmbeddedPostgres(folder)
    url = owner.start()
    with kept_running(EmbeddedPostgres(folder), said) as shared:
        assert shared == url
        owner.stop()
        said.wait_for("Postgres runs again")
        assert value(url, "SELECT 1") == 1
        main = main_process(folder)
    assert not main.is_running()


def test_a_cluster_that_is_gone_is_not_replaced_by_an_empty_one(folder: Path) -> None:
    said = Said()
    with kept_running(EmbeddedPostgres(folder), said):
        (folder / "data" / "initialised").rename(folder / "aside")
        kill(folder)
        said.wait_for("is gone: bring it back")
        (folder / "aside").rename(folder / "data" / "initialised")
        said.wait_for("Postgres runs again")
    shutil.rmtree(folder / "data")
