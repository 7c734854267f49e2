"""A coordinator for one benchmark: an embedded Postgres and `coordinator serve`, gone without a trace afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from coordinator.storage.migrations import upgrade
from coordinator.storage.postgres import EmbeddedPostgres

READY_SECONDS = 60.0
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class CoordinatorHere:
    """What callers need to reach it, with and without HTTP; `folder` is where its data lies.

    `url`, `server_pid` and the token are of the first replica; the token counts with each.
    """

    url: str
    urls: tuple[str, ...]
    token: str
    database_url: str
    folder: Path
    server_pid: int
    postgres_pid: int

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time so far of the server and of Postgres with all its backends. Empty where there is no /proc."""
        if not Path("/proc/self/stat").exists():
            return {}
        return {"server": _cpu_seconds(self.server_pid), "postgres": _cpu_seconds(self.postgres_pid)}


@contextlib.contextmanager
def coordinator_here(say: Callable[[str], None], replicas: int = 1) -> Iterator[CoordinatorHere]:
    """Starts all on loopback, on free ports, with nothing of the environment's settings; fsync is on.

    Replicas serve one database, and each its own artifacts: let files go through one of them only.
    """
    folder = Path(tempfile.mkdtemp(prefix="coordinator-benchmark-"))
    folder.chmod(0o755)  # as root, Postgres runs as another user
    postgres = EmbeddedPostgres(folder / "postgres", progress=say)
    try:
        database_url = postgres.start()
        upgrade(database_url)
        with contextlib.ExitStack() as stack:
            served = [
                stack.enter_context(_serving(folder / f"replica-{number}", database_url)) for number in range(replicas)
            ]
            process, url = served[0]
            yield CoordinatorHere(
                url=url,
                urls=tuple(url for _, url in served),
                token=(folder / "replica-0" / "admin.token").read_text().strip(),
                database_url=database_url,
                folder=postgres.home,
                server_pid=process.pid,
                postgres_pid=int((postgres.home / "data" / "postmaster.pid").read_text().split()[0]),
            )
    finally:
        postgres.stop()
        shutil.rmtree(postgres.home, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _serving(folder: Path, database_url: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COORDINATOR_")}
    folder.mkdir()
    log_path = folder / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "coordinator.cli", "serve", "--port", "0", "--data", str(folder)],
            stdout=log,
            stderr=log,
            env=environment | {"DATABASE_URL": database_url},
        )
    try:
        until = time.monotonic() + READY_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the coordinator did not start: {log_path.read_text()[-2000:]}")
            try:
                url = (folder / "address").read_text().strip()
                if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                    break
            except (OSError, httpx.HTTPError):
                time.sleep(0.05)
        yield process, url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cpu_seconds(pid: int) -> float:
    """Of a process, its living children, and those that it has reaped."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ticks = sum(_ticks(pid)) + sum(sum(_ticks(int(child))[:2]) for child in children)
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> tuple[int, int, int, int]:
    """User and system time of a process, and of its reaped children, in clock ticks: proc(5), fields 14 to 17."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return 0, 0, 0, 0
    user, system, reaped_user, reaped_system = (int(field) for field in fields[11:15])
    return user, system, reaped_user, reaped_system
