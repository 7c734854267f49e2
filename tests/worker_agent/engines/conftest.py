"""Every engine on the tiny model, each of them once in a test process, and adapters to load into them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.worker_agent.adapters import EVERY_MODULE, draw_adapter
from tests.worker_agent.engines.processes import descendants, wait_until_gone
from worker_agent.engines.engine import Engine, Policy
from worker_agent.engines.transformers_engine import TransformersEngine
from worker_agent.engines.verl_engine import VerlEngine
from worker_agent.engines.vllm_server import VllmServerEngine

# Ray ends its workers at 95 % of the machine's memory, which is here not its own: other tests' engines are in it too.
os.environ.setdefault("RAY_memory_usage_threshold", "0.98")

# By engine, the fixture that has it. Tests of one engine run in one process, so that it is started once.
ENGINES = [
    pytest.param("reference", marks=pytest.mark.xdist_group("vllm-server"), id="transformers"),
    pytest.param("engine", marks=pytest.mark.xdist_group("models"), id="vllm"),
    pytest.param("server_engine", marks=pytest.mark.xdist_group("vllm-server"), id="vllm-server"),
    pytest.param("verl_engine", marks=pytest.mark.xdist_group("verl"), id="verl"),
]


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_model)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def server_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServerEngine]:
    engine = VllmServerEngine(
        tiny_model, log=tmp_path_factory.mktemp("vllm-server") / "server.log", lora_target_modules=EVERY_MODULE
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def verl_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerlEngine]:
    before = descendants(os.getpid())
    engine = VerlEngine(tiny_model, log=tmp_path_factory.mktemp("verl") / "verl.log", lora_target_modules=EVERY_MODULE)
    its_own = descendants(os.getpid()).keys() - before.keys()
    assert engine._ray._folder is not None
    folder = Path(engine._ray._folder)
    assert len(its_own) > 3 and folder.exists()
    yield engine
    engine.close()
    engine.close()
    wait_until_gone(its_own)
    assert not folder.exists()


@pytest.fixture(params=ENGINES)
def each(request: pytest.FixtureRequest) -> Engine:
    """One engine after the other."""
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def new_policy(tmp_path: Path) -> Callable[[int], Policy]:
    """Adapter policies 1, 2, 3 ... of a run of this test's own."""

    def make(version: int) -> Policy:
        folder = tmp_path / f"v{version}"
        return Policy(tmp_path.name, version, f"sha256:{version}", "lora", draw_adapter(folder, version))

    return make


@pytest.fixture
def policies(each: Engine, new_policy: Callable[[int], Policy]) -> Iterator[Callable[[int], Policy]]:
    """As `new_policy`; the engine has forgotten them when the test is over."""
    made: list[Policy] = []

    def make(version: int) -> Policy:
        made.append(new_policy(version))
        return made[-1]

    yield make
    for policy in made:
        each.unload(policy)
