"""vLLM itself, on the tiny model: log-probs, seeds, adapters, and what it must refuse."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.worker_agent.tiny import BASE
from worker_agent.engines.engine import Engine, EngineError, Policy, Prompt, Sampling, sample_seed
from worker_agent.engines.lora_digest import AdapterError, digest_of_folder, lora_layout
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.learner.learner import Learner

pytestmark = pytest.mark.xdist_group("models")

NewAdapter = Callable[[int], tuple[Policy, Learner]]
PROMPT = tuple(range(20, 60))  # longer than one block of the prefix cache


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


def sequences(count: int = 4) -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [[*PROMPT, *draw.integers(3, 400, size=20).tolist()] for _ in range(count)]


def largest_difference(a: list[list[float]], b: list[list[float]]) -> float:
    return max(abs(x - y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


def test_it_says_what_it_is(engine: VllmEngine) -> None:
    as_protocol: Engine = engine
    assert (as_protocol.name, as_protocol.logprobs_mode, as_protocol.dtype) == ("vllm", "raw", "float32")
    assert as_protocol.version.split(".")[0] == "0"


def test_render_is_the_models_own_template(engine: VllmEngine, tiny_model: Path) -> None:
    ids = engine.render([{"role": "user", "content": "1 + 2 ="}])
    text = AutoTokenizer.from_pretrained(tiny_model).decode(ids)
    assert text == "<|im_start|>user\n1 + 2 =<|im_end|>\n<|im_start|>assistant\n"


def test_generated_log_probs_equal_scored_ones(engine: VllmEngine) -> None:
    prompts = [Prompt(PROMPT, seed=1, samples=3), Prompt((5, 6, 7), seed=2, samples=2)]
    for sampling in (Sampling(), Sampling(temperature=0.5, top_p=0.9, top_k=20, min_p=0.01)):
        completions = engine.generate(BASE, prompts, sampling)
        assert [len(samples) for samples in completions] == [3, 2]
        for prompt, samples in zip(prompts, completions, strict=True):
            scored = engine.score(BASE, [[*prompt.token_ids, *c.token_ids] for c in samples])
            rest = [log_probs[len(prompt.token_ids) :] for log_probs in scored]
            assert largest_difference([c.log_probs for c in samples], rest) < 1e-5
            assert all(log_probs[0] == 0.0 and max(log_probs[1:]) < 0 for log_probs in scored)


def test_samples_are_independent_and_reproducible(engine: VllmEngine) -> None:
    def drawn(prompts: list[Prompt]) -> list[tuple[int, ...]]:
        return [tuple(c.token_ids) for samples in engine.generate(BASE, prompts, Sampling()) for c in samples]

    together = drawn([Prompt(PROMPT, seed=seed, samples=4) for seed in (7, 8, 9)])
    assert len(set(together)) == 12  # neighbouring seeds share no stream
    assert drawn([Prompt(PROMPT, seed=8, samples=4)]) == together[4:8]  # whatever else was in the batch
    assert drawn([Prompt(PROMPT, seed=8, samples=2)]) == together[4:6]
    assert 0 <= sample_seed(8, 0) < 2**63 and sample_seed(8, 0) != sample_seed(7, 1)


def test_the_end_token_is_part_of_the_completion(engine: VllmEngine) -> None:
    samples = engine.generate(BASE, [Prompt((5, 6, 7), seed=3, samples=64)], Sampling(max_tokens=80))[0]
    ended = [c for c in samples if c.finish_reason == "stop"]
    assert ended and len(ended) < len(samples)
    assert all(c.token_ids[-1] == 2 and len(c.log_probs) == len(c.token_ids) for c in ended)
    assert all(c.finish_reason == "length" and len(c.token_ids) == 80 for c in samples if 2 not in c.token_ids)


def test_a_stop_text_ends_the_completion(engine: VllmEngine) -> None:
    samples = engine.generate(BASE, [Prompt((5, 6, 7), 3, 32)], Sampling(max_tokens=80, stop=("1", "2")))[0]
    assert any(c.finish_reason == "stop" for c in samples)
    assert not any(digit in c.text for c in samples for digit in "12")


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
    assert report.digest.layout == lora_layout(engine.version, "float32")
    after = engine.score(policy, rows)
    assert largest_difference(before, after) > 1e-2
    masks = [[False, *[True] * (len(row) - 1)] for row in rows]
    assert largest_difference(after, [x.tolist() for x in learner.log_probs(rows, masks)]) < 1e-4
    assert engine.score(BASE, rows) == before
    assert engine.load(BASE).digest is None


def test_one_prompt_under_two_policies(engine: VllmEngine, new_adapter: NewAdapter) -> None:
    """The prompt's cached prefix under one policy must not serve the other."""
    policies = [BASE, new_adapter(1)[0], new_adapter(2)[0]]
    digests = [digest.registered for policy in policies if (digest := engine.load(policy).digest)]
    assert len(set(digests)) == 2  # none of the base model
    first: dict[int, Any] = {}
    for policy in [*policies, *policies]:
        (samples,) = engine.generate(policy, [Prompt(PROMPT, seed=11, samples=2)], Sampling())
        scored = engine.score(policy, [[*PROMPT, *c.token_ids] for c in samples])
        assert largest_difference([c.log_probs for c in samples], [x[len(PROMPT) :] for x in scored]) < 1e-5
        assert first.setdefault(policy.version, samples) == samples
    assert len({tuple(samples[0].log_probs) for samples in first.values()}) == 3


def test_two_adapters_stay_and_the_one_in_use_is_not_the_one_to_go(engine: VllmEngine, new_adapter: NewAdapter) -> None:
    one, two, three = (new_adapter(version)[0] for version in (1, 2, 3))
    engine.load(one)
    engine.load(two)
    engine.generate(one, [Prompt(PROMPT, 1, 1)], Sampling())
    engine.load(three)
    with pytest.raises(EngineError, match=r"version 2 .* is not loaded"):
        engine.score(two, sequences(1))
    assert engine.score(one, sequences(1)) != engine.score(three, sequences(1))
    engine.unload(one)
    with pytest.raises(EngineError, match=r"version 1 .* is not loaded"):
        engine.generate(one, [Prompt(PROMPT, 1, 1)], Sampling())
    engine.unload(one)
    assert len(engine._llm.llm_engine.list_loras()) == 1


def truncate(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def drop_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def put_nan(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, folder / "adapter_model.safetensors")


def rename_tensor(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name.replace("q_proj", "o_proj").replace("v_proj", "o_proj")] = tensors.pop(name)
    save_file(tensors, folder / "adapter_model.safetensors")


def cut_shape(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: t[:, :8].contiguous() for name, t in tensors.items()}, folder / "adapter_model.safetensors")


def cut_features(folder: Path) -> None:
    """vLLM itself would copy these into a corner of its buffers and serve them."""
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = {name: t[:, :8].contiguous() if "lora_A" in name else t for name, t in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def widen_features(folder: Path) -> None:
    """These do not fit into vLLM's buffers, which it finds out after it registered the adapter."""
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = {name: t.repeat(1, 2) if "lora_A" in name else t for name, t in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def claim_rank_64(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 64}))


@pytest.mark.parametrize(
    "corrupt",
    [truncate, drop_config, put_nan, rename_tensor, cut_shape, cut_features, widen_features, claim_rank_64],
)
def test_a_corrupted_adapter_is_refused_and_the_old_one_stays(
    engine: VllmEngine, new_adapter: NewAdapter, corrupt: Callable[[Path], None]
) -> None:
    good, bad = new_adapter(1)[0], new_adapter(2)[0]
    engine.load(good)
    before = engine.score(good, sequences(1))
    assert bad.folder is not None
    corrupt(bad.folder)
    with pytest.raises(EngineError):
        engine.load(bad)
    with pytest.raises(EngineError, match="not loaded"):
        engine.score(bad, sequences(1))
    assert engine.score(good, sequences(1)) == before
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


@pytest.mark.parametrize("length", [0, 128])
def test_a_sequence_that_does_not_fit_is_refused(engine: VllmEngine, length: int) -> None:
    with pytest.raises(EngineError, match=f"sequence 0 has {length} tokens"):
        engine.score(BASE, [[5] * length])
    with pytest.raises(EngineError, match=f"sequence 0 has {length} tokens"):
        engine.generate(BASE, [Prompt((5,) * length, 1, 1)], Sampling())
    assert len(engine.score(BASE, [[5] * 127])[0]) == 127


def test_a_token_beyond_the_vocabulary_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="refused"):
        engine.score(BASE, [[5, 6, 7], [5, 6, 100_000]])
    with pytest.raises(EngineError, match="refused"):
        engine.generate(BASE, [Prompt((5, 6), 1, 1)], Sampling(top_p=1.5))
    assert len(engine.score(BASE, [[5, 6]])[0]) == 2


@pytest.mark.parametrize(("kind", "has_folder"), [("full", True), ("lora", False), ("base", True), ("stream", False)])
def test_no_other_kind_passes_for_an_adapter_or_the_base(
    engine: VllmEngine, tmp_path: Path, kind: str, has_folder: bool
) -> None:
    policy = Policy("run", 1, "sha256:1", kind, tmp_path if has_folder else None)
    with pytest.raises(EngineError, match=f"is of kind {kind}"):
        engine.load(policy)
    with pytest.raises(EngineError, match=f"is of kind {kind}"):
        engine.score(policy, [[5, 6]])


def test_a_second_engine_in_the_process_is_refused(tiny_model: Path, engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="has an open vLLM engine"):
        VllmEngine(tiny_model)
    assert len(engine.score(BASE, [[5, 6]])[0]) == 2


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
