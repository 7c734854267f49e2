"""A worker of the coordinator stage: the real agent around a real engine that answers with the fixture's rollouts.

`python -m worker_agent.closure.replaying --run RUN --worker-id ID --model FOLDER --dtype DTYPE --fixture FILE --data
FOLDER --share I/N`: this worker has every Nth rollout from the Ith on.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from coordinator.client import Coordinator, CoordinatorError
from worker_agent.agent import Agent, AgentError
from worker_agent.closure.comparisons import compare
from worker_agent.closure.fixture import Fixture, FixtureRollout, read_fixture
from worker_agent.closure.profile import GPU_MEMORY_FRACTION, MAX_MODEL_LEN, ClosureError
from worker_agent.closure.samples import messages
from worker_agent.contract import ContractMismatch
from worker_agent.engines.engine import Completion, EngineError, Policy, Request, Sampling
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.logs import event, log_to_stderr
from worker_agent.models import ModelError, identify
from worker_agent.settings import WorkerSettings
from worker_agent.tasks import Message, Task

TASK_SOURCE = "closure"


class ReplayingEngine(VllmEngine):
    """vLLM that answers the fixture's questions as the base model once did, and no others.

    What it hands out it has scored itself first, so it answers for log-probs that are its own policy's.
    """

    def __init__(self, model: Path, fixture: Fixture, *, dtype: str) -> None:
        super().__init__(model, dtype=dtype, max_model_len=MAX_MODEL_LEN, gpu_memory_fraction=GPU_MEMORY_FRACTION)
        self._recorded = {rollout.token_ids[: rollout.prompt_tokens]: rollout for rollout in fixture.rollouts}
        self._answers: dict[str, Completion | EngineError] = {}

    def begin(self, policy: Policy, requests: Sequence[Request], sampling: Sampling) -> None:
        """The recorded answer to each prompt. Raises `EngineError` for another policy than the base model."""
        if policy.kind != "base":
            raise EngineError(f"the fixture's answers are the base model's, not those of version {policy.version}")
        rollouts = [self._rollout(request) for request in requests]
        scored = self.score(policy, [rollout.token_ids for rollout in rollouts])
        own = [row[rollout.prompt_tokens :] for row, rollout in zip(scored, rollouts, strict=True)]
        comparison = compare(own, [rollout.behavior_log_probs for rollout in rollouts])
        event("fixture_scored", **comparison.model_dump())
        if not comparison.passed:
            raise EngineError(f"the fixture's log-probs are not this engine's: {comparison}")
        for request, rollout in zip(requests, rollouts, strict=True):
            self._answers[request.request_id] = Completion(
                token_ids=list(rollout.token_ids[rollout.prompt_tokens :]),
                log_probs=list(rollout.behavior_log_probs),
                finish_reason="stop",
                text=rollout.text,
            )

    def finished(self, wait_seconds: float) -> dict[str, Completion | EngineError]:
        """All that was begun: it needs no time."""
        answers, self._answers = self._answers, {}
        return answers

    def interrupt(self) -> dict[str, Completion | EngineError]:
        """There is nothing to break off."""
        return self.finished(0.0)

    def _rollout(self, request: Request) -> FixtureRollout:
        if request.token_ids not in self._recorded:
            raise EngineError("the fixture has no such answer")
        return self._recorded[request.token_ids]


def _tasks(rollouts: Sequence[FixtureRollout]) -> Iterator[Task]:
    """One task a rollout. Never ends by itself: the worker stays for the next version."""
    for rollout in rollouts:
        yield Task(
            task_id=rollout.task_id,
            group_id=rollout.task_id,
            task_source=TASK_SOURCE,
            messages=tuple(Message.model_validate(message) for message in messages(rollout.task_id)),
        )
    threading.Event().wait()


def main() -> None:
    """The address and the token come from the environment. Works until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--fixture", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--share", required=True)
    given = parser.parse_args()
    first, of = map(int, given.share.split("/"))
    log_to_stderr()
    try:
        fixture, _ = read_fixture(given.fixture)
        settings = WorkerSettings(
            worker_id=given.worker_id,
            data=given.data,
            max_tokens=fixture.max_tokens,
            groups_at_once=len(fixture.rollouts),
        )
        with Coordinator() as coordinator:
            engine = ReplayingEngine(given.model, fixture, dtype=given.dtype)
            try:
                share = fixture.rollouts[first::of]
                agent = Agent(coordinator.run(given.run), engine, identify(given.model), settings, _tasks(share))
                signal.signal(signal.SIGTERM, lambda *_: agent.stop())
                agent.run()
            finally:
                engine.close()
    except (AgentError, ClosureError, ContractMismatch, CoordinatorError, EngineError, ModelError, OSError) as error:
        event("stopped", level=logging.ERROR, error=str(error), kind=type(error).__name__)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
