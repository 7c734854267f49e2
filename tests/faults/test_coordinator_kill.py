"""The coordinator, and with it the Postgres it owns, is killed again and again under load."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from coordinator.client import Coordinator
from coordinator.storage.postgres import EmbeddedPostgres
from tests.client.server_process import ServerProcess
from tests.ledger_checker import check_ledger
from tests.load import Clients, start_run

KILLS = 12


@pytest.mark.long
def test_kills_at_any_moment_lose_nothing_and_consume_nothing_twice(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="coordinator-kills-"))
    folder.chmod(0o755)  # as root, Postgres runs as another user
    server = ServerProcess(folder / "data")
    server.start()
    identity = (server.url, server.token)
    clients = None
    try:
        with Coordinator(*identity) as coordinator:
            run = start_run(coordinator, "killed", update_lease_seconds=5)
            clients = Clients(tmp_path, run, [identity])
            for role, name in (("produce", "w1"), ("produce", "w2"), ("judge", "j1"), ("train", "t1"), ("train", "t2")):
                clients.start(role, name)
            clients.wait_for("commit", 2)
            commits = []
            for _ in range(KILLS):
                time.sleep(random.uniform(0, 1.5))
                server.kill()
                server.start()
                assert (server.url, server.token) == identity
                commits.append(run.view().last_commit_no)
                clients.wait_for("rollout", clients.count("rollout") + 1)
            clients.wait_for("commit", 4)
            told, faults, retries = clients.told()
        assert faults == []
        assert len(retries) >= KILLS
        database_url = EmbeddedPostgres(server.data / "postgres", progress=lambda _: None).start()
        assert check_ledger(database_url, {"killed": told}) == []
        assert len(told.rollouts) > 100
        assert len(told.commits) > 3
        assert commits == sorted(commits)
    finally:
        if clients is not None:
            clients.stop()
        server.stop()
        shutil.rmtree(folder)
