"""What the engine over HTTP does beyond the conformance suite: other servers, their faults, and their ends."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_agent.engines import corruption
from tests.worker_agent.engines.limited_server import in_front_of
from tests.worker_agent.engines.test_conformance import PROMPT, sequences
from tests.worker_agent.tiny import BASE
from worker_agent.engines.engine import EngineError, Policy, Prompt, Sampling, generate
from worker_agent.engines.vllm_server import Abilities, VllmServerEngine

pytestmark = pytest.mark.xdist_group("vllm-server")

NewPolicy = Callable[[int], Policy]
DEVELOPMENT = (
    "/pause",
    "/resume",
    "/is_paused",
    "/is_sleeping",
    "/wake_up",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/server_info",
)


@pytest.fixture
def connect(tiny_model: Path, tmp_path: Path) -> Callable[[str], VllmServerEngine]:
    """An engine on a server that runs."""
    return lambda url: VllmServerEngine(tiny_model, url=url, log=tmp_path / "unused.log")


def post(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    answer = httpx.post(f"{url}{path}", json=body, trust_env=False, timeout=60)
    answer.raise_for_status()
    return answer


def models(url: str) -> list[str]:
    cards = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
    return [card["id"] for card in cards if card["parent"] is not None]


def test_a_server_that_was_started_here_can_do_everything(server_engine: VllmServerEngine) -> None:
    assert server_engine.abilities == Abilities(adapters=True, pause=True, reset=True, sleep=True, digest=True)
    assert server_engine.load(BASE).caches_reset == ("prefix",)


def test_what_a_plainer_server_cannot_do_is_left_out_and_said(
    server_engine: VllmServerEngine,
    connect: Callable[[str], VllmServerEngine],
    new_policy: NewPolicy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = new_policy(1), new_policy(2)
    with in_front_of(server_engine.url, DEVELOPMENT) as url, caplog.at_level(logging.INFO, "worker_agent"):
        engine = connect(url)
        assert engine.abilities == Abilities(adapters=True, pause=False, reset=False, sleep=False, digest=False)
        said = [record.fields for record in caplog.records if record.getMessage() == "engine_negotiated"]  # type: ignore[attr-defined]
        assert [(f["adapters"], f["pause"], f["reset"], f["digest"]) for f in said] == [(True, False, False, False)]
        assert (engine.version, engine.dtype, engine.logprobs_mode) == (server_engine.version, "float32", "raw")
        for policy in (one, two):
            report = engine.load(policy)
            assert (report.caches_reset, report.digest) == ((), None)
        engine.release()
        assert "engine_keeps_its_memory" in [record.getMessage() for record in caplog.records]
        with pytest.raises(EngineError, match="resume it first"):
            engine.score(BASE, sequences(1))
        engine.resume()
        served = [engine.score(policy, sequences(1)) for policy in (BASE, one, two)]
        engine.close()
    server_engine.load(one)
    assert served[1] == server_engine.score(one, sequences(1))
    assert len({str(log_probs) for log_probs in served}) == 3
    server_engine.unload(one)


def test_a_server_without_adapters_takes_the_base_alone(
    server_engine: VllmServerEngine, connect: Callable[[str], VllmServerEngine], new_policy: NewPolicy
) -> None:
    with in_front_of(server_engine.url, (*DEVELOPMENT, "/v1/load_lora_adapter")) as url:
        engine = connect(url)
        assert engine.kinds == ("base",)
        with pytest.raises(EngineError, match="this engine takes base without a folder"):
            engine.load(new_policy(1))
        assert engine.load(BASE).served_version == 0
        engine.close()


@pytest.mark.parametrize("hidden", [(), DEVELOPMENT], ids=["whole", "plain"])
def test_a_server_that_only_says_that_it_loaded_is_found_out(
    server_engine: VllmServerEngine,
    connect: Callable[[str], VllmServerEngine],
    new_policy: NewPolicy,
    hidden: tuple[str, ...],
) -> None:
    def keep_out(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return None if path == "/v1/load_lora_adapter" and body else body

    with in_front_of(server_engine.url, hidden, keep_out) as url:
        engine, policy = connect(url), new_policy(1)
        with pytest.raises(EngineError):
            engine.load(policy)
        with pytest.raises(EngineError, match="is not loaded"):
            engine.score(policy, sequences(1))
        engine.close()


def test_a_plain_server_that_answers_with_the_old_weights_is_found_out(
    server_engine: VllmServerEngine, connect: Callable[[str], VllmServerEngine], new_policy: NewPolicy, tmp_path: Path
) -> None:
    empty = new_policy(3).folder
    assert empty is not None
    weights = load_file(empty / "adapter_model.safetensors")
    save_file(
        {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in weights.items()},
        empty / "adapter_model.safetensors",
    )

    def old_weights(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return body | {"lora_path": str(empty)} if path == "/v1/load_lora_adapter" and body else body

    with in_front_of(server_engine.url, DEVELOPMENT, old_weights) as url:
        engine = connect(url)
        with pytest.raises(EngineError, match="answers as the base model does"):
            engine.load(new_policy(1))
        # An adapter before its first step is like the base model, and rightly so.
        assert engine.load(Policy("run", 3, "sha256:3", "lora", empty)).digest is None
        engine.close()


def test_another_adapter_than_the_named_one_is_found_out(
    server_engine: VllmServerEngine, connect: Callable[[str], VllmServerEngine], new_policy: NewPolicy
) -> None:
    other = new_policy(2).folder

    def mix_up(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return body | {"lora_path": str(other)} if path == "/v1/load_lora_adapter" and body else body

    with in_front_of(server_engine.url, (), mix_up) as url:
        engine = connect(url)
        with pytest.raises(EngineError, match="does not serve version 1 as its folder has it"):
            engine.load(new_policy(1))
        assert models(server_engine.url) == []
        engine.close()


def test_an_adapter_that_went_from_the_worker_is_found(server_engine: VllmServerEngine, new_policy: NewPolicy) -> None:
    policy = new_policy(1)
    before = server_engine.load(policy).digest
    right = server_engine.score(policy, sequences(1))
    worker_id = server_engine._adapters[policy.key].worker_id
    post(server_engine.url, "/v1/unload_lora_adapter", {"lora_name": server_engine._adapters[policy.key].name})
    post(server_engine.url, "/collective_rpc", {"method": "remove_lora", "args": [worker_id]})
    with pytest.raises(EngineError):
        server_engine.score(policy, sequences(1))
    with pytest.raises(EngineError, match="load it again"):
        server_engine.load(policy)
    assert server_engine.load(policy).digest == before
    assert server_engine.score(policy, sequences(1)) == right
    server_engine.unload(policy)


def test_what_an_earlier_life_left_behind_is_cleared(
    server_engine: VllmServerEngine, connect: Callable[[str], VllmServerEngine], new_policy: NewPolicy
) -> None:
    folder = new_policy(1).folder
    post(server_engine.url, "/v1/load_lora_adapter", {"lora_name": "old/v1", "lora_path": str(folder)})
    post(server_engine.url, "/pause?mode=keep")
    engine = connect(server_engine.url)
    assert models(server_engine.url) == []
    assert len(engine.score(BASE, sequences(1))[0]) == 60
    post(server_engine.url, "/sleep?level=1")
    again = connect(server_engine.url)
    assert generate(again, BASE, [Prompt(PROMPT, 1, 1)], Sampling())
    for open_engine in (engine, again):
        open_engine.close()


def test_a_load_that_fails_leaves_the_server_at_work(server_engine: VllmServerEngine, new_policy: NewPolicy) -> None:
    policy = new_policy(1)
    assert policy.folder is not None
    before = server_engine.score(BASE, sequences(1))
    corruption.widen_features(policy.folder)
    with pytest.raises(EngineError):
        server_engine.load(policy)
    assert httpx.get(f"{server_engine.url}/is_paused", trust_env=False).json() == {"is_paused": False}
    assert server_engine.score(BASE, sequences(1)) == before


def test_a_released_server_really_sleeps(server_engine: VllmServerEngine) -> None:
    def asleep() -> bool:
        return bool(httpx.get(f"{server_engine.url}/is_sleeping", trust_env=False).json()["is_sleeping"])

    server_engine.release()
    assert asleep()
    server_engine.resume()
    assert not asleep()


def test_closing_leaves_a_server_that_is_not_ours_running_and_clean(
    server_engine: VllmServerEngine, connect: Callable[[str], VllmServerEngine], new_policy: NewPolicy
) -> None:
    engine = connect(server_engine.url)
    engine.load(new_policy(1))
    engine.close()
    engine.close()
    for use in (lambda: engine.score(BASE, [[5, 6]]), lambda: engine.load(BASE), lambda: engine.unload(BASE)):
        with pytest.raises(EngineError, match="was closed"):
            use()
    assert models(server_engine.url) == []
    assert len(server_engine.score(BASE, [[5, 6]])[0]) == 2


def test_no_server_at_the_address(connect: Callable[[str], VllmServerEngine]) -> None:
    with pytest.raises(EngineError, match=r"vLLM server at http://127.0.0.1:9 does not answer"):
        connect("http://127.0.0.1:9")


def test_something_else_at_the_address(
    server_engine: VllmServerEngine, connect: Callable[[str], VllmServerEngine]
) -> None:
    with in_front_of(f"{server_engine.url}/health") as url, pytest.raises(EngineError):
        connect(url)


PROGRAM = """
import sys, pathlib
from worker_agent.engines.vllm_server import VllmServerEngine
from worker_agent.engines.engine import EngineError
from worker_agent.engines.engine import Policy
try:
    engine = VllmServerEngine(pathlib.Path(sys.argv[1]), log=pathlib.Path(sys.argv[2]))
except EngineError as error:
    print(error)
    sys.exit(3)
print(engine._process.pid, flush=True)
if sys.argv[3] == "wait":
    sys.stdin.read()
engine.close()
"""


def group(pgid: int) -> list[str]:
    """Commands of the live processes of one group."""
    lines = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in lines.splitlines()]
    return [row[2] for row in rows if int(row[0]) == pgid and not row[1].startswith("Z")]


def test_the_server_ends_with_the_process_that_started_it(tiny_model: Path, tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_model), str(tmp_path / "log"), "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    server = int(starter.stdout.readline())
    assert len(group(server)) >= 2  # the server and its engine core
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    until = time.monotonic() + 60
    while (left := group(server)) and time.monotonic() < until:
        time.sleep(0.2)
    assert left == []


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    log = tmp_path / "log"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), str(log), "leave"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 3, ended.stderr[-2000:]
    assert "ended with status 1" in ended.stdout and str(log) in ended.stdout
