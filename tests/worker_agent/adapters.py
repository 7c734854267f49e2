"""Adapters for the tiny model, drawn and not learned: made without a learner, and all different."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, HIDDEN, LAYERS = 16, 64, 2
FEATURES = {"q_proj": 64, "v_proj": 32}


def draw_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter in PEFT's layout; each seed has weights of its own."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, features in FEATURES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=draw)
            tensors[f"{name}.lora_B.weight"] = torch.randn(features, RANK, generator=draw) / 10
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 32, "bias": "none",
              "target_modules": sorted(FEATURES), "base_model_name_or_path": "tiny-qwen2"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
