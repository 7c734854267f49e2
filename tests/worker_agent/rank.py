"""One rank of two: `python rank.py RANK STORE RUN`. Prints a line of JSON for each scene it played.

The scenes follow each other in one process group, so that each also shows that the one before left it whole.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from coordinator.client import Coordinator, LineConflict, Run
from worker_agent.learner.ranks import RankError, SharedUpdate, on_rank_zero

LOG_PROB = math.log(0.5)
"""What every action token had when it was generated."""

PER_TOKEN = 0.001
"""Each rollout drifts by this times its last token, and so by an amount of its own."""


def score(token_ids: list[Any], action_masks: list[Any]) -> list[Any]:
    print(json.dumps({"scored": [int(row[-1]) for row in token_ids]}))
    return [np.full(len(row), LOG_PROB + PER_TOKEN * row[-1]) for row in token_ids]


def failing_on_rank_one(token_ids: list[Any], action_masks: list[Any]) -> list[Any]:
    if dist.get_rank() == 1:
        raise RuntimeError("out of memory")
    return score(token_ids, action_masks)


def new_update(run: Run, name: str) -> SharedUpdate:
    return SharedUpdate(run.update(name) if dist.get_rank() == 0 else None)


def whole(run: Run) -> dict[str, Any]:
    with new_update(run, "whole") as update:
        candidates = update.candidates(groups=1)
        reserved = update.reserve(candidates, score)
        view = update.commit()
    again = on_rank_zero(lambda: run.update_view("whole").state)
    return {"drifts": {v.rollout_id: v.drift for v in reserved.verdicts}, "commit_no": view.commit_no, "state": again}


def scoring_fails(run: Run) -> None:
    with new_update(run, "scoring-fails") as update:
        update.reserve(update.candidates(groups=1), failing_on_rank_one)


def coordinator_refuses(run: Run) -> None:
    with new_update(run, "refused") as update:
        update.reserve(update.candidates(groups=1), score, after_commit_no=7)


def step_fails(run: Run) -> None:
    with new_update(run, "step-fails") as update:
        update.reserve(update.candidates(groups=1), score)
        if dist.get_rank() == 1:
            raise ZeroDivisionError("the step")
        update.commit()


def calls_differ(run: Run) -> None:
    with new_update(run, "calls-differ") as update:
        if dist.get_rank() == 0:
            update.candidates(groups=1)
        else:
            update.commit()


def rank_dies(run: Run) -> None:
    with new_update(run, "rank-dies") as update:
        update.reserve(update.candidates(groups=1), score)
        if dist.get_rank() == 1:
            os._exit(9)
        update.commit()


def play(scene: Callable[[Run], Any], run: Run) -> None:
    said: dict[str, Any] = {"scene": scene.__name__}
    try:
        said["answer"] = scene(run)
    except (RankError, LineConflict, RuntimeError, ZeroDivisionError) as error:
        said |= {"error": type(error).__name__, "words": str(error)}
    print(json.dumps(said), flush=True)


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
    with Coordinator() as coordinator:  # only rank 0 ever uses it
        run = coordinator.run(sys.argv[3])
        for scene in (whole, scoring_fails, coordinator_refuses, step_fails, calls_differ, rank_dies):
            play(scene, run)


if __name__ == "__main__":
    main()
