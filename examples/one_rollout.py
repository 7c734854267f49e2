"""One rollout through a running coordinator, from generated to consumed, and its lineage.

    COORDINATOR_URL=http://127.0.0.1:8000 COORDINATOR_TOKEN=... python examples/one_rollout.py

The token is an admin's, so that this one script may play worker, reward service and trainer. Tokens and log-probs
are made up here; see the README for the real loops.
"""

import hashlib
import time

import numpy as np

from coordinator.client import Coordinator
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.rollouts import Reward, Rollout, Span
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    contract = GenerationContract(
        tokenizer_hash=sha256("tokenizer"),
        chat_template_hash=sha256("template"),
        temperature=1.0,
        top_p=1.0,
        logprobs_mode="raw",
        dtype="float32",
    )
    with Coordinator() as coordinator:
        run = coordinator.create_run(
            CreateRun(
                run_id=f"one-rollout-{int(time.time())}",
                contract=contract,
                vocab_size=1000,
                policy=FirstPolicy(base_model=BaseModelIdentity(name="none", revision="1", sha256=sha256("weights"))),
            )
        )
        policy = run.view().active

        worker = run.worker("worker-1", incarnation="worker-1-first-life")
        worker.register("example", "1")
        worker.ack(policy.version, policy.artifact_hash)
        rollout = Rollout(
            rollout_id="sum-1:0",
            task_id="sum-1",
            task_source="example",
            group_id="sum-1",
            sample_index=0,
            spans=(Span(version=policy.version, artifact_hash=policy.artifact_hash, start=0, end=5),),
            span_source="dispatch",
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            contract=contract,
            token_ids=[11, 12, 13, 14, 15],
            action_mask=[False, False, True, True, True],
            behavior_log_probs=[None, None, -0.7, -0.1, -1.2],
        )
        for verdict in run.submit([rollout]).verdicts:
            print(f"submitted {verdict.rollout_id}: {verdict.verdict}, {verdict.state}")

        reward = Reward(
            rollout_id=rollout.rollout_id, status="ok", value=1.0, ruleset_id="exact", ruleset_hash=sha256("rules")
        )
        print(f"rewarded: {run.reward([reward]).verdicts[0].verdict}")

        with run.update("step-1") as update:
            candidates = update.candidates(groups=1)
            current = [np.nan_to_num(row) + 0.01 for row in candidates.behavior_log_probs]  # a learner's own scores
            reserved = update.reserve(candidates, current)
            for verdict in reserved.verdicts:
                print(f"{verdict.rollout_id}: {verdict.verdict}, lag {verdict.lag}, drift {verdict.drift:.3f}")
            print(f"commit {update.commit().commit_no}")

        print("history: " + " -> ".join(t.to_state for t in run.history(rollout.rollout_id).transitions))
        print(run.lineage("step-1").model_dump_json(indent=2))


if __name__ == "__main__":
    main()
