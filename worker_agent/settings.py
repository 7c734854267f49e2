"""What one worker process is told. The command line and the environment fill it in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

AcrossVersions = Literal["continue", "finish"]
"""What becomes of rollouts in the making when the engine has to load another version, or is to give its memory away:
`continue` cuts them there, and they go on under the version that is active then, as another span; `finish` waits for
them first."""


@dataclass(frozen=True)
class WorkerSettings:
    """One worker of one run.

    `data` is the folder of its spool, its artifacts and its list of finished groups; several workers may
    share it, since each has a folder of its own below. `max_tokens` bounds one completion in tokens, a text
    in `stop` ends it. Up to `groups_at_once` groups are in flight. Everything else about sampling is the
    run's contract. `across_versions`: see `AcrossVersions`.
    """

    worker_id: str
    data: Path
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    groups_at_once: int = 4
    across_versions: AcrossVersions = "continue"

    def folder(self, run_id: str) -> Path:
        """The folder of this worker in this run."""
        return self.data / run_id / self.worker_id


class EngineName(StrEnum):
    """Engines that `worker-agent run` can start."""

    vllm = "vllm"
    vllm_server = "vllm-server"
    verl = "verl"
    transformers = "transformers"


@dataclass(frozen=True)
class EngineSettings:
    """The engine of one worker.

    `dtype` is a torch dtype's name, `max_model_len` the longest prompt with its completion in tokens. Adapters may have
    the modules `lora_target_modules` and a rank of up to `max_lora_rank`; transformers takes any. `url` is the
    address of a vLLM server that runs already, for `vllm-server` alone. `log` is the file for the output of a server
    that is started, by `vllm-server` or `verl`.
    """

    name: EngineName
    dtype: str = "float32"
    max_model_len: int = 128
    lora_target_modules: tuple[str, ...] = ("q_proj", "v_proj")
    max_lora_rank: int = 16
    url: str | None = None
    log: Path = Path("vllm-server.log")
