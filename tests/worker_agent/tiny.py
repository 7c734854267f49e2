"""What the tests on the tiny model share: the base policy, and one small step."""

import numpy as np

from worker_agent.engines.engine import Policy
from worker_agent.learner.learner import Learner, TrainingSequence

BASE = Policy(run_id="run", version=0, artifact_hash="sha256:base", kind="base", folder=None)


def train(learner: Learner, seed: int, rows: int = 3) -> list[TrainingSequence]:
    """One step on random sequences with a hole in each mask; returns what it was trained on."""
    draw = np.random.default_rng(seed)
    tokens = [draw.integers(3, 400, size=10 + 3 * row).tolist() for row in range(rows)]
    masks = [[i >= 4 and i != 6 for i in range(len(ids))] for ids in tokens]
    old = learner.log_probs(tokens, masks)
    batch = [
        TrainingSequence(ids, mask, log_probs, float(advantage))
        for ids, mask, log_probs, advantage in zip(tokens, masks, old, draw.normal(size=rows), strict=True)
    ]
    learner.policy_gradient_step(batch)
    return batch
