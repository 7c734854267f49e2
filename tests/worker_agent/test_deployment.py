"""`worker-agent run` as a service: a settings file, a token file, a task service, metrics, and SIGTERM."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from coordinator.client import Coordinator
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract, RunSettings
from tests.client.server_process import ServerProcess
from tests.worker_agent.status.reading import metrics
from tests.worker_agent.tasks.serving import Answer, Service
from tests.worker_agent.tasks.written import line
from worker_agent.models import identify

pytestmark = pytest.mark.xdist_group("vllm-server")


def start(config: Path, log: Path) -> subprocess.Popen[bytes]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WORKER_", "COORDINATOR_"))}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "worker_agent.cli", "run", "--config", str(config)], stderr=file, env=clean
        )


def events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in log.read_text().splitlines() if text.startswith("{") and text.endswith("}")]


def until(process: subprocess.Popen[bytes], log: Path, condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 120
    while not (found := condition()):
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.1)
    return found


def test_from_a_file_of_settings_to_a_drained_worker(
    coordinator: Coordinator, server: ServerProcess, tiny_model: Path, tmp_path: Path
) -> None:
    model = identify(tiny_model)
    run = coordinator.create_run(
        CreateRun(
            run_id="sums",
            settings=RunSettings(group_size=2),
            contract=GenerationContract(
                tokenizer_hash=model.tokenizer_hash,
                chat_template_hash=model.chat_template_hash,
                temperature=1.0,
                top_p=1.0,
                logprobs_mode="raw",
                dtype="float32",
            ),
            vocab_size=model.vocab_size,
            policy=FirstPolicy(
                base_model=BaseModelIdentity(name=model.name, revision=model.revision, sha256=model.sha256)
            ),
        )
    )
    token = coordinator.create_token("gpu-0", "worker", run_id="sums", worker_id="gpu-0").token
    (tmp_path / "token").write_text(f"{token}\n")
    later = Answer(204, headers={"Retry-After": "1"})
    service = Service(Answer(200, line(task_id="a") + "\n" + line(task_id="b") + "\n"), *[later] * 1000)
    config, log = tmp_path / "worker.yaml", tmp_path / "worker.log"
    config.write_text(
        yaml.safe_dump(
            {
                "run": "sums",
                "worker_id": "gpu-0",
                "model": str(tiny_model),
                "url": server.url,
                "token_file": str(tmp_path / "token"),
                "tasks": service.address,
                "tasks_token": "for-tasks",
                "engine": "transformers",
                "threads": 1,
                "data": str(tmp_path / "worker"),
                "max_tokens": 3,
                "metrics_port": 0,
            }
        )
    )
    process = start(config, log)
    try:
        served = until(process, log, lambda: [e for e in events(log) if e["event"] == "status_served"])[0]
        address = served["metrics"].removesuffix("/metrics")
        assert httpx.get(f"{address}/healthz", trust_env=False).status_code == 200
        until(process, log, lambda: len(list(run.rollouts())) == 4)
        until(process, log, lambda: metrics(address)["worker_agent_rollouts_delivered_total", "accepted"] == 4)
        assert httpx.get(f"{address}/readyz", trust_env=False).json() == {"ready": True, "missing": []}
        assert {r.group_id for r in run.rollouts()} == {"a", "b"}
        assert max(sum(run.evidence(r.rollout_id).action_mask) for r in run.rollouts()) <= 3
        asked = service.asked[0]
        assert (asked.authorization, asked.parameters["worker_id"]) == ("Bearer for-tasks", ["gpu-0"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-2000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        service.stop()
    assert [e["event"] for e in events(log)][-2:] == ["draining", "deregistered"]
    assert [w.state for w in run.workers()] == ["deregistered"]
    assert token not in log.read_text() and "for-tasks" not in log.read_text()


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("port", "StatusError", "cannot be had (Address already in use)"),
        ("tasks", "TaskError", "nowhere.jsonl: No such file"),
        ("token", "TokenError", "token_file: "),
    ],
)
def test_what_cannot_be_had_is_one_line_before_the_model_is_looked_at(
    tmp_path: Path, fault: str, kind: str, said: str
) -> None:
    (tmp_path / "tasks.jsonl").write_text("")
    (tmp_path / "token").write_text("token")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {
            "run": "sums",
            "worker_id": "gpu-0",
            "model": "/no/such/model",
            "url": "http://127.0.0.1:9",
            "token_file": str(tmp_path / ("absent" if fault == "token" else "token")),
            "tasks": str(tmp_path / ("nowhere.jsonl" if fault == "tasks" else "tasks.jsonl")),
            "data": str(tmp_path / "worker"),
            "metrics_port": taken.getsockname()[1] if fault == "port" else 0,
        }
        (tmp_path / "worker.yaml").write_text(yaml.safe_dump(settings))
        process = start(tmp_path / "worker.yaml", tmp_path / "worker.log")
        assert process.wait(60) == 1
    (line_of_log,) = (tmp_path / "worker.log").read_text().splitlines()
    ended = json.loads(line_of_log)
    assert (ended["event"], ended["kind"]) == ("stopped", kind)
    assert said in ended["error"]
