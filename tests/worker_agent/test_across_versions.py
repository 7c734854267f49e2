"""A version that becomes active in the middle of a generation: what the rollouts say of their tokens."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from coordinator.client import Coordinator, Run
from coordinator.wire.rollouts import Reward
from tests.client.server_process import ServerProcess
from tests.worker_agent.adapters import draw_adapter
from tests.worker_agent.tiny import BASE
from tests.worker_agent.working import Hooked, Working, arrived, base_of, new_run, until
from worker_agent.engines.engine import Completion, EngineError, Policy
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.learner.publishing import publish_adapter
from worker_agent.settings import AcrossVersions

pytestmark = pytest.mark.xdist_group("models")

SIZE = 4
MAX_TOKENS = 80
TOKEN_SECONDS = 0.05


class Slow(Hooked):
    """The real engine, a token at a time."""

    def __init__(self, engine: VllmEngine) -> None:
        super().__init__(engine)
        self.turns = 0

    def finished(self, wait_seconds: float) -> dict[str, Completion | EngineError]:
        time.sleep(TOKEN_SECONDS)
        self.turns += 1
        return super().finished(0.0)


@pytest.fixture
def swap(
    coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, tiny_model: Path, tmp_path: Path
) -> Callable[[AcrossVersions], tuple[Run, Policy]]:
    """Has group "g" generated while version 1 becomes active; the run, and version 1 as the engine has it."""

    def make(across_versions: AcrossVersions) -> tuple[Run, Policy]:
        run = new_run(coordinator, engine, tiny_model, {"max_lag": 1, "group_size": SIZE})
        slow = Slow(engine)
        with Working(
            coordinator, server, slow, tiny_model, tmp_path / "worker",
            max_tokens=MAX_TOKENS, across_versions=across_versions,
        ) as working:  # fmt: skip
            published = publish_adapter(
                run,
                version=1,
                parent_version=0,
                folder=draw_adapter(tmp_path / "v1", 1),
                base_model=base_of(tiny_model),
            )
            until(lambda: run.workers() and not run.workers()[0].fenced)
            slow.turns = 0
            working.give("g")
            until(lambda: slow.turns > 5)
            assert run.activate(1, wait_seconds=60).state == "succeeded"
            until(lambda: len(arrived(run, "g")) == SIZE)
        folder = tmp_path / "v1"
        return run, Policy("run", 1, published.artifact_hash, "lora", folder)

    return make


def scored(engine: VllmEngine, policy: Policy, tokens: Sequence[int]) -> np.ndarray:
    engine.load(policy)
    return np.array(engine.score(policy, [list(tokens)])[0])


def test_spans_name_each_version_at_the_right_token_and_lag_follows_the_older(
    swap: Callable[[AcrossVersions], tuple[Run, Policy]], engine: VllmEngine
) -> None:
    run, one = swap("continue")
    swapped = 0
    for index in range(SIZE):
        rollout = run.rollout(f"g:{index}.0")
        evidence = run.evidence(f"g:{index}.0")
        prompt = evidence.action_mask.index(True)
        if len(rollout.spans) == 1:  # it drew the end token before
            continue
        swapped += 1
        first, second = rollout.spans
        assert (first.version, second.version) == (0, 1)
        assert first.start == prompt < first.end == second.start < second.end == len(evidence.token_ids)
        assert rollout.span_source == "segmented"
        # The log-probs tell under which weights each token was really drawn.
        told = np.array([np.nan if value is None else value for value in evidence.behavior_log_probs])
        under = {policy.version: scored(engine, policy, evidence.token_ids) for policy in (BASE, one)}
        for span in rollout.spans:
            part = slice(span.start, span.end)
            assert np.abs(told[part] - under[span.version][part]).max() < 1e-5
            assert np.abs(told[part] - under[1 - span.version][part]).max() > 1e-3
    assert swapped
    run.reward(
        [
            Reward(rollout_id=f"g:{index}.0", status="ok", value=1.0, ruleset_id="one", ruleset_hash="d" * 64)
            for index in range(SIZE)
        ]
    )
    with run.update("step") as update:
        candidates = update.candidates(groups=1)
        behaviour = [np.nan_to_num(row) for row in candidates.behavior_log_probs]
        verdicts = update.reserve(candidates, behaviour).verdicts
        assert [(v.verdict, v.lag) for v in verdicts] == [("reserved", 1)] * SIZE
        update.commit()
    # Both versions were acked before any token was drawn under them, or these would lie in quarantine.
    assert {rollout.state for rollout in run.rollouts(group_id="g")} == {"consumed"}


def test_who_would_rather_finish_first_has_one_version_and_the_activation_waits(
    swap: Callable[[AcrossVersions], tuple[Run, Policy]],
) -> None:
    run, _ = swap("finish")
    rollouts = [run.rollout(f"g:{index}.0") for index in range(SIZE)]
    assert [[span.version for span in rollout.spans] for rollout in rollouts] == [[0]] * SIZE
    assert {rollout.span_source for rollout in rollouts} == {"dispatch"}
