"""The trainer process: verl scores and steps, the coordinator decides what it may step on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.client import Candidates, Coordinator, Reserved, Run, Update
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.updates import Discard
from worker_agent.demo.faults import is_copy
from worker_agent.learner.learner import Learner, TrainingSequence
from worker_agent.logs import event, log_to_stderr
from worker_agent.models import identify

_WAIT_SECONDS = 180.0


class TrainingError(Exception):
    """The trainer cannot go on; the message says why."""


@contextmanager
def _stage(update: int, name: str) -> Iterator[None]:
    event("stage", update=update, stage=name)
    started = time.monotonic()
    yield
    event("stage_done", update=update, stage=name, seconds=round(time.monotonic() - started, 3))


def train(run: Run, learner: Learner, base_model: BaseModelIdentity, steps: int, groups: int, out: Path) -> None:
    """Make `steps` updates of `groups` groups each, every one a new active version.

    An update whose groups all lack an advantage is committed with everything discarded, and makes no version.
    Adapters are written below `out`. Raises what the client raises, and `TrainingError` when the groups do not
    come, or too seldom one to learn from.
    """
    number = made = 0
    while made < steps:
        number += 1
        if number > 3 * steps:
            raise TrainingError(f"only {made} of {number - 1} updates had a group to learn from")
        with run.update(f"update-{number}") as update:
            with _stage(number, "wait"):
                candidates = _wait_for(update, groups)
            with _stage(number, "score"):
                current = learner.log_probs(
                    [ids.tolist() for ids in candidates.token_ids],
                    [mask.tolist() for mask in candidates.action_masks],
                )
            with _stage(number, "reserve"):
                reserved = update.reserve(candidates, current)
            with _stage(number, "step"):
                batch, discards = _batch(learner, reserved)
                if batch:
                    report = learner.policy_gradient_step(batch)
                    event("stepped", update=number, rollouts=len(batch), loss=report.loss, grad_norm=report.grad_norm,
                          changed_tensors=report.changed_tensors, delta_l2=report.delta_l2)  # fmt: skip
            with _stage(number, "commit"):
                update.commit(discards)
        if not batch:
            event("nothing_to_learn", update=number)
            continue
        made += 1
        version = update.policy.version + 1
        with _stage(number, "publish"):
            learner.publish(
                run,
                version=version,
                parent_version=update.policy.version,
                folder=out / f"v{version}",
                base_model=base_model,
                updates=[update.id],
            )
        with _stage(number, "activate"):
            run.activate(version, activation_id=f"activate-{version}")


def _wait_for(update: Update, groups: int) -> Candidates:
    candidates = update.candidates(groups, wait_seconds=_WAIT_SECONDS)
    if len(candidates.groups) < groups:
        why = f": {candidates.empty.reason}" if candidates.empty else ""
        raise TrainingError(f"{len(candidates.groups)} of {groups} groups came in {_WAIT_SECONDS:g} s{why}")
    return candidates


def _batch(learner: Learner, reserved: Reserved) -> tuple[list[TrainingSequence], list[Discard]]:
    """What to step on, and what to discard: groups without an advantage, and the demo's own copies."""
    admitted = reserved.admitted
    advantages = learner.group_advantages(admitted.rewards.tolist(), admitted.group_ids)
    batch, discards = [], []
    rewards = {group_id: {t.reward for t in members} for group_id, members in admitted.groups.items()}
    for trajectory, advantage in zip(admitted, advantages, strict=True):
        if is_copy(trajectory.group_id):  # its original is or was trained on
            discards.append(Discard(rollout_id=trajectory.rollout_id, reason="copy"))
        elif len(rewards[trajectory.group_id]) == 1:
            discards.append(Discard(rollout_id=trajectory.rollout_id, reason="zero_advantage"))
        else:
            batch.append(
                TrainingSequence(
                    trajectory.token_ids.tolist(),
                    trajectory.action_mask.tolist(),
                    trajectory.behavior_log_probs,
                    advantage,
                )
            )
    return batch, discards


def _wait_for_workers(run: Run, names: list[str]) -> None:
    """Until all of them are live, so that the first activation asks every one of them."""
    until = time.monotonic() + _WAIT_SECONDS
    while missing := set(names) - {worker.worker_id for worker in run.workers() if worker.state == "live"}:
        if time.monotonic() > until:
            raise TrainingError(f"not live after {_WAIT_SECONDS:g} s: {', '.join(sorted(missing))}")
        time.sleep(0.5)


def main() -> None:
    """The address and the token come from the environment; see `coordinator.client.Coordinator`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--worker", action="append", required=True, help="worker to wait for; may be repeated")
    given = parser.parse_args()
    log_to_stderr()
    identity = identify(given.model)
    base_model = BaseModelIdentity(name=identity.name, revision=identity.revision, sha256=identity.sha256)
    with Coordinator() as coordinator:
        run = coordinator.run(given.run)
        group_size = run.view().settings.group_size or 1
        learner = Learner(given.model, group_size=group_size)
        event("ready")
        _wait_for_workers(run, given.worker)
        train(run, learner, base_model, given.updates, given.groups, given.out)


if __name__ == "__main__":
    main()
