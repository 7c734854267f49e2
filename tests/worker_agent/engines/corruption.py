"""What may be wrong with an adapter folder."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


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


ALL = [truncate, drop_config, put_nan, rename_tensor, cut_shape, cut_features, widen_features, claim_rank_64]
