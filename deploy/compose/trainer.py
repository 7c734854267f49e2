"""A small trainer for docker-compose.yml: REINFORCE on a LoRA adapter with torch and peft, update after update.

    COORDINATOR_URL=... COORDINATOR_TOKEN=... python trainer.py RUN MODEL

It keeps nothing of its own. Ended and started again, it goes on with the weights of the active version, and rewinds
the run to the commit that made them: what a step consumed whose weights are lost comes back.
"""

import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM

from coordinator.client import Candidates, Coordinator, Run
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.updates import Discard
from worker_agent.learner.publishing import publish_adapter
from worker_agent.models import identify

GROUPS, WAIT_SECONDS = 4, 30.0
PAUSE_SECONDS = float(os.environ.get("TRAINER_PAUSE_SECONDS", "2"))
"""Between two updates, so that a laptop has something left."""


class Trainer:
    """The policy as the trainer holds it."""

    def __init__(self, model: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        self.policy: PeftModel = get_peft_model(base, lora)
        self.optimizer = torch.optim.Adam((p for p in self.policy.parameters() if p.requires_grad), lr=1e-2)

    def take_over(self, folder: Path) -> None:
        """The weights of a version that was published before."""
        set_peft_model_state_dict(self.policy, load_peft_weights(str(folder)))

    def log_probs(self, candidates: Candidates) -> list[torch.Tensor]:
        """Of each token given those before it, float32 [tokens], the first 0."""
        rows = []
        for token_ids in candidates.token_ids:
            tokens = torch.from_numpy(token_ids)[None]
            scored = self.policy(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[0, :, 0]
            rows.append(torch.nn.functional.pad(scored, (1, 0)))
        return rows

    def step(self, admitted: Candidates, advantages: list[float]) -> None:
        """One step of REINFORCE, over the tokens that the policy chose."""
        rows = zip(self.log_probs(admitted), admitted.action_masks, advantages, strict=True)
        loss = -torch.stack([row[torch.from_numpy(mask)].mean() * a for row, mask, a in rows]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def take_up(run: Run, trainer: Trainer) -> None:
    """Begin where the active version stands."""
    active = run.policy(run.view().active.version)
    contained = max([u.commit_no or 0 for u in run.updates() if u.update_id in active.updates], default=0)
    if run.view().last_commit_no > contained:
        run.rewind(contained, "the trainer was started again")
    if active.kind == "lora":
        with TemporaryDirectory() as scratch:
            run.download(active.version, Path(scratch) / "adapter")
            trainer.take_over(Path(scratch) / "adapter")
    print(f"takes up version {active.version}, commit {contained}", flush=True)


def train_once(run: Run, trainer: Trainer, base_model: BaseModelIdentity) -> None:
    """One update, and the version that it makes; nothing where there is nothing to train on."""
    with run.update() as update:
        candidates = update.candidates(GROUPS, WAIT_SECONDS)
        if not candidates:
            print(f"waits: {candidates.empty}", flush=True)
            return
        with torch.no_grad():
            current = [row.numpy() for row in trainer.log_probs(candidates)]
        reserved = update.reserve(candidates, current)
        admitted = reserved.admitted
        rewards = {group: [t.reward for t in members] for group, members in admitted.groups.items()}
        advantages = [t.reward - float(np.mean(rewards[t.group_id])) for t in admitted]
        useless = {group for group, values in rewards.items() if len(set(values)) == 1}
        if len(useless) < len(rewards):
            trainer.step(admitted, advantages)
        discards = [
            Discard(rollout_id=t.rollout_id, reason="zero_advantage") for t in admitted if t.group_id in useless
        ]
        commit_no = update.commit(discards).commit_no
    if len(discards) == len(admitted):
        return
    version = max(policy.version for policy in run.policies()) + 1
    with TemporaryDirectory() as folder:
        trainer.policy.save_pretrained(folder)
        publish_adapter(
            run,
            version=version,
            parent_version=update.policy.version,
            folder=Path(folder),
            base_model=base_model,
            updates=[update.id],
        )
    run.activate(version)
    drift = max(verdict.drift or 0.0 for verdict in reserved.verdicts)
    print(
        f"commit {commit_no}: {len(admitted) - len(discards)} of {len(candidates)} rollouts, "
        f"reward {admitted.rewards.mean():.3f}, drift {drift:.1e}; version {version} is active",
        flush=True,
    )


def main() -> None:
    run_id, model = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    identity = identify(model)
    base_model = BaseModelIdentity(name=identity.name, revision=identity.revision, sha256=identity.sha256)
    with Coordinator() as coordinator:
        run = coordinator.run(run_id)
        trainer = Trainer(model)
        take_up(run, trainer)
        while True:
            train_once(run, trainer, base_model)
            time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
