"""How long each stage takes, and how much memory is in use at its end."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker_agent.closure.result import Stage
from worker_agent.logs import event

_MIB = 2**20


class Meter:
    """The stages of this process, in order. `on_gpu`: the GPU's memory is read too."""

    def __init__(self, on_gpu: bool) -> None:
        self.stages: list[Stage] = []
        self._on_gpu = on_gpu

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside, and log its begin and end."""
        event("stage", stage=name)
        started = time.monotonic()
        yield
        stage = Stage(
            name=name,
            seconds=round(time.monotonic() - started, 3),
            rss_mib=round(resident_bytes() / _MIB, 1),
            peak_rss_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),  # Linux gives KiB
            device_mib=self._device_mib(),
        )
        self.stages.append(stage)
        event("stage_done", **stage.model_dump(exclude={"name"}), stage=name)

    def _device_mib(self) -> float | None:
        if not self._on_gpu:
            return None
        import torch

        free, total = torch.cuda.mem_get_info()
        return round((total - free) / _MIB, 1)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def available_bytes() -> int:
    """Main memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
