"""Digest of LoRA weights: from an adapter folder, and from inside a vLLM worker.

The two are equal when the worker holds the folder's weights, so a version label need not be believed. A
digest is the sha256 over the tensors sorted by name, each as "name|shape|dtype|" and its bytes, where a name
is the module's and ".A" or ".B", the dtype is the engine's, and B is multiplied by alpha / r (alpha / sqrt(r)
for rank-stabilised LoRA). Tensors are whole: one worker, no tensor parallelism.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
VERL_ON_VLLM = "+vllm"  # between the two versions of an engine on verl


# By engine, the library whose memory the digest is of. An engine that is not here gives none.
_LIBRARIES = {"vllm": "vllm", "vllm-server": "vllm", "verl": "vllm", "transformers": "transformers"}


def lora_layout(engine: str, version: str, dtype: str) -> str | None:
    """Names what such a digest is over: engines of the same layout give equal ones for the same adapter.

    `engine` and its `version` are as a worker registers them; None for an engine that gives no digest. What verl
    registers ends in the version of the vLLM below it.
    """
    library = _LIBRARIES.get(engine)
    return library and f"{library}-{version.rpartition(VERL_ON_VLLM)[2]}/lora/{dtype}/tp1"


class AdapterError(Exception):
    """An adapter folder is incomplete, unreadable, or holds weights that no one should serve."""


def digest_of_folder(folder: Path, dtype: str) -> str:
    """Digest that an engine of `dtype` must report once it holds the adapter in `folder` (PEFT's layout).

    Raises `AdapterError`, naming the file or the tensor.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        weights = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise AdapterError(
            f"adapter folder {folder} is not readable: {error!r}; download the version's files again"
        ) from error
    if rank < 1 or not weights:
        raise AdapterError(f"adapter folder {folder} has rank {rank} and {len(weights)} tensors")
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    named = []
    for key, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"adapter folder {folder}: {key} is not finite")
        module, _, matrix = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        if matrix not in ("A", "B"):
            raise AdapterError(f"adapter folder {folder}: {key} is not a LoRA A or B matrix")
        if tensor.ndim != 2 or tensor.shape[0 if matrix == "A" else 1] != rank:
            raise AdapterError(f"adapter folder {folder}: {key} of shape {tuple(tensor.shape)} is not of rank {rank}")
        tensor = tensor.to(getattr(torch, dtype))
        named.append((f"{module}.{matrix}", tensor * scaling if matrix == "B" else tensor))
    return tensors_digest(named)


def check_adapter(folder: Path, modules: Sequence[str], max_rank: int) -> None:
    """Raises `AdapterError` for an adapter that does not fit an engine with room for `modules` up to `max_rank`.

    Modules are named by the last part of their names. The folder is one that `digest_of_folder` can read.
    """
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as weights:
        found = {key.split(".lora_")[0].rpartition(".")[2] for key in weights.keys()}  # noqa: SIM118
    rank = int(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["r"])
    if others := sorted(found - set(modules)):
        raise AdapterError(
            f"the adapter has {', '.join(others)}, and this engine was started for {', '.join(modules)}: start the "
            f"worker with lora_target_modules {json.dumps(sorted(found | set(modules)))}"
        )
    if rank > max_rank:
        raise AdapterError(
            f"the adapter has rank {rank}, and this engine was started for up to {max_rank}: start the worker with a "
            f"larger max_lora_rank"
        )


def is_zero(folder: Path) -> bool:
    """Whether the adapter in `folder` leaves its model as it is: every B is zero, as before the first step."""
    from safetensors.torch import load_file

    return not any(bool(w.any()) for key, w in load_file(folder / ADAPTER_WEIGHTS).items() if ".lora_B" in key)


class LoraDigest:
    """vLLM worker extension (`worker_extension_cls`): mixed into the worker, called by `collective_rpc`.

    Reads `LoRAModelManager`, which is vLLM's own and not a public interface; written against vLLM 0.28.
    """

    model_runner: Any

    def lora_digest(self, adapter_id: int) -> "dict[str, str | None]":
        """`registered`: digest of the adapter as vLLM has taken it up. `active`: of what the forward pass
        multiplies with.

        The second is read from the buffers of the adapter's slot, which a fault can change without touching the
        first. It does not depend on which slot that is, how many there are, or how much rank they have room for;
        healthy, it is equal to the first. Both are None where the worker does not have the adapter, `active` where
        it has no slot.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        if adapter_id not in manager._registered_adapters:
            return {"registered": None, "active": None}
        adapter = manager._registered_adapters[adapter_id]
        slot = manager.lora_index_to_id.index(adapter_id) if adapter_id in manager.lora_index_to_id else None
        registered: list[tuple[str, torch.Tensor]] = []
        active: list[tuple[str, torch.Tensor]] = []
        for name, module in manager.modules.items():
            parts = manager.packed_modules.get(name) or [name]  # qkv_proj is packed from q_proj, k_proj, v_proj
            weights = manager._get_lora_layer_weights(adapter, name)
            a_parts = _as_list(weights.lora_a if weights else None, len(parts))
            b_parts = _as_list(weights.lora_b if weights else None, len(parts))
            for part, a, b in zip(parts, a_parts, b_parts, strict=True):
                registered += [(f"{part}.{matrix}", t) for matrix, t in (("A", a), ("B", b)) if t is not None]
            if slot is None:
                continue
            buffers = zip(parts, a_parts, b_parts, module.lora_a_stacked, module.lora_b_stacked, strict=True)
            for part, a, b, a_buffers, b_buffers in buffers:
                active += _in_use(f"{part}.A", a_buffers[slot, 0], None if a is None else a.shape[0])
                # Lies as (features, rank); seen from its rank it is like A.
                active += [
                    (key, rows.T)
                    for key, rows in _in_use(f"{part}.B", b_buffers[slot, 0].T, None if b is None else b.shape[1])
                ]
        return {"registered": tensors_digest(registered), "active": None if slot is None else tensors_digest(active)}


def _in_use(name: str, buffer: "torch.Tensor", rank: int | None) -> "list[tuple[str, torch.Tensor]]":
    """Of a (room for rank, features) buffer the ranks of the adapter, None for a part that it leaves alone.

    vLLM multiplies with the rest as well, which is zeros: anything else there is named on its own.
    """
    used = [] if rank is None else [(name, buffer[:rank])]
    rest = buffer[rank or 0 :]
    return [*used, (f"{name}.beyond", rest)] if bool(rest.any()) else used


def _as_list(weights: Any, parts: int) -> list[Any]:
    if weights is None:
        return [None] * parts
    return weights if isinstance(weights, list) else [weights]


def tensors_digest(named: "Iterable[tuple[str, torch.Tensor]]") -> str:
    """sha256 (hex) over tensors by name, as the head of this module has it; their order does not matter."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        flat = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{tuple(flat.shape)}|{flat.dtype}|".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
