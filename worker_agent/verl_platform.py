"""verl on this machine's platform: an accelerator that it finds by itself, or a CPU, which it has to be told of."""

import os

_CPU_PLATFORM = "worker_agent.learner.verl_cpu"
# What tells verl its platform: a process that this one starts needs the same.
PLATFORM_VARIABLES = ("VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM")


class PlatformError(Exception):
    """verl was imported on another platform than this machine's."""


def import_verl() -> bool:
    """Import verl; returns whether it is on the CPU. Sets `PLATFORM_VARIABLES` there.

    Raises `PlatformError` if something else imported verl before and it took another platform.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        named = [name for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
        if _CPU_PLATFORM not in named:
            os.environ["VERL_USE_EXTERNAL_MODULES"] = ",".join([*named, _CPU_PLATFORM])
        os.environ["VERL_PLATFORM"] = "cpu"
    import verl  # noqa: F401  (imported for its plugins)
    from verl.plugin.platform.platform_manager import get_platform

    wanted = "cpu" if on_cpu else "cuda"
    if get_platform().device_name != wanted:
        raise PlatformError(
            f"verl is on the platform {get_platform().device_name}, this machine needs {wanted}: "
            f"start the engine or the learner before anything else imports verl"
        )
    return on_cpu
