"""What verl's rollout does beyond the conformance suite: one adapter at a time, requests in flight, its processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import load_file

from tests.worker_agent.adapters import draw_adapter
from tests.worker_agent.engines.processes import descendants, wait_until_gone
from tests.worker_agent.engines.test_conformance import PROMPT, sequences
from tests.worker_agent.tiny import BASE
from worker_agent.engines.engine import (
    Completion,
    EngineError,
    Policy,
    Prompt,
    Request,
    Sampling,
    generate,
    sample_seed,
)
from worker_agent.engines.lora_digest import lora_layout
from worker_agent.engines.transformers_engine import TransformersEngine
from worker_agent.engines.verl_engine import VerlEngine

pytestmark = pytest.mark.xdist_group("verl")

NewPolicy = Callable[[int], Policy]
LONG = 60


@pytest.fixture
def new_loaded(verl_engine: VerlEngine, new_policy: NewPolicy) -> Iterator[NewPolicy]:
    """As `new_policy`, loaded; forgotten when the test is over."""
    made: list[Policy] = []

    def make(version: int) -> Policy:
        made.append(new_policy(version))
        verl_engine.load(made[-1])
        return made[-1]

    yield make
    verl_engine.interrupt()
    for policy in made:
        verl_engine.unload(policy)


def requests(count: int, max_tokens: int) -> list[Request]:
    return [Request(f"r{index}", (5, 6, 7), sample_seed(3, index), max_tokens) for index in range(count)]


def completions(done: dict[str, Completion | EngineError]) -> dict[str, Completion]:
    """`done`, of which nothing failed."""
    assert [error for error in done.values() if isinstance(error, EngineError)] == []
    return {request_id: each for request_id, each in done.items() if isinstance(each, Completion)}


def everything(engine: VerlEngine, count: int) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while len(done) < count:
        done |= completions(engine.finished(60))
    return done


def begins(short: Completion, whole: Completion) -> bool:
    """Whether `whole` goes on where `short` ends. Log-probs differ a little by what else was in the batch."""
    length = len(short.token_ids)
    return short.token_ids == whole.token_ids[:length] and short.log_probs == pytest.approx(
        whole.log_probs[:length], abs=1e-5
    )


def tensors(folder: Path | None) -> dict[str, torch.Tensor]:
    assert folder is not None
    return load_file(folder / "adapter_model.safetensors")


def config(folder: Path | None) -> dict[str, Any]:
    assert folder is not None
    read: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return read


def test_its_digests_are_those_of_the_vllm_below_it(verl_engine: VerlEngine) -> None:
    assert lora_layout("verl", verl_engine.version, "float32") == lora_layout("vllm", vllm.__version__, "float32")


def test_stop_texts_and_ends_are_told_as_the_reference_tells_them(
    verl_engine: VerlEngine, reference: TransformersEngine
) -> None:
    """verl says "completed" of all; here also where the stop is the last token that was allowed."""
    prompts = [Prompt(PROMPT, 1, 1)]
    (whole,) = generate(reference, BASE, prompts, Sampling(temperature=0.0, max_tokens=24))[0]
    stop = whole.text[8:11]
    upto = next(n for n in range(1, 25) if stop in reference._tokenizer.decode(whole.token_ids[:n]))
    told = set()
    for limit in (upto - 1, upto, upto + 1):
        sampling = Sampling(temperature=0.0, max_tokens=limit, stop=("nowhere", stop))
        ((ours,),) = generate(verl_engine, BASE, prompts, sampling)
        ((theirs,),) = generate(reference, BASE, prompts, sampling)
        assert (ours.token_ids, ours.finish_reason, ours.text) == (theirs.token_ids, theirs.finish_reason, theirs.text)
        told.add((limit, ours.finish_reason))
    assert told == {(upto - 1, "length"), (upto, "stop"), (upto + 1, "stop")}


def test_requests_in_flight_are_handed_over_as_they_finish(verl_engine: VerlEngine, new_loaded: NewPolicy) -> None:
    policy = new_loaded(1)
    (alone,) = generate(verl_engine, policy, [Prompt((5, 6, 7), 3, 4)], Sampling(max_tokens=LONG))
    assert verl_engine.finished(60) == {}
    verl_engine.begin(policy, requests(4, LONG), Sampling())
    verl_engine.begin(policy, [Request("short", PROMPT, 1, 1)], Sampling())
    first = completions(verl_engine.finished(60))
    assert "short" in first
    done = first | everything(verl_engine, 5 - len(first))
    for index, sample in enumerate(alone):
        assert begins(done[f"r{index}"], sample) and done[f"r{index}"].finish_reason == sample.finish_reason
    assert verl_engine.finished(60) == {}


def test_an_interrupted_completion_is_the_beginning_of_the_whole(
    verl_engine: VerlEngine, new_loaded: NewPolicy
) -> None:
    policy = new_loaded(1)
    count = 24  # more than run at once
    verl_engine.begin(policy, requests(count, LONG), Sampling())
    whole = everything(verl_engine, count)
    verl_engine.begin(policy, [Request("short", (5, 6, 7), 1, 3), *requests(count, LONG)], Sampling())
    before: dict[str, Completion] = {}
    while not before:
        before = completions(verl_engine.finished(60))
    cut = completions(verl_engine.interrupt())
    assert before.keys() | cut.keys() == {*whole, "short"} and not before.keys() & cut.keys()
    lengths = [len(c.token_ids) for c in cut.values() if c.finish_reason == "abort"]
    assert 0 < max(lengths) < LONG
    for request_id in whole:
        completion = (before | cut)[request_id]
        assert begins(completion, whole[request_id])
        assert completion.finish_reason in (whole[request_id].finish_reason, "abort")
    assert verl_engine.interrupt() == {}
    verl_engine.begin(policy, requests(2, LONG), Sampling())
    again = everything(verl_engine, 2)
    assert all(begins(again[i], whole[i]) and begins(whole[i], again[i]) for i in ("r0", "r1"))


def test_at_once_interrupted_requests_never_come_later(verl_engine: VerlEngine) -> None:
    verl_engine.begin(BASE, requests(40, LONG), Sampling())
    cut = completions(verl_engine.interrupt())
    assert cut.keys() == {f"r{index}" for index in range(40)}
    assert Completion([], [], "abort", "") in cut.values()  # it had not begun
    assert verl_engine.finished(60) == {}
    assert len(verl_engine.score(BASE, [[5, 6]])[0]) == 2


def test_while_requests_are_in_flight_nothing_else_happens(
    verl_engine: VerlEngine, new_loaded: NewPolicy, new_policy: NewPolicy
) -> None:
    policy, other = new_loaded(1), new_policy(2)
    verl_engine.begin(policy, requests(20, LONG), Sampling())
    uses: list[Callable[[], object]] = [
        lambda: verl_engine.load(other),
        lambda: verl_engine.load(BASE),
        lambda: verl_engine.unload(policy),
        lambda: verl_engine.score(policy, [[5, 6]]),
        verl_engine.release,
        lambda: verl_engine.begin(BASE, [Request("base", (5, 6), 1, 1)], Sampling()),
    ]
    for use in uses:
        with pytest.raises(EngineError, match="in flight"):
            use()
    assert len(verl_engine.interrupt()) == 20
    assert len(verl_engine.score(policy, [[5, 6]])[0]) == 2


def test_what_is_wrong_with_one_request_is_its_own(verl_engine: VerlEngine) -> None:
    good = Request("good", (5, 6), 1, 4)
    for wrong, reason in (
        ([good, good], "two requests good"),
        ([good, Request("none", (5, 6), 1, 0)], "for 0 tokens"),
        ([good, Request("empty", (), 1, 1)], "sequence 1 has 0 tokens"),
    ):
        with pytest.raises(EngineError, match=reason):
            verl_engine.begin(BASE, wrong, Sampling())
    assert verl_engine.finished(60) == {}
    verl_engine.begin(BASE, [good, Request("bad", (5, 100_000), 1, 4)], Sampling())
    done: dict[str, Completion | EngineError] = {}
    while len(done) < 2:
        done |= verl_engine.finished(60)
    assert isinstance(done["good"], Completion) and isinstance(done["bad"], EngineError)


def test_other_weights_than_the_engine_sent_are_found(
    verl_engine: VerlEngine, new_loaded: NewPolicy, new_policy: NewPolicy
) -> None:
    """verl's server says the same step of them, and vLLM has them under the same name."""
    policy, other = new_loaded(1), new_policy(2).folder
    right = verl_engine.score(policy, sequences(1))
    verl_engine._run(
        verl_engine._rollout.update_weights(
            iter(tensors(other).items()), peft_config=config(other), base_sync_done=True, global_steps=1
        )
    )
    assert verl_engine.score(policy, sequences(1)) != right
    with pytest.raises(EngineError, match="does not serve version 1 as its folder has it"):
        verl_engine.load(policy)
    with pytest.raises(EngineError, match="is not loaded"):
        verl_engine.score(policy, sequences(1))
    verl_engine.load(policy)
    assert verl_engine.score(policy, sequences(1)) == right


def test_an_adapter_whose_folder_changed_does_not_come_back(
    verl_engine: VerlEngine, new_loaded: NewPolicy, tmp_path: Path
) -> None:
    one, two = new_loaded(1), new_loaded(2)
    served = verl_engine.score(two, sequences(1))
    assert one.folder is not None
    weights = one.folder / "adapter_model.safetensors"
    weights.write_bytes((draw_adapter(tmp_path / "other", 9) / weights.name).read_bytes())
    with pytest.raises(EngineError, match=r"log-probs that it gave|its worker holds"):
        verl_engine.score(one, sequences(1))
    with pytest.raises(EngineError, match="has other weights than"):
        verl_engine.load(one)
    weights.unlink()
    with pytest.raises(EngineError, match="not readable"):
        verl_engine.load(one)
    assert verl_engine.score(two, sequences(1)) == served


def test_without_digests_a_sync_that_changes_nothing_is_found(
    verl_engine: VerlEngine, new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a vLLM whose worker keeps its adapters elsewhere."""
    monkeypatch.setattr(verl_engine, "_digests", False)
    policy = new_policy(1)
    update = verl_engine._rollout.update_weights

    async def zeros(weights: Iterator[tuple[str, torch.Tensor]], **how: Any) -> None:
        await update(((name, torch.zeros_like(tensor)) for name, tensor in weights), **how)

    with monkeypatch.context() as faulty:
        faulty.setattr(verl_engine._rollout, "update_weights", zeros)
        with pytest.raises(EngineError, match="answers as the base model does"):
            verl_engine.load(policy)
    assert verl_engine.load(policy).digest is None
    verl_engine.load(BASE)
    verl_engine.load(policy)
    verl_engine.unload(policy)


PROGRAM = """
import pathlib, sys
from worker_agent.engines.engine import EngineError, Policy
from worker_agent.engines.start import start_engine
from worker_agent.settings import EngineName, EngineSettings
model, log, folder = map(pathlib.Path, sys.argv[1:])
engine = start_engine(model, EngineSettings(EngineName.verl, log=log))
print("started", flush=True)
sys.stdin.readline()
lora, base = Policy("run", 1, "sha256:1", "lora", folder), Policy("run", 0, "sha256:0", "base", None)
for use in (lambda: engine.load(lora), lambda: engine.score(base, [[5, 6]])):
    try:
        use()
    except EngineError as error:
        print("EngineError", str(error).replace(chr(10), " "), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For what a killed process leaves behind; sockets lie in it, whose paths may not be as long as a test's."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder:
        yield folder


def test_a_core_that_died_is_said_and_everything_ends_with_the_process(
    tiny_model: Path, tmp_path: Path, short_folder: str
) -> None:
    log = tmp_path / "logs" / "verl.log"
    starter = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_model), str(log), str(draw_adapter(tmp_path / "v1", 1))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": short_folder},
        text=True,
    )
    assert starter.stdin is not None and starter.stdout is not None
    assert starter.stdout.readline() == "started\n", log.read_text()[-2000:]
    processes = descendants(starter.pid)
    (core,) = [pid for pid, command in processes.items() if "EngineCore" in command]
    os.kill(core, signal.SIGKILL)
    starter.stdin.write("\n")
    starter.stdin.flush()
    for line in (starter.stdout.readline(), starter.stdout.readline()):
        assert line.startswith("EngineError") and str(log) in line
    starter.kill()
    starter.wait()
    # Ray's agents try for a minute to report the end to a server that has gone, then they end too.
    agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    wait_until_gone(pid for pid, command in processes.items() if command not in agents)
