"""A reward service: scores what waits for a reward, batch by batch, until it is ended. Run as many as you like.

    COORDINATOR_URL=http://127.0.0.1:8000 COORDINATOR_TOKEN=... python examples/reward_service.py RUN

The token is of role reward; `score` is yours. Nothing is kept here: one that was killed is made up for by the next poll
of any other. Two that score the same rollout do no harm: the first reward stands, the other is told so.
"""

import hashlib
import inspect
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from coordinator.client import Coordinator, Run
from coordinator.wire.rollouts import Reward

AT_ONCE, BATCH, LIMIT_SECONDS, POLL_SECONDS = 4, 32, 5.0, 0.5


def score(task_id: str, response: list[int]) -> float:
    """The reward of a response, which is the action tokens: here the share of even ones. May raise, may hang."""
    return sum(token % 2 == 0 for token in response) / len(response)


RULES = {"ruleset_id": "even", "ruleset_hash": hashlib.sha256(inspect.getsource(score).encode()).hexdigest()}


def scored(items: list[tuple[str, str, list[int]]]) -> list[Reward]:
    """A reward for each rollout id, task id and response: a value, or a timeout or an error without one, never 0.0."""
    threads, rewards = ThreadPoolExecutor(AT_ONCE), []
    until = time.monotonic() + LIMIT_SECONDS
    for rollout_id, pending in [(item[0], threads.submit(score, *item[1:])) for item in items]:
        value, status, message = None, "ok", None
        try:
            value = pending.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            status, message = "timeout", f"no score within {LIMIT_SECONDS} s"
        except Exception as error:  # noqa: BLE001  whatever the score raises is what became of it
            status, message = "error", f"{type(error).__name__}: {error}"
        rewards.append(Reward(rollout_id=rollout_id, status=status, value=value, message=message, **RULES))
    threads.shutdown(wait=False)  # a score that hangs keeps its thread, and nobody else's
    return rewards


def reward_waiting(run: Run) -> Counter[str]:
    """Reward what waits now; how many of each verdict."""
    waiting = {rollout.rollout_id: rollout.task_id for rollout in run.rollouts(state="generated")}
    verdicts: Counter[str] = Counter()
    for start in range(0, len(waiting), BATCH):
        columns = run.evidence_of(list(waiting)[start : start + BATCH])
        items = [
            (rollout_id, waiting[rollout_id], tokens[mask].tolist())
            for rollout_id, tokens, mask in zip(columns.rollout_id, columns.token_ids, columns.action_mask, strict=True)
        ]
        # As many as run at once have the same limit, each from its own start.
        rewards = [r for i in range(0, len(items), AT_ONCE) for r in scored(items[i : i + AT_ONCE])]
        verdicts.update(verdict.verdict for verdict in run.reward(rewards).verdicts)
    return verdicts


def main() -> None:
    with Coordinator() as coordinator:
        run = coordinator.run(sys.argv[1])
        while True:
            verdicts = reward_waiting(run)
            if verdicts:
                print(dict(verdicts), flush=True)
            else:
                time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
