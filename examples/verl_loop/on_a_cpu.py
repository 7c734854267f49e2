"""What verl's Ray actors need where there is no GPU; named in VERL_USE_EXTERNAL_MODULES, before the rest."""

from typing import Any

import torch

from worker_agent.learner.verl_cpu import PlatformCPU, register_cpu_engines

register_cpu_engines()
# Ray is told of one GPU that is none: verl counts its workers by devices that Ray hands out.
PlatformCPU.ray_resource_name = lambda self: "GPU"  # type: ignore[method-assign]
PlatformCPU.ray_resource_options = lambda self, num_gpus: {"num_gpus": num_gpus}  # type: ignore[method-assign]

_init = torch.distributed.init_process_group


def _init_process_group(backend: str | None = None, **given: Any) -> None:
    """verl asks for gloo on the CPU and the platform's backend on the device, which here is the same twice."""
    _init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **given)


torch.distributed.init_process_group = _init_process_group
