"""The loop of docker-compose.yml, without its containers: the same programs, settings and tokens, as processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.client import Coordinator, Refused, Run
from tests.client.server_process import ServerProcess
from tests.packaging.compose import ROOT, services

DEMO = ROOT / "deploy" / "compose"
pytestmark = pytest.mark.xdist_group("compose-loop")


class Loop:
    """The services of the loop as processes on this machine."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._model, self._tokens = folder / "models" / "tiny", folder / "tokens"
        self._running: list[subprocess.Popen[bytes]] = []
        (folder / "admin").write_text(server.token)

    def environment(self, service: str) -> dict[str, str]:
        """What the file gives to this service, with the paths of this machine."""
        given = {name: str(value) for name, value in services()[service]["environment"].items()}
        holder = self._folder / "admin" if service == "setup" else self._tokens / service / "token"
        here = {
            "COORDINATOR_URL": self._server.url,
            "COORDINATOR_TOKEN_FILE": str(holder),
            "WORKER_MODEL": str(self._model),
            "WORKER_DATA": str(self._folder / service),
            "WORKER_METRICS_HOST": "127.0.0.1",
            "WORKER_METRICS_PORT": "0",
        }
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("COORDINATOR_", "WORKER_"))}
        clean["TRAINER_PAUSE_SECONDS"] = "0"
        return clean | given | {name: value for name, value in here.items() if name in given}

    def command(self, service: str) -> list[str]:
        """The command of the file, with the paths of this machine."""
        paths = {
            "/app/setup.py": str(DEMO / "setup.py"),
            "/app/trainer.py": str(DEMO / "trainer.py"),
            "/app/reward_service.py": str(ROOT / "examples" / "reward_service.py"),
            "/models/tiny": str(self._model),
            "/tokens": str(self._tokens),
        }
        programs = {"python": [sys.executable], "worker-agent": [sys.executable, "-m", "worker_agent.cli"]}
        first, *rest = services()[service]["command"]
        return [*programs[first], *(paths.get(word, word) for word in rest)]

    def setup(self) -> str:
        done = subprocess.run(
            self.command("setup"), env=self.environment("setup"), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, service: str) -> subprocess.Popen[bytes]:
        with self.log(service).open("ab") as log:
            process = subprocess.Popen(
                self.command(service), env=self.environment(service), cwd=DEMO, stdout=log, stderr=log
            )
        self._running.append(process)
        return process

    def log(self, service: str) -> Path:
        return self._folder / f"{service}.log"

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
def loop(server: ServerProcess, tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(server, tmp_path)
    yield loop
    loop.stop()


def until_active(run: Run, version: int, loop: Loop) -> None:
    end = time.monotonic() + 120
    while run.view().active.version < version:
        logs = {service: loop.log(service).read_text()[-1500:] for service in ("worker-1", "reward", "trainer")}
        assert time.monotonic() < end, logs
        time.sleep(0.2)


def test_the_loop_turns_and_goes_on_after_its_trainer_was_killed(loop: Loop, server: ServerProcess) -> None:
    assert loop.setup().count("is made") == 5
    assert loop.setup().count("its token is there") == 5  # again, as at every `up`
    worker = loop.start("worker-1")
    loop.start("reward")
    trainer = loop.start("trainer")
    with Coordinator(server.url, server.token) as coordinator:
        run = coordinator.run("demo")
        until_active(run, 1, loop)
        trainer.kill()
        trainer.wait()
        reached = run.view().active.version
        loop.start("trainer")
        until_active(run, reached + 2, loop)  # one may have been on its way
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0, loop.log("worker-1").read_text()[-2000:]
    first, second = re.findall(r"takes up version (\d+)", loop.log("trainer").read_text())
    assert int(first) == 0
    assert int(second) >= reached
    # A token is good for its role alone.
    token = loop.environment("reward")["COORDINATOR_TOKEN_FILE"]
    with Coordinator(server.url, Path(token).read_text().strip()) as reward, pytest.raises(Refused) as refused:
        reward.run("demo").rewind(0, "not mine to do")
    assert refused.value.status == 403
