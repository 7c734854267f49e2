"""What the reference alone does: models whole, and digests of all their weights."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_agent.engines import corruption
from tests.worker_agent.tiny import BASE
from worker_agent.engines.engine import EngineError, Policy, Prompt, Sampling, generate
from worker_agent.engines.transformers_engine import TransformersEngine

pytestmark = pytest.mark.xdist_group("vllm-server")

ROWS = [[5, 6, 7, 8, 9]]


@pytest.fixture
def full(tiny_model: Path, tmp_path: Path, reference: TransformersEngine) -> Iterator[Policy]:
    """The tiny model with one matrix moved."""
    folder = tmp_path / "full"
    shutil.copytree(tiny_model, folder)
    change(folder, lambda tensors: next(t for name, t in tensors.items() if "q_proj.weight" in name).add_(0.05))
    policy = Policy(tmp_path.name, 1, "sha256:full", "full", folder)
    yield policy
    reference.unload(policy)


def change(folder: Path, what: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    what(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_whole_model_is_served_beside_the_base(reference: TransformersEngine, full: Policy) -> None:
    base, whole = reference.load(BASE), reference.load(full)
    assert base.digest is not None and whole.digest is not None
    assert base.digest.layout == whole.digest.layout
    assert base.digest.registered != whole.digest.registered
    assert reference.load(full).digest == whole.digest
    assert reference.score(full, ROWS) != reference.score(BASE, ROWS)
    assert generate(reference, full, [Prompt((5, 6), 1, 1)], Sampling())
    reference.unload(full)
    with pytest.raises(EngineError, match="is not loaded"):
        reference.score(full, ROWS)


def test_the_same_weights_whole_have_the_bases_digest(
    reference: TransformersEngine, tiny_model: Path, tmp_path: Path
) -> None:
    same = Policy(tmp_path.name, 1, "sha256:same", "full", tiny_model)
    assert reference.load(same).digest == reference.load(BASE).digest
    assert reference.score(same, ROWS) == reference.score(BASE, ROWS)
    reference.unload(same)


def drop_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(next(name for name in tensors if "q_proj.weight" in name)))


def add_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.7.self_attn.q_proj.weight": torch.ones(2, 2)}))


def put_nan(folder: Path) -> None:
    change(folder, lambda tensors: next(iter(tensors.values())).fill_(torch.nan))


def cut_shape(folder: Path) -> None:
    change(
        folder,
        lambda tensors: tensors.update(
            {name: t[:8].contiguous() for name, t in tensors.items() if "q_proj.weight" in name}
        ),
    )


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize("corrupt", [drop_tensor, add_tensor, put_nan, cut_shape, truncate, drop_config])
def test_a_model_that_is_not_whole_is_refused(
    reference: TransformersEngine, full: Policy, corrupt: Callable[[Path], None]
) -> None:
    assert full.folder is not None
    corrupt(full.folder)
    with pytest.raises(EngineError):
        reference.load(full)
    with pytest.raises(EngineError, match="is not loaded"):
        reference.score(full, ROWS)


def test_a_weight_changed_in_memory_is_found(tiny_model: Path, new_policy: Callable[[int], Policy]) -> None:
    engine = TransformersEngine(tiny_model)
    policy = new_policy(1)
    engine.load(policy)
    with torch.no_grad():
        engine._base.model.layers[0].self_attn.q_proj.lora_B[engine._adapters[policy.key]].weight.zero_()
    with pytest.raises(EngineError, match="does not hold the adapter of version 1"):
        engine.load(policy)
    engine.load(policy)
    with torch.no_grad():
        engine._base.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    with pytest.raises(EngineError, match="no longer has the weights of its start"):
        engine.load(BASE)


def test_a_failed_first_adapter_leaves_the_model_as_it_was(
    tiny_model: Path, new_policy: Callable[[int], Policy], reference: TransformersEngine
) -> None:
    engine = TransformersEngine(tiny_model)
    bad = new_policy(1)
    assert bad.folder is not None
    corruption.widen_features(bad.folder)
    with pytest.raises(EngineError):
        engine.load(bad)
    assert engine.score(BASE, ROWS) == reference.score(BASE, ROWS)
    assert engine.load(BASE).digest == reference.load(BASE).digest


def test_a_closed_engine_says_so(tiny_model: Path) -> None:
    engine = TransformersEngine(tiny_model)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        engine.score(BASE, ROWS)
    with pytest.raises(EngineError, match="was closed"):
        engine.render([{"role": "user", "content": "1"}])
