"""Workers that are killed while they spool, and a coordinator that is away under load: each rollout arrives once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.client import Coordinator, Run
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract, RunSettings
from tests.client.server_process import ServerProcess
from tests.ledger_checker import check_ledger
from tests.worker_agent.working import base_of, until
from worker_agent.models import identify

PLACES = ("half", "written", "renamed", "answered")
GROUPS, SIZE = 250, 2
AWAY_SECONDS = 60.0
PATIENCE_SECONDS = 240.0
PLAIN = ("-m", "worker_agent.cli")
DYING = (str(Path(__file__).with_name("dying_worker.py")),)


class Workers:
    """Worker processes of one run, each with tasks of its own."""

    def __init__(self, coordinator: Coordinator, url: str, model: Path, folder: Path) -> None:
        identity = identify(model)
        self.run: Run = coordinator.create_run(
            CreateRun(
                run_id="kills",
                settings=RunSettings(group_size=SIZE, lost_after_seconds=600),
                contract=GenerationContract(
                    tokenizer_hash=identity.tokenizer_hash,
                    chat_template_hash=identity.chat_template_hash,
                    temperature=1.0,
                    top_p=1.0,
                    logprobs_mode="raw",
                    dtype="float32",
                ),
                vocab_size=identity.vocab_size,
                policy=FirstPolicy(base_model=base_of(model)),
            )
        )
        self._folder, self._url, self._model = folder, url, model
        self._coordinator = coordinator
        self.log = folder / "workers.log"

    def start(self, worker_id: str, dies_at: str | None = None) -> subprocess.Popen[bytes]:
        tasks = self._folder / f"{worker_id}.jsonl"
        tasks.write_text("".join(json.dumps(_task(worker_id, number)) + "\n" for number in range(GROUPS)))
        token = self._coordinator.create_token(
            f"{worker_id}-{time.monotonic_ns()}", "worker", run_id="kills", worker_id=worker_id
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COORDINATOR_")} | {
            "COORDINATOR_URL": self._url,
            "COORDINATOR_TOKEN": token.token,
            "DIES_AT": dies_at or "",
        }
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *(DYING if dies_at else PLAIN), "run", "--run", "kills", "--worker-id", worker_id,
                 "--engine", "transformers", "--model", str(self._model), "--tasks", str(tasks), "--threads", "1",
                 "--max-tokens", "8", "--groups-at-once", "16", "--data", str(self._folder / "workers")],
                stdout=log,
                stderr=log,
                env=environment,
            )  # fmt: skip

    def delivering(self, worker_id: str) -> bool:
        """Whether something of the worker's newest life has arrived."""
        lives = [worker.incarnation for worker in self.run.workers() if worker.worker_id == worker_id]
        return any(r.incarnation == lives[0] for r in self.run.rollouts(worker_id=worker_id) if lives)

    def spooled(self, worker_id: str) -> list[Path]:
        return list((self._folder / "workers" / "kills" / worker_id / "spool").glob("*.arrow"))

    def rejected(self) -> list[Path]:
        return list((self._folder / "workers" / "kills").glob("*/rejected/*"))


def _task(worker_id: str, number: int) -> dict[str, object]:
    return {"task_id": f"{worker_id}-{number}", "messages": [{"role": "user", "content": f"2 + {number} ="}]}


@pytest.mark.long
def test_every_rollout_arrives_once(database_url: str, tmp_path: Path, tiny_model: Path) -> None:
    server = ServerProcess(tmp_path / "data", database_url)
    server.start()
    running: list[subprocess.Popen[bytes]] = []
    try:
        with Coordinator(server.url, server.token) as coordinator:
            workers = Workers(coordinator, server.url, tiny_model, tmp_path)
            run = workers.run
            for place in PLACES:
                assert workers.start("w1", place).wait(PATIENCE_SECONDS) == -signal.SIGKILL, place
            running = [workers.start("w1"), workers.start("w2")]
            until(lambda: workers.delivering("w1") and workers.delivering("w2"), PATIENCE_SECONDS)

            server.kill()
            gone_at = time.monotonic()
            until(lambda: workers.spooled("w1") and workers.spooled("w2"), PATIENCE_SECONDS)
            running[0].send_signal(signal.SIGKILL)
            running[0].wait()
            assert workers.spooled("w1")
            time.sleep(max(0.0, gone_at + AWAY_SECONDS - time.monotonic()))
            server.start()

            running[0] = workers.start("w1")
            assert [process.wait(PATIENCE_SECONDS) for process in running] == [0, 0], workers.log.read_text()[-3000:]
            arrived = [rollout.rollout_id for rollout in run.rollouts()]
            wanted = {
                f"{w}-{number}:{index}.0" for w in ("w1", "w2") for number in range(GROUPS) for index in range(SIZE)
            }
            assert len(arrived) == len(set(arrived)) and set(arrived) == wanted
            assert run.counts().rollouts["generated"] == len(wanted)
            assert not workers.rejected() and not workers.spooled("w1") and not workers.spooled("w2")
    finally:
        for process in running:
            process.kill()
            process.wait()
        server.stop()
    assert check_ledger(database_url) == []
