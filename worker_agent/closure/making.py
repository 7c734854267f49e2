"""Makes a fixture, in a process of its own: `python -m worker_agent.closure.making MODEL DTYPE OUT`."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

from worker_agent.closure.fixture import make_fixture
from worker_agent.closure.profile import GPU_MEMORY_FRACTION, MAX_MODEL_LEN, ClosureError
from worker_agent.closure.samples import Chat
from worker_agent.engines.engine import EngineError
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.logs import event, log_to_stderr
from worker_agent.models import ModelError, identify


def main() -> None:
    """Exit status: 0 with the fixture written, 1 with the reason as the last log line. An existing one stays."""
    log_to_stderr()
    model, dtype, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    try:
        engine = VllmEngine(model, dtype=dtype, max_model_len=MAX_MODEL_LEN, gpu_memory_fraction=GPU_MEMORY_FRACTION)
        try:
            fixture = make_fixture(engine, identify(model), Chat(model))
        finally:
            engine.close()
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=out.parent, encoding="utf-8") as scratch:
            scratch.write(fixture.model_dump_json(indent=1) + "\n")
            scratch.flush()
            os.chmod(scratch.name, 0o644)
            os.link(scratch.name, out)
    except (ClosureError, EngineError, ModelError, OSError) as error:
        event("stopped", level=logging.ERROR, error=str(error), kind=type(error).__name__)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
