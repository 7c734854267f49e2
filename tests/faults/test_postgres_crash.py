"""Postgres loses all its connections while the coordinator lives: it asks to try again, and goes on by itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from threading import Event, Thread

import asyncpg
import httpx

from coordinator.client import Coordinator
from coordinator.storage.postgres import EmbeddedPostgres
from tests.client.runs import new_run, new_worker, rewarded_groups
from tests.client.server_process import ServerProcess
from tests.ledger_checker import check_ledger


def test_a_crash_of_postgres_is_answered_503_until_it_is_back(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="coordinator-crash-"))
    folder.chmod(0o755)  # as root, Postgres runs as another user
    server = ServerProcess(folder / "data")
    server.start()
    statuses: Counter[int] = Counter()
    ended = Event()
    try:
        url = EmbeddedPostgres(server.data / "postgres", progress=lambda _: None).start()
        with Coordinator(server.url, server.token) as coordinator:
            run = new_run(coordinator)
            worker = new_worker(run)
            askers = [Thread(target=ask, args=(server, run.id, statuses, ended)) for _ in range(4)]
            for asker in askers:
                asker.start()
            for number in range(3):
                rewarded_groups(run, worker, 1, prefix=f"before{number}:")
                asyncio.run(crash(url))
                # Retried by the client itself until Postgres has recovered.
                rewarded_groups(run, worker, 1, prefix=f"after{number}:")
                time.sleep(0.3)
            ended.set()
            for asker in askers:
                asker.join()
            assert run.counts().rollouts["rewarded"] == 12
        assert statuses.keys() <= {200, 503}
        assert statuses[200] > 50
        assert check_ledger(url) == []
    finally:
        ended.set()
        server.stop()
        shutil.rmtree(folder)


async def crash(url: str) -> None:
    """A backend that dies by SIGKILL makes Postgres drop every connection and recover from its log."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    pid = await connection.fetchval("SELECT pg_backend_pid()")
    os.kill(pid, signal.SIGKILL)
    connection.terminate()


def ask(server: ServerProcess, run_id: str, statuses: Counter[int], ended: Event) -> None:
    headers = {"Authorization": f"Bearer {server.token}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as http:
        while not ended.is_set():
            for path in (f"/v1/runs/{run_id}/counts", f"/v1/runs/{run_id}/watch", "/readyz"):
                statuses[http.get(path).status_code] += 1
