"""The bare server with the agent beside it: the tasks' groups arrive, and at SIGTERM both end in good order."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.client import Coordinator
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract, RunSettings
from tests.client.server_process import ServerProcess
from tests.examples.example import EXAMPLES
from worker_agent.models import identify, tiny_qwen2

pytestmark = pytest.mark.xdist_group("vllm-server")

# What a small CPU wants; see the engine of the worker agent that starts a server of its own.
ON_A_CPU = {
    "VLLM_ARGUMENTS": "--enforce-eager --distributed-executor-backend uni --block-size 32 --max-model-len 128 "
    "--max-num-seqs 8",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def test_a_bare_server_and_the_agent_beside_it(server: ServerProcess, tmp_path: Path) -> None:
    folder = tiny_qwen2(tmp_path / "tiny-qwen2")
    model = identify(folder)
    contract = GenerationContract(
        tokenizer_hash=model.tokenizer_hash,
        chat_template_hash=model.chat_template_hash,
        temperature=1.0,
        top_p=1.0,
        logprobs_mode="raw",
        dtype="float32",
    )
    base = BaseModelIdentity(name=model.name, revision=model.revision, sha256=model.sha256)
    tasks = [{"task_id": f"t{i}", "messages": [{"role": "user", "content": f"{i} + 3 ="}]} for i in range(3)]
    os.mkfifo(tmp_path / "tasks")  # without an end: only the signal is one
    given = os.open(tmp_path / "tasks", os.O_RDWR)
    os.write(given, "".join(json.dumps(task) + "\n" for task in tasks).encode())
    with Coordinator(server.url, server.token) as coordinator, socket.socket() as free:
        run = coordinator.create_run(
            CreateRun(
                run_id="bare",
                settings=RunSettings(group_size=2),
                contract=contract,
                vocab_size=model.vocab_size,
                policy=FirstPolicy(base_model=base),
            )
        )
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        environment = os.environ | ON_A_CPU | {
            "COORDINATOR_URL": server.url,
            "COORDINATOR_TOKEN": coordinator.create_token("w1", "worker", run_id=run.id, worker_id="w1").token,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PORT": str(port),
            "PYTHONPATH": str(EXAMPLES.parent),
            "WORKER_DATA": str(tmp_path / "worker"),
        }  # fmt: skip
        with (tmp_path / "script.log").open("wb") as log:
            script = subprocess.Popen(
                [str(EXAMPLES / "vllm_server.sh"), str(folder), run.id, "w1", str(tmp_path / "tasks")],
                env=environment,
                stdout=log,
                stderr=log,
            )
        try:
            until = time.monotonic() + 240
            while len(list(run.rollouts())) < 6:
                assert script.poll() is None and time.monotonic() < until, (tmp_path / "script.log").read_text()[-3000:]
                time.sleep(0.2)
        finally:
            script.terminate()
            status = script.wait(60)
        assert status == 0, (tmp_path / "script.log").read_text()[-3000:]
        os.close(given)
        assert sorted(r.group_id for r in run.rollouts(state="generated")) == ["t0", "t0", "t1", "t1", "t2", "t2"]
        [worker] = run.workers()
        assert (worker.state, worker.engine) == ("deregistered", "vllm-server")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
