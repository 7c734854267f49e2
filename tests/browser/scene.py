"""A run as an operator may find it at night, made by the real client: everything that the dashboard shows is in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coordinator.client import Candidates, Coordinator, Run, Update, Worker
from coordinator.wire.policies import PolicyRef
from coordinator.wire.rollouts import Generation, GenerationFailure, Reward, Rollout, Span
from coordinator.wire.runs import CreateRun, FirstPolicy, RunSettings
from coordinator.wire.updates import Discard
from tests.client.runs import BASE, CONTRACT, write_adapter

RUN = "night-shift"
PROMPT = 12
ANSWER = 36
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&lt;"
"""What somebody may send wherever a text is taken."""


def rollout(worker: Worker, policy: PolicyRef, group: str, index: int, earlier: PolicyRef | None = None) -> Rollout:
    """An answer of 36 tokens to a prompt of 12, with a tool's output in the middle; its second half by `policy`."""
    numbers = np.random.default_rng(hash_of(group, index))
    mask = [False] * PROMPT + [not 16 <= place < 20 for place in range(ANSWER)]
    log_probs = [-float(x) for x in np.round(numbers.exponential(0.6, PROMPT + ANSWER), 4)]
    whole, middle = PROMPT + ANSWER, PROMPT + 20
    made = [(earlier, 0, middle), (policy, middle, whole)] if earlier else [(policy, 0, whole)]
    return Rollout(
        rollout_id=f"{group}:{index}.0",
        task_id=f"sum-{group}",
        task_source="sums",
        group_id=group,
        sample_index=index,
        spans=tuple(Span(version=p.version, artifact_hash=p.artifact_hash, start=s, end=e) for p, s, e in made),
        span_source="engine" if earlier else "dispatch",
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        contract=CONTRACT,
        generation=Generation(finish_reason="stop", engine=HOSTILE[:60], engine_version="1"),
        token_ids=[int(x) for x in numbers.integers(0, 100, PROMPT + ANSWER)],
        action_mask=mask,
        behavior_log_probs=[x if action else None for x, action in zip(log_probs, mask, strict=True)],
    )


def hash_of(group: str, index: int) -> int:
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(group)) * 10 + index


def submit(run: Run, rollouts: Sequence[Rollout], rewarded: bool = True) -> None:
    answer = run.submit(rollouts)
    assert {verdict.verdict for verdict in answer.verdicts} == {"accepted"}, answer
    if rewarded:
        ruleset = {"ruleset_id": "exact-sum", "ruleset_hash": "d" * 64}
        rewards = [
            Reward(rollout_id=r.rollout_id, status="ok", value=float(r.sample_index), **ruleset) for r in rollouts
        ]
        assert {verdict.verdict for verdict in run.reward(rewards).verdicts} == {"stored"}


def scored(candidates: Candidates, drifts: Sequence[float]) -> list[np.ndarray]:
    """The log-probs of weights that moved away by these drifts, one for each candidate in turn, up and down."""
    moved = []
    for i, each in enumerate(candidates):
        action, current = each.action_mask, np.nan_to_num(each.behavior_log_probs).astype(np.float64)
        steps = np.random.default_rng(i).exponential(1.0, int(action.sum()))
        steps *= drifts[i % len(drifts)] / steps.mean()
        current[action] += np.where(current[action] + steps < 0, steps, -steps)
        moved.append(current)
    return moved


class Scene:
    """The run, its workers, and what is under way in it: an update with a lease, an activation with stages."""

    def __init__(self, coordinator: Coordinator, folder: Path) -> None:
        self.run = coordinator.create_run(
            CreateRun(
                run_id=RUN,
                settings=RunSettings(
                    group_size=4,
                    max_lag=1,
                    max_drift=0.2,
                    lost_after_seconds=3600,
                    update_lease_seconds=600,
                    activation_deadline_seconds=3600,
                ),
                contract=CONTRACT,
                vocab_size=100,
                policy=FirstPolicy(base_model=BASE),
            )
        )
        self.folder = folder
        self.refs = {0: self.run.view().active}
        self.workers = [self.run.worker(f"gpu-{number}", f"gpu-{number}-life-1") for number in range(4)]
        for worker in self.workers:
            worker.register("vllm" if worker is not self.workers[2] else HOSTILE[:100], "0.33.0")
            worker.ack(0, self.refs[0].artifact_hash)
        self._first_step()
        self.publish(1, "step-1")
        self.activate(1)
        self._second_step()
        self.publish(2, "step-2")
        self.activate(2)
        self._troubles()
        self.update = self._third_step()
        self.publish(3, "step-2")
        self._begin_activation()

    def publish(self, version: int, update: str) -> None:
        view = self.run.publish(
            version=version,
            parent_version=version - 1,
            updates=[update],
            folder=write_adapter(self.folder / f"v{version}", bytes([version])),
            base_model=BASE,
        )
        self.refs[version] = PolicyRef(version=version, artifact_hash=view.artifact_hash)

    def activate(self, version: int) -> None:
        self.run.open_activation(version, f"to-{version}")
        for worker in self.workers:
            for stage in ("downloading", "verifying", "loading"):
                worker.stage(version, stage)
            worker.ack(version, self.refs[version].artifact_hash)
        assert self.run.view().active.version == version

    def groups(self, names: Sequence[str], version: int, rewarded: bool = True, earlier: int | None = None) -> None:
        before = None if earlier is None else self.refs[earlier]
        submit(
            self.run,
            [
                rollout(self.workers[(index + 2) % 4], self.refs[version], name, index, before)
                for name in names
                for index in range(4)
            ],
            rewarded,
        )

    def _first_step(self) -> None:
        self.groups([f"a{number}" for number in range(6)], 0)
        with self.run.update("step-1") as update:
            candidates = update.candidates(groups=4)
            update.reserve(candidates, scored(candidates, [0.01, 0.02, 0.015, 0.03]))
            update.commit([Discard(rollout_id=candidates[0].rollout_id, reason=HOSTILE)])

    def _second_step(self) -> None:
        self.groups([f"b{number}" for number in range(6)], 1)
        self.groups(["mixed"], 1, earlier=0)
        with self.run.update("step-2") as update:
            candidates = update.candidates(groups=8)
            update.reserve(candidates, scored(candidates, [0.02, 0.05, 0.08, 0.31]))
            update.commit()

    def _troubles(self) -> None:
        worker = self.workers[1]
        bad = rollout(worker, self.refs[2], "bad", 0).model_copy(update={"token_ids": [1000] * (PROMPT + ANSWER)})
        assert self.run.submit([bad]).verdicts[0].verdict == "rejected"
        self.run.report_generation_failures(
            [
                GenerationFailure(
                    rollout_id="c9:0.0",
                    task_id="sum-c9",
                    task_source="sums",
                    group_id="c9",
                    sample_index=0,
                    worker_id=worker.worker_id,
                    incarnation=worker.incarnation,
                    kind="out_of_memory",
                    message=HOSTILE,
                )
            ]
        )
        self.groups(["slow"], 2, rewarded=False)
        timeout = Reward(rollout_id="slow:0.0", status="timeout", ruleset_id="exact-sum", ruleset_hash="d" * 64)
        self.run.reward([timeout])
        # Of a version that this worker never acked.
        stranger = self.run.worker("gpu-4", "gpu-4-life-1")
        stranger.register("vllm", "0.33.0")
        self.run.submit([rollout(stranger, self.refs[2], "odd", index) for index in range(4)])
        self.run.fence("gpu-4", HOSTILE)

    def _third_step(self) -> Update:
        self.groups([f"c{number}" for number in range(5)], 2)
        # As if its owner had been killed: nobody renews the lease, and nobody ends the update.
        update = self.run.update("step-3").__enter__()
        candidates = update.candidates(groups=3)
        update.reserve(candidates, scored(candidates, [0.03, 0.04]))
        return update

    def _begin_activation(self) -> None:
        self.run.open_activation(3, "to-3")
        for stage in ("downloading", "verifying", "loading"):
            self.workers[0].stage(3, stage)
        self.workers[0].ack(3, self.refs[3].artifact_hash)
        for stage in ("downloading", "verifying", "loading"):
            self.workers[1].stage(3, stage)
        self.workers[2].stage(3, "downloading")
        self.workers[3].stage(3, "downloading")
        self.workers[3].fail(3, "verify", "adapter_model.safetensors: sha256 is not the manifest's")
