"""A plain torch training loop of three steps. The lines that a coordinator adds to it are those that end in `# +`.

    COORDINATOR_URL=http://127.0.0.1:8000 COORDINATOR_TOKEN=... python examples/torch_loop.py

One process generates, rewards and trains, so its token is an admin's. The model is a table of 32 x 32 logits, and the
reward is the share of tokens that are greater than the one before: put your own in their place.
"""

import hashlib
import time
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import save, save_file

from coordinator.client import Coordinator
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.rollouts import Reward, Rollout, Span
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract, RunSettings

VOCABULARY, GROUPS, SIZE, LENGTH = 32, 8, 4, 9  # 8 prompts of one token, 4 samples of 8 tokens for each
RULE = {"ruleset_id": "ascending", "ruleset_hash": hashlib.sha256(b"tokens above the one before").hexdigest()}  # +


def log_probs(policy: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [n, LENGTH]: of each token given those before it, 0 for the prompt."""
    scored = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(scored, (1, 0))


@torch.no_grad()
def generate(policy: torch.nn.Module) -> torch.Tensor:
    """int64 [GROUPS * SIZE, LENGTH]."""
    tokens = torch.randint(VOCABULARY // 2, (GROUPS, 1)).repeat_interleave(SIZE, 0)
    for _ in range(LENGTH - 1):
        tokens = torch.cat([tokens, torch.multinomial(policy(tokens[:, -1]).softmax(-1), 1)], 1)
    return tokens


def main() -> None:
    torch.manual_seed(0)
    policy = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.3)
    weights = hashlib.sha256(save(policy.state_dict())).hexdigest()  # +
    base = BaseModelIdentity(name="table", revision="1", sha256=weights)  # +
    contract = GenerationContract(tokenizer_hash="0" * 64, chat_template_hash="0" * 64, temperature=1.0,  # +
                                  top_p=1.0, logprobs_mode="raw", dtype="float32")  # fmt: skip  # +
    run = Coordinator().create_run(CreateRun(run_id=f"torch-loop-{time.time_ns()}", contract=contract,  # +
                                             settings=RunSettings(group_size=SIZE), vocab_size=VOCABULARY,  # +
                                             policy=FirstPolicy(base_model=base)))  # fmt: skip  # +
    worker = run.worker("torch-0", incarnation=f"torch-0-{time.time_ns()}")  # +
    worker.register("torch", torch.__version__)  # +
    active = run.view().active  # +
    worker.ack(active.version, active.artifact_hash)  # + the weights in this process are version 0

    for step in range(1, 4):
        tokens = generate(policy)
        behavior = log_probs(policy, tokens).tolist()
        rewards = (tokens[:, 1:] > tokens[:, :-1]).float().mean(1).tolist()
        run.submit([Rollout(rollout_id=f"{step}-{i}", task_id=f"prompt-{row[0]}", task_source="table",  # +
                            group_id=f"{step}-{i // SIZE}", sample_index=i % SIZE, contract=contract,  # +
                            worker_id=worker.worker_id, incarnation=worker.incarnation, span_source="dispatch",  # +
                            spans=(Span(start=1, end=LENGTH, **active.model_dump()),), token_ids=row,  # +
                            action_mask=[False] + [True] * (LENGTH - 1), behavior_log_probs=behavior[i])  # +
                    for i, row in enumerate(tokens.tolist())])  # fmt: skip  # +
        run.reward([Reward(rollout_id=f"{step}-{i}", status="ok", value=value, **RULE)  # +
                    for i, value in enumerate(rewards)])  # fmt: skip  # +

        with run.update(f"step-{step}") as update:  # + an exception in here aborts it: nothing is consumed
            offered = update.candidates(groups=GROUPS, wait_seconds=60)  # + what any worker sent
            tokens = torch.tensor([row.tolist() for row in offered.token_ids])  # +
            reserved = update.reserve(offered, log_probs(policy, tokens).tolist())  # + the gate
            admitted = reserved.admitted  # + train on these, not on what was generated
            tokens = torch.tensor([row.tolist() for row in admitted.token_ids])  # +
            mean = {group: sum(t.reward for t in members) / len(members) for group, members in admitted.groups.items()}
            advantages = torch.tensor([t.reward - mean[t.group_id] for t in admitted])
            loss = -(log_probs(policy, tokens).sum(1) * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update.commit()  # + consumed, once

        save_file(policy.state_dict(), (folder := Path(mkdtemp())) / "model.safetensors")
        made = run.publish(version=step, parent_version=step - 1, updates=[update.id], folder=folder,  # +
                           base_model=base, kind="full")  # fmt: skip  # +
        run.open_activation(step, f"activate-{step}")  # + engines elsewhere load the files now
        worker.ack(step, made.artifact_hash)  # + and say so, as does this one
        run.activate(step)  # + returns once every required worker has
        active = run.view().active  # +
        print(f"version {active.version}: {len(admitted)} rollouts, reward {admitted.rewards.mean():.3f}, "
              f"drift {max(v.drift for v in reserved.verdicts):.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
