"""What vLLM in process does beyond the conformance suite: slots, buffers, one engine a process."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.worker_agent.engines import corruption
from tests.worker_agent.engines.test_conformance import PROMPT, largest_difference, sequences
from tests.worker_agent.tiny import BASE
from worker_agent.engines.engine import EngineError, Policy, Prompt, Sampling, generate
from worker_agent.engines.lora_digest import AdapterError, digest_of_folder, lora_layout
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.learner.learner import Learner

pytestmark = pytest.mark.xdist_group("models")

NewAdapter = Callable[[int], tuple[Policy, Learner]]


@pytest.fixture(autouse=True)
def no_adapters(engine: VllmEngine) -> Iterator[None]:
    """The engine is shared with tests of other modules: each test here begins and ends without adapters."""
    remove_all(engine)
    yield
    remove_all(engine)


def remove_all(engine: VllmEngine) -> None:
    for key in list(engine._adapters):
        engine._remove(key)
    assert engine._llm.llm_engine.list_loras() == set()


def test_an_adapter_moves_the_log_probs_as_the_learner_says(engine: VllmEngine, new_adapter: NewAdapter) -> None:
    policy, learner = new_adapter(1)
    rows = sequences()
    before = engine.score(BASE, rows)
    report = engine.load(policy)
    assert (report.served_version, report.served_hash) == (1, "sha256:1")
    assert report.caches_reset == ("prefix",)
    assert policy.folder is not None and report.digest is not None
    expected = digest_of_folder(policy.folder, "float32")
    assert (report.digest.registered, report.digest.active) == (expected, expected)
    assert report.digest.layout == lora_layout("vllm", engine.version, "float32")
    after = engine.score(policy, rows)
    assert largest_difference(before, after) > 1e-2
    masks = [[False, *[True] * (len(row) - 1)] for row in rows]
    assert largest_difference(after, [x.tolist() for x in learner.log_probs(rows, masks)]) < 1e-4
    assert engine.score(BASE, rows) == before
    assert engine.load(BASE).digest is None


def test_two_adapters_stay_and_the_one_in_use_is_not_the_one_to_go(engine: VllmEngine, new_adapter: NewAdapter) -> None:
    one, two, three = (new_adapter(version)[0] for version in (1, 2, 3))
    engine.load(one)
    engine.load(two)
    generate(engine, one, [Prompt(PROMPT, 1, 1)], Sampling())
    engine.load(three)
    with pytest.raises(EngineError, match=r"version 2 .* is not loaded"):
        engine.score(two, sequences(1))
    assert engine.score(one, sequences(1)) != engine.score(three, sequences(1))
    engine.unload(one)
    with pytest.raises(EngineError, match=r"version 1 .* is not loaded"):
        generate(engine, one, [Prompt(PROMPT, 1, 1)], Sampling())
    engine.unload(one)
    assert len(engine._llm.llm_engine.list_loras()) == 1


@pytest.mark.parametrize("corrupt", [corruption.cut_features, corruption.widen_features])
def test_a_refused_adapter_leaves_nothing_in_the_worker(
    engine: VllmEngine, new_adapter: NewAdapter, corrupt: Callable[[Path], None]
) -> None:
    """vLLM has taken these up, in part or in whole, when they are refused."""
    good, bad = new_adapter(1)[0], new_adapter(2)[0]
    engine.load(good)
    assert bad.folder is not None
    corrupt(bad.folder)
    with pytest.raises(EngineError):
        engine.load(bad)
    assert len(engine._llm.llm_engine.list_loras()) == 1


def test_a_weight_changed_in_memory_is_found(engine: VllmEngine, new_adapter: NewAdapter) -> None:
    policy = new_adapter(1)[0]
    engine.load(policy)
    adapter_id = engine._adapters[(policy.run_id, policy.version, policy.artifact_hash)].lora_int_id

    def zero_one_buffer(worker: Any) -> None:
        manager = worker.model_runner.lora_manager._adapter_manager
        module = manager.modules["model.layers.1.self_attn.qkv_proj"]
        module.lora_b_stacked[0][manager.lora_index_to_id.index(adapter_id)].zero_()

    right = engine.score(policy, sequences(1))
    engine._llm.collective_rpc(zero_one_buffer)
    assert engine.score(policy, sequences(1)) != right  # every label still says version 1
    with pytest.raises(EngineError, match="does not hold the adapter of version 1"):
        engine.load(policy)
    engine.load(policy)
    assert engine.score(policy, sequences(1)) == right


def test_the_digest_does_not_depend_on_the_slot(engine: VllmEngine, new_adapter: NewAdapter) -> None:
    one, two = new_adapter(1)[0], new_adapter(2)[0]
    engine.load(one)
    beside = engine.load(two).digest
    remove_all(engine)
    assert engine.load(two).digest == beside


def test_what_the_forward_pass_adds_of_its_own_is_in_the_digest(engine: VllmEngine, new_adapter: NewAdapter) -> None:
    """In ranks that the adapter does not have, and in parts that it leaves alone."""
    policy = new_adapter(1)[0]
    engine.load(policy)
    adapter_id = engine._adapters[(policy.run_id, policy.version, policy.artifact_hash)].lora_int_id

    def write_into_k(worker: Any) -> None:
        manager = worker.model_runner.lora_manager._adapter_manager
        module = manager.modules["model.layers.0.self_attn.qkv_proj"]
        module.lora_b_stacked[1][manager.lora_index_to_id.index(adapter_id), 0, 0, 0] = 1.0

    engine._llm.collective_rpc(write_into_k)
    held = engine._held(adapter_id)
    assert held is not None and held.active != held.registered
    with pytest.raises(EngineError, match="does not hold the adapter of version 1"):
        engine.load(policy)


def test_the_digest_tells_folders_apart(new_adapter: NewAdapter, tmp_path: Path) -> None:
    folder = new_adapter(1)[0].folder
    assert folder is not None
    assert digest_of_folder(folder, "float32") == digest_of_folder(folder, "float32")
    assert digest_of_folder(folder, "float32") != digest_of_folder(folder, "bfloat16")
    with pytest.raises(AdapterError, match="not readable"):
        digest_of_folder(tmp_path / "nowhere", "float32")


def test_a_second_engine_in_the_process_is_refused(tiny_model: Path, engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="has an open vLLM engine"):
        VllmEngine(tiny_model)
    assert len(engine.score(BASE, [[5, 6]])[0]) == 2


def test_a_released_engine_does_nothing_until_it_is_resumed(engine: VllmEngine, new_adapter: NewAdapter) -> None:
    policy, _ = new_adapter(1)
    engine.load(policy)
    before = engine.score(policy, sequences(1))
    core = engine._llm.llm_engine
    engine.release()
    try:
        for use in (
            lambda: generate(engine, policy, [Prompt(PROMPT, 1, 1)], Sampling()),
            lambda: engine.score(policy, sequences(1)),
            lambda: engine.load(policy),
            lambda: engine.unload(policy),
        ):
            with pytest.raises(EngineError, match="gave its memory away"):
                use()
        # Not only this class: vLLM's own scheduler takes a request and leaves it.
        core.add_request("waits", {"prompt_token_ids": list(PROMPT)}, SamplingParams(max_tokens=1))
        assert [core.step() for _ in range(5)] == [[]] * 5
    finally:
        engine.resume()
    finished = [output.request_id for _ in range(5) for output in core.step()]
    assert finished == ["waits"]
    engine.resume()
    assert engine.score(policy, sequences(1)) == before


def test_a_closed_engine_says_so_and_another_can_follow(tiny_model: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from worker_agent.engines.engine import EngineError, Policy\n"
        "from worker_agent.engines.vllm_engine import VllmEngine\n"
        "base = Policy('run', 0, 'sha256:base', 'base', None)\n"
        "for _ in range(2):\n"
        "    engine = VllmEngine(pathlib.Path(sys.argv[1]))\n"
        "    print(len(engine.score(base, [[5, 6]])[0]))\n"
        "    engine.close()\n"
        "    engine.close()\n"
        "try: engine.score(base, [[5, 6]])\n"
        "except EngineError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tiny_model)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stdout.splitlines() if not line.startswith("WARNING")]
    assert said == ["2", "2", "this engine was closed: start another"]
