"""Adapters for the tiny model, drawn and not learned: made without a learner, and all different."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, LAYERS = 16, 2
HIDDEN, INNER = 64, 128
SHAPES = {
    "self_attn.q_proj": (HIDDEN, 64),
    "self_attn.v_proj": (HIDDEN, 32),
    "self_attn.k_proj": (HIDDEN, 32),
    "self_attn.o_proj": (64, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
"""Every linear module of a layer, with its features in and out."""
ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")
EVERY_MODULE = tuple(name.rpartition(".")[2] for name in SHAPES)


def draw_adapter(folder: Path, seed: int, modules: Sequence[str] = ATTENTION, rank: int = RANK) -> Path:
    """A LoRA adapter in PEFT's layout; each seed has weights of its own."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in modules:
            features_in, features_out = SHAPES[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, features_in, generator=draw)
            tensors[f"{name}.lora_B.weight"] = torch.randn(features_out, rank, generator=draw) / 10
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 32,
        "bias": "none",
        "target_modules": sorted(module.rpartition(".")[2] for module in modules),
        "base_model_name_or_path": "tiny-qwen2",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
