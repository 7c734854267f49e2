"""The embedded Postgres is killed while its coordinator lives: it is started again, and nothing is lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import httpx

from coordinator.client import Coordinator
from coordinator.storage.postgres import EmbeddedPostgres
from tests.client.server_process import ServerProcess
from tests.ledger_checker import check_ledger
from tests.load import Clients, start_run

KILLS = 4


def test_a_killed_postgres_is_started_again_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="coordinator-postmaster-"))
    folder.chmod(0o755)  # as root, Postgres runs as another user
    server = ServerProcess(folder / "data")
    server.start()
    pid_file = folder / "data" / "postgres" / "data" / "postmaster.pid"
    clients = None
    try:
        database_url = EmbeddedPostgres(server.data / "postgres", progress=lambda _: None).start()
        with Coordinator(server.url, server.token) as coordinator:
            run = start_run(coordinator, "orphaned", update_lease_seconds=5)
            clients = Clients(tmp_path, run, [(server.url, server.token)])
            for role, name in (("produce", "w1"), ("produce", "w2"), ("judge", "j1"), ("train", "t1"), ("train", "t2")):
                clients.start(role, name)
            clients.wait_for("rollout", 1)
            killed = []
            for _ in range(KILLS):
                time.sleep(random.uniform(1, 2))
                killed.append(int(pid_file.read_text().split()[0]))
                os.kill(killed[-1], signal.SIGKILL)
                wait_until_ready_under_another(server, pid_file, killed[-1])
                clients.wait_for("rollout", clients.count("rollout") + 30)
            told, faults, retries = clients.told()
        assert faults == []
        assert len(set(killed)) == KILLS
        assert retries
        assert EmbeddedPostgres(server.data / "postgres", progress=lambda _: None).start() == database_url
        assert check_ledger(database_url, {"orphaned": told}) == []
        assert len(told.rollouts) > 100
        assert server.stop() == 0
        log = server.log.read_text()
        assert log.count("Postgres has died and is started again") == KILLS
        assert log.count("Postgres runs again") == KILLS
    finally:
        if clients is not None:
            clients.stop()
        server.stop()
        shutil.rmtree(folder)


def wait_until_ready_under_another(server: ServerProcess, pid_file: Path, killed: int) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        answer = httpx.get(f"{server.url}/readyz", timeout=30, trust_env=False)
        assert answer.status_code in (200, 503)
        if answer.status_code == 200 and pid_file.exists() and int(pid_file.read_text().split()[0]) != killed:
            return
        time.sleep(0.05)
    raise AssertionError(f"Postgres was not started again: {server.log.read_text()[-2000:]}")
