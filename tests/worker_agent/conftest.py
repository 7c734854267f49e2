"""The tiny model and one real vLLM engine on it, shared by the tests of a process; trained adapters."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.client import Coordinator
from tests.client.server_process import ServerProcess
from tests.worker_agent.adapters import EVERY_MODULE
from tests.worker_agent.tiny import train
from worker_agent.engines.engine import Policy
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.learner.learner import Learner
from worker_agent.models import tiny_qwen2


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny-qwen2")


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine(tiny_model, lora_target_modules=EVERY_MODULE)
    yield engine
    engine.close()


@pytest.fixture
def new_learner(tiny_model: Path) -> Callable[..., Learner]:
    def make(micro_batch_size: int = 4, seed: int = 42) -> Learner:
        return Learner(tiny_model, group_size=4, micro_batch_size=micro_batch_size, seed=seed)

    return make


@pytest.fixture
def new_adapter(tmp_path: Path, new_learner: Callable[..., Learner]) -> Callable[[int], tuple[Policy, Learner]]:
    """Adapter policies 1, 2, 3 ... of one run, each with the learner that holds the same weights."""

    def make(version: int) -> tuple[Policy, Learner]:
        learner = new_learner()
        train(learner, seed=version)
        folder = tmp_path / f"v{version}"
        learner.export_adapter(folder, base_model_name="tiny-qwen2")
        return Policy(tmp_path.name, version, f"sha256:{version}", "lora", folder), learner

    return make


@pytest.fixture
def coordinator(server: ServerProcess) -> Iterator[Coordinator]:
    """The admin's client of this test's coordinator."""
    with Coordinator(server.url, server.token) as coordinator:
        yield coordinator
