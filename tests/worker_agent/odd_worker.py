"""`worker-agent` that does one thing wrong, as the word in the file named by `ODD_WORKER` says at that moment.

downloading, verifying, loading: it stays there, half-way, until the word changes. keep_old: it loads a version's name
with the weights of the version before. zero_one: it loses one tensor of what the forward pass multiplies with. The
last two believe their label: they do not compare what they hold with the files. Beside the file, `NAME.reached` tells
where it stays.
"""

import os
import time
from pathlib import Path
from typing import Any

from coordinator.client.artifacts import IncomingFile
from coordinator.wire.policies import PolicyView
from coordinator.wire.workers import WeightDigest
from worker_agent import artifacts
from worker_agent.cli import main
from worker_agent.engines import vllm_engine
from worker_agent.engines.engine import Policy
from worker_agent.engines.vllm_engine import VllmEngine

_WORD = Path(os.environ["ODD_WORKER"])


def _word() -> str:
    return _WORD.read_text(encoding="utf-8") if _WORD.is_file() else ""


def _stay(where: str) -> None:
    if _word() == where:
        _WORD.with_name(f"{_WORD.name}.reached").write_text(where, encoding="utf-8")
    while _word() == where:
        time.sleep(0.05)


def write_by_halves(file: IncomingFile, chunk: bytes) -> int:
    _write(file, chunk[: len(chunk) // 2])
    file._opened().flush()
    _stay("downloading")
    return _write(file, chunk[len(chunk) // 2 :])


def verify_slowly(folder: Path, policy: PolicyView) -> None:
    _stay("verifying")
    _verify(folder, policy)


class OddEngine(VllmEngine):
    _before: Path | None = None

    def _load_adapter(self, policy: Policy, folder: Path) -> WeightDigest:
        if _word() == "keep_old":
            assert self._before is not None
            return super()._load_adapter(policy, self._before)
        digest = super()._load_adapter(policy, folder)
        _stay("loading")
        if _word() != "zero_one":
            self._before = folder
            return digest
        adapter = self._adapters[policy.key].lora_int_id

        def zero_one(worker: Any) -> None:
            manager = worker.model_runner.lora_manager._adapter_manager
            module = manager.modules["model.layers.1.self_attn.qkv_proj"]
            module.lora_b_stacked[0][manager.lora_index_to_id.index(adapter)].zero_()

        self._llm.collective_rpc(zero_one)
        held = self._held(adapter)
        assert held is not None
        return held


_verify, _write = artifacts.verify, IncomingFile.write
if __name__ == "__main__":
    IncomingFile.write = write_by_halves  # type: ignore[method-assign]
    artifacts.verify = verify_slowly  # type: ignore[attr-defined]
    vllm_engine.VllmEngine = OddEngine  # type: ignore[misc]
    main()
