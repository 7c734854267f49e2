"""From settings to an engine at work. Only what the chosen engine needs is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker_agent.engines.engine import Engine
from worker_agent.settings import EngineName, EngineSettings


def start_engine(model: Path, settings: EngineSettings) -> Engine:
    """Start the engine that `settings` name on the model folder `model`.

    Raises `EngineError`, and ModuleNotFoundError naming what is not installed.
    """
    dtype, length = settings.dtype, settings.max_model_len
    lora: Any = {"lora_target_modules": settings.lora_target_modules, "max_lora_rank": settings.max_lora_rank}
    if settings.name is EngineName.transformers:
        from worker_agent.engines.transformers_engine import TransformersEngine

        return TransformersEngine(model, dtype=dtype, max_model_len=length)
    if settings.name is EngineName.vllm_server:
        from worker_agent.engines.vllm_server import VllmServerEngine

        return VllmServerEngine(model, url=settings.url, log=settings.log, dtype=dtype, max_model_len=length, **lora)
    if settings.name is EngineName.verl:
        from worker_agent.engines.verl_engine import VerlEngine

        return VerlEngine(model, log=settings.log, dtype=dtype, max_model_len=length, **lora)
    from worker_agent.engines.vllm_engine import VllmEngine

    return VllmEngine(model, dtype=dtype, max_model_len=length, **lora)
