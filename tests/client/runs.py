"""Runs and rollouts made by hand, as an integrator would make them."""

import itertools
import math
from pathlib import Path

from coordinator.client import Coordinator, Run, Worker
from coordinator.wire.policies import BaseModelIdentity, PolicyRef
from coordinator.wire.rollouts import Reward, Rollout, Span
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract, RunSettings

CONTRACT = GenerationContract(
    tokenizer_hash="a" * 64,
    chat_template_hash="b" * 64,
    temperature=1.0,
    top_p=1.0,
    logprobs_mode="raw",
    dtype="float32",
)
BASE = BaseModelIdentity(name="tiny", revision="1", sha256="c" * 64)
LOG_PROB = math.log(0.5)

_names = itertools.count()


def new_run(coordinator: Coordinator, run_id: str | None = None, **settings: object) -> Run:
    return coordinator.create_run(
        CreateRun(
            run_id=run_id or f"run-{next(_names)}",
            settings=RunSettings.model_validate({"group_size": 2} | settings),
            contract=CONTRACT,
            vocab_size=100,
            policy=FirstPolicy(base_model=BASE),
        )
    )


def new_worker(run: Run, worker_id: str = "w1") -> Worker:
    """A live worker that has confirmed the active version."""
    worker = run.worker(worker_id, f"{worker_id}-1")
    worker.register("hand", "1")
    active = run.view().active
    assert worker.ack(active.version, active.artifact_hash).matching
    return worker


def group(worker: Worker, policy: PolicyRef, group_id: str, size: int = 2) -> list[Rollout]:
    """Rollouts of five tokens, the last three of them actions of probability one half."""
    return [
        Rollout(
            rollout_id=f"{group_id}:{index}.0",
            task_id=group_id,
            task_source="by-hand",
            group_id=group_id,
            sample_index=index,
            spans=(Span(version=policy.version, artifact_hash=policy.artifact_hash, start=2, end=5),),
            span_source="dispatch",
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            contract=CONTRACT,
            token_ids=[1, 2, 3, 4, 5 + index],
            action_mask=[False, False, True, True, True],
            behavior_log_probs=[None, None, LOG_PROB, LOG_PROB, LOG_PROB],
        )
        for index in range(size)
    ]


def reward(run: Run, rollouts: list[Rollout]) -> None:
    answer = run.reward(
        [
            Reward(
                rollout_id=rollout.rollout_id,
                status="ok",
                value=float(rollout.sample_index),
                ruleset_id="count",
                ruleset_hash="d" * 64,
            )
            for rollout in rollouts
        ]
    )
    assert {verdict.verdict for verdict in answer.verdicts} == {"stored"}


def rewarded_groups(run: Run, worker: Worker, count: int, prefix: str = "g") -> list[Rollout]:
    """Groups that an update could reserve at once."""
    active = run.view().active
    rollouts = [r for number in range(count) for r in group(worker, active, f"{prefix}{number}")]
    assert {verdict.verdict for verdict in run.submit(rollouts).verdicts} == {"accepted"}
    reward(run, rollouts)
    return rollouts


def write_adapter(folder: Path, content: bytes = b"weights") -> Path:
    """Files in the layout of an adapter, one of them in a subfolder with a blank in its name."""
    (folder / "more files").mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(content * 300_000)
    (folder / "adapter_config.json").write_text('{"r": 16}')
    (folder / "more files" / "empty").write_bytes(b"")
    return folder
