"""An agent at work in the test's own process, around the real engine."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.client import Coordinator, Run
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.runs import CreateRun, FirstPolicy, RunSettings
from tests.client.relay import Relay
from tests.client.server_process import ServerProcess
from worker_agent.agent import Agent
from worker_agent.contract import generation_contract
from worker_agent.engines.engine import Completion, EngineError, LoadReport, Policy, Request, Sampling
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.models import identify
from worker_agent.settings import WorkerSettings
from worker_agent.status.vitals import Vitals
from worker_agent.tasks import Message, Task


def base_of(model: Path) -> BaseModelIdentity:
    identity = identify(model)
    return BaseModelIdentity(name=identity.name, revision=identity.revision, sha256=identity.sha256)


def new_run(
    coordinator: Coordinator,
    engine: VllmEngine,
    model: Path,
    settings: Mapping[str, object] | None = None,
    **contract: Any,
) -> Run:
    made = generation_contract(engine, identify(model), Sampling())
    return coordinator.create_run(
        CreateRun(
            run_id="run",
            settings=RunSettings.model_validate(
                {"group_size": 2, "heartbeat_seconds": 0.5, "lost_after_seconds": 5} | dict(settings or {})
            ),
            contract=made.model_copy(update=contract),
            vocab_size=identify(model).vocab_size,
            policy=FirstPolicy(base_model=base_of(model)),
        )
    )


def task(name: str) -> Task:
    messages = (Message(role="user", content=f"2 + {len(name)} ="),)
    return Task(task_id=name, group_id=name, messages=messages, task_source="test")


class Working:
    """An agent at work on a thread, with tasks that come one by one. The token is the worker's own."""

    def __init__(
        self,
        coordinator: Coordinator,
        server: ServerProcess | Relay,
        engine: Any,
        model: Path,
        data: Path,
        **settings: Any,
    ) -> None:
        token = coordinator.create_token(f"w1-{time.monotonic_ns()}", "worker", run_id="run", worker_id="w1")
        self._own = Coordinator(server.url, token.token, retry_seconds=0.5)
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self._error: list[Exception] = []
        of_worker = WorkerSettings(worker_id="w1", data=data, **{"max_tokens": 4} | settings)
        self.folder = of_worker.folder("run")
        self.vitals = Vitals()
        tasks = iter(self._tasks.get, None)
        self.agent = Agent(self._own.run("run"), engine, identify(model), of_worker, tasks, self.vitals)
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> "Working":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.agent.stop()
        self._thread.join()
        self._own.close()
        if self._error:
            raise self._error[0]

    def join(self) -> None:
        """Wait until the agent has ended by itself."""
        self._thread.join(30)
        assert not self._thread.is_alive()

    def give(self, *tasks: str | Task) -> None:
        for given in tasks:
            self._tasks.put(task(given) if isinstance(given, str) else given)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, which leaving raises."""
        return bool(self._error)

    def spooled(self) -> list[Path]:
        return sorted((self.folder / "spool").glob("*.arrow"))

    def _work(self) -> None:
        try:
            self.agent.run()
        except Exception as error:  # noqa: BLE001  raised again on the test's thread
            self._error.append(error)


class Hooked:
    """The real engine, with something happening when the next rollout is finished, or in the middle of loads."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.name, self.version = engine.name, engine.version
        self.logprobs_mode, self.dtype, self.kinds = engine.logprobs_mode, engine.dtype, engine.kinds
        self.hook: Callable[[], None] | None = None
        self.before_load: Callable[[Policy], None] = lambda policy: None
        self.after_load: Callable[[Policy], None] = lambda policy: None
        self.calls: list[tuple[str, int]] = []
        """Loads and unloads, by version."""
        self.memory: list[str] = []
        """What became of the engine's memory."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self._engine.render(messages)

    def load(self, policy: Policy) -> LoadReport:
        self.calls.append(("load", policy.version))
        self.before_load(policy)
        report = self._engine.load(policy)
        self.after_load(policy)
        return report

    def begin(self, policy: Policy, requests: Sequence[Request], sampling: Sampling) -> None:
        self._engine.begin(policy, requests, sampling)

    def finished(self, wait_seconds: float) -> dict[str, Completion | EngineError]:
        answer = self._engine.finished(wait_seconds)
        if answer and self.hook is not None:
            hook, self.hook = self.hook, None
            hook()
        return answer

    def interrupt(self) -> dict[str, Completion | EngineError]:
        return self._engine.interrupt()

    def score(self, policy: Policy, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._engine.score(policy, sequences)

    def unload(self, policy: Policy) -> None:
        self.calls.append(("unload", policy.version))
        self._engine.unload(policy)

    def release(self) -> None:
        self.memory.append("released")
        self._engine.release()

    def resume(self) -> None:
        if self.memory[-1:] == ["released"]:
            self.memory.append("resumed")
        self._engine.resume()

    def close(self) -> None:
        self._engine.close()


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come about in time")


def arrived(run: Run, group_id: str) -> list[Any]:
    return [r for r in run.rollouts(group_id=group_id) if r.state == "generated"]
