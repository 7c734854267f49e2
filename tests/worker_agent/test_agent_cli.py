"""`worker-agent run` as a process of its own."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.client import Coordinator
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract, RunSettings
from tests.client.runs import new_run
from tests.client.server_process import ServerProcess
from worker_agent.models import identify


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_it_works_from_stdin_and_leaves_in_good_order_on_sigterm(tmp_path: Path, tiny_model: Path, engine: str) -> None:
    server = ServerProcess(tmp_path / "data")
    server.start()
    model = identify(tiny_model)
    base = BaseModelIdentity(name=model.name, revision=model.revision, sha256=model.sha256)
    contract = GenerationContract(
        tokenizer_hash=model.tokenizer_hash,
        chat_template_hash=model.chat_template_hash,
        temperature=0.7,
        top_p=1.0,
        logprobs_mode="raw",
        dtype="float32",
    )
    arguments = ["--run", "cli", "--worker-id", "w1", "--model", str(tiny_model), "--tasks", "-", "--threads", "1"]
    arguments += ["--engine", engine]
    task = {"task_id": "t1", "messages": [{"role": "user", "content": "2+3="}]}
    try:
        with Coordinator(server.url, server.token) as coordinator:
            run = coordinator.create_run(
                CreateRun(
                    run_id="cli",
                    settings=RunSettings(group_size=3),
                    contract=contract,
                    vocab_size=model.vocab_size,
                    policy=FirstPolicy(base_model=base),
                )
            )
            with (tmp_path / "agent.log").open("wb") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "worker_agent.cli",
                        "run",
                        *arguments,
                        "--url",
                        server.url,
                        "--token",
                        server.token,
                        "--data",
                        str(tmp_path / "worker"),
                    ],
                    stdin=subprocess.PIPE,
                    stderr=log,
                )
            assert process.stdin is not None
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
            end = time.monotonic() + 300
            while len(list(run.rollouts())) < 3 and time.monotonic() < end:
                assert process.poll() is None, (tmp_path / "agent.log").read_text()[-2000:]
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            lines = [line for line in (tmp_path / "agent.log").read_text().splitlines() if line.startswith("{")]
            assert code == 0, lines
            assert [r.rollout_id for r in run.rollouts()] == ["t1:0.0", "t1:1.0", "t1:2.0"]
            assert [(w.state, w.engine) for w in run.workers()] == [("deregistered", engine)]
            assert json.loads(lines[-1])["event"] == "deregistered"
    finally:
        server.stop()


def test_what_does_not_fit_is_told_before_the_engine_is_waited_for(tmp_path: Path, tiny_model: Path) -> None:
    """A run of another model, a run that is not there, and a token that is none; transformers is not to be imported."""
    server = ServerProcess(tmp_path / "data")
    server.start()
    without = "import sys; sys.modules['transformers'] = None; from worker_agent.cli import main; main()"
    arguments = ["--worker-id", "w1", "--model", str(tiny_model), "--tasks", "-", "--engine", "transformers"]
    try:
        with Coordinator(server.url, server.token) as coordinator:
            new_run(coordinator, "other")
        for run, token, words in (
            ("other", server.token, "tokenizer_hash: the run has"),
            ("none", server.token, "run_unknown"),
            ("other", "rct_none_none", "unauthenticated"),
        ):
            ended = subprocess.run(
                [sys.executable, "-c", without, "run", *arguments, "--run", run, "--url", server.url, "--token", token],
                cwd=tmp_path,
                input="",
                capture_output=True,
                text=True,
                check=False,
            )
            last = json.loads(ended.stderr.splitlines()[-1])
            assert (ended.returncode, last["event"]) == (1, "stopped"), ended.stderr
            assert words in last["error"]
            assert "engine_starts" not in ended.stderr
    finally:
        server.stop()


def test_identify_prints_what_a_run_is_created_with(tmp_path: Path, tiny_model: Path) -> None:
    command = [sys.executable, "-m", "worker_agent.cli", "identify"]
    told = subprocess.run([*command, str(tiny_model)], capture_output=True, text=True, check=True)
    made = CreateRun.model_validate(json.loads(told.stdout) | {"run_id": "r", "settings": {}})
    model = identify(tiny_model)
    assert (made.contract.tokenizer_hash, made.contract.chat_template_hash) == (
        model.tokenizer_hash,
        model.chat_template_hash,
    )
    assert (made.vocab_size, made.policy.base_model.sha256) == (model.vocab_size, model.sha256)
    nothing = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert nothing.returncode == 1 and nothing.stderr.startswith("worker-agent: ") and "Traceback" not in nothing.stderr


def test_an_address_is_for_the_server_alone() -> None:
    arguments = ["run", "--run", "r", "--worker-id", "w1", "--model", "m", "--tasks", "-", "--engine-url", "http://a"]
    ended = subprocess.run(
        [sys.executable, "-m", "worker_agent.cli", *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2 and "vllm-server alone" in ended.stderr


@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_an_engine_that_is_not_installed_is_named_with_its_extra(tmp_path: Path, tiny_model: Path, engine: str) -> None:
    arguments = [
        "run",
        "--engine",
        engine,
        "--run",
        "r",
        "--worker-id",
        "w1",
        "--model",
        str(tiny_model),
        "--tasks",
        "-",
    ]
    arguments += ["--url", "http://127.0.0.1:9", "--token", "none", "--data", str(tmp_path / "worker")]
    without = "import sys; sys.modules['vllm'] = None; from worker_agent.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", without, *arguments], input="", capture_output=True, text=True, check=False
    )
    last = json.loads(ended.stderr.splitlines()[-1])
    assert (ended.returncode, last["event"]) == (1, "stopped")
    assert last["error"].startswith("vllm is not installed: pip install 'rollout-coordinator[worker]'")
    assert "Traceback" not in ended.stderr


def test_help_does_not_wait_for_torch() -> None:
    started = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-m", "worker_agent.cli", "run", "--help"], capture_output=True, text=True, check=True
    )
    assert "COORDINATOR_TOKEN" in answer.stdout
    assert time.monotonic() - started < 10
