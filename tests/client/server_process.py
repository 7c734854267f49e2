"""A real coordinator as a process of its own, to be killed and started again on the same data."""

import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx


class ServerProcess:
    """`coordinator serve` on a free port of this machine; the port stays the same over restarts."""

    def __init__(self, data: Path, database_url: str | None = None, **settings: str) -> None:
        self.data = data
        self.settings = settings
        self.database_url = database_url
        self.verify: ssl.SSLContext | bool = True
        self.log = data.parent / f"{data.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return (self.data / "address").read_text().strip()

    @property
    def token(self) -> str:
        return (self.data / "admin.token").read_text().strip()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("COORDINATOR_") and name != "DATABASE_URL"
        }
        environment |= {f"COORDINATOR_{name.upper()}": value for name, value in self.settings.items()}
        if self.database_url is not None:
            environment["DATABASE_URL"] = self.database_url
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "coordinator.cli", "serve", "--port", "0", "--data", str(self.data)],
                stdout=log,
                stderr=log,
                env=environment,
            )
        until = time.monotonic() + 150
        while time.monotonic() < until:
            assert self._process.poll() is None, f"the coordinator ended: {self.log.read_text()[-2000:]}"
            try:
                if httpx.get(f"{self.url}/readyz", timeout=5, trust_env=False, verify=self.verify).status_code == 200:
                    return
            except (OSError, httpx.HTTPError):
                time.sleep(0.05)
        raise AssertionError(f"the coordinator was not ready in time: {self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        """As a crash would: nothing is flushed, nothing is said."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int | None:
        """In good order, by SIGTERM. Answers the exit code of the last process."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
        # As root, the database cannot lie in a private temporary folder; the coordinator says where it put it.
        for folder in set(re.findall(r"the database is in (\S+)", self.log.read_text())):
            _remove(Path(folder))
        return None if self._process is None else self._process.returncode


def _remove(folder: Path) -> None:
    """After a kill, Postgres writes for a moment longer."""
    until = time.monotonic() + 20
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
