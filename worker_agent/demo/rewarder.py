"""The reward process: decodes what was generated, checks it under the exercise's rule, and hands in the rewards."""

from __future__ import annotations

import argparse
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

from coordinator.client import Coordinator, Run
from coordinator.wire.rollouts import Reward, RolloutView
from worker_agent.demo.task import Exercise, named_exercise
from worker_agent.logs import event, log_to_stderr

CHECK_SECONDS = 1.0
_POLL_SECONDS = 0.3
_BATCH = 64


class Rewarder:
    """Rewards a run's rollouts until the process is ended.

    A check that takes more than CHECK_SECONDS is reported as a timeout, without a value. `hang` names a group
    whose first member's check is made to hang, so that one really does.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer, exercise: Exercise, hang: str | None) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._exercise = exercise
        self._hang = hang
        self._checks = ThreadPoolExecutor(max_workers=4, thread_name_prefix="check")

    def reward_waiting(self) -> int:
        """Reward what waits for it now; how many rollouts that were."""
        waiting = list(self._run.rollouts(state="generated"))
        for start in range(0, len(waiting), _BATCH):
            rewards = [self._reward(rollout) for rollout in waiting[start : start + _BATCH]]
            for reward, verdict in zip(rewards, self._run.reward(rewards).verdicts, strict=True):
                event("rewarded", rollout_id=reward.rollout_id, status=reward.status, value=reward.value,
                      verdict=verdict.verdict)  # fmt: skip
        return len(waiting)

    def _reward(self, rollout: RolloutView) -> Reward:
        pending = self._checks.submit(self._check, rollout, self._text(rollout.rollout_id))
        try:
            value, status = pending.result(timeout=CHECK_SECONDS), "ok"
        except TimeoutError:
            value, status = None, "timeout"
        return Reward.model_validate(
            {
                "rollout_id": rollout.rollout_id,
                "status": status,
                "value": value,
                "ruleset_id": self._exercise.ruleset_id,
                "ruleset_hash": self._exercise.ruleset_hash,
                "message": None if status == "ok" else f"the check took longer than {CHECK_SECONDS} s",
            }
        )

    def _check(self, rollout: RolloutView, text: str) -> float:
        if rollout.group_id == self._hang and rollout.sample_index == 0:
            threading.Event().wait(2 * CHECK_SECONDS)
        return self._exercise.reward(rollout.task_id, text)

    def _text(self, rollout_id: str) -> str:
        evidence = self._run.evidence(rollout_id)
        actions = [token for token, acts in zip(evidence.token_ids, evidence.action_mask, strict=True) if acts]
        return str(self._tokenizer.decode(actions, skip_special_tokens=True))


def main() -> None:
    """The address and the token come from the environment; see `coordinator.client.Coordinator`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--exercise", required=True)
    parser.add_argument("--hang", help="group whose first check hangs")
    given = parser.parse_args()
    log_to_stderr()
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    with Coordinator() as coordinator:
        rewarder = Rewarder(coordinator.run(given.run), tokenizer, named_exercise(given.exercise), given.hang)
        event("ready")
        while True:
            if not rewarder.reward_waiting():
                time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
