"""In one process what verl runs in Ray: the worker group, the engines, the agent loops."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, set_seed
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import TokenOutput

from examples.verl_loop.coordinated import CapturingWorker, CoordinatedTrainer, hash_of

LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


class Actor(ActorRolloutRefWorker):
    """verl's actor, called directly where verl calls a worker group of Ray."""

    _dispatch_info = {"actor": [0]}  # noqa: RUF012  one data-parallel rank

    def adapter(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, config = self.actor.engine.get_per_tensor_param(base_sync_done=True)
        return {name: tensor.detach().cpu() for name, tensor in tensors}, config

    def weights_hash(self) -> str:
        return hash_of(self.adapter()[0])


class Engine:
    """Weights of its own that generate, in place of verl's vLLM replicas; changed by `update_weights` alone."""

    def __init__(self, model: Path, actor: Actor) -> None:
        self.actor, self.global_steps = actor, -1
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = get_peft_model(base, LoraConfig(**LORA)).eval()

    def update_weights(self, global_steps: int) -> None:
        set_peft_model_state_dict(self.model, self.actor.adapter()[0])
        self.global_steps = global_steps

    def between_steps(self) -> None:
        """Nothing is in flight, and no memory is to be given away."""

    sleep_replicas = abort_replicas = resume_generation_replicas = between_steps

    @torch.no_grad()
    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        tokens, log_probs = torch.tensor([prompt_ids]), []
        for _ in range(8):
            scores = self.model(tokens).logits[0, -1].log_softmax(-1)
            drawn = torch.multinomial(scores.exp(), 1)
            log_probs.append(scores[drawn].item())
            tokens = torch.cat([tokens, drawn[None]], 1)
        tags = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), self.global_steps)
        made = tokens[0, len(prompt_ids) :].tolist()
        return TokenOutput(token_ids=made, log_probs=log_probs, stop_reason="completed", extra_fields=tags)


class Worker(CapturingWorker):
    """Rewards the share of even tokens."""

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        made = outputs[-1].response_ids
        outputs[-1].reward_score = sum(token % 2 == 0 for token in made) / len(made)
        outputs[-1].extra_fields["reward_extra_info"] = {}


class Manager:
    """`agent_loop_manager_class`: one worker, in this process. Returns when the batch is in TransferQueue."""

    def __init__(self, **given: Any) -> None:
        self.worker = Worker(**given)

    @classmethod
    def create(cls, **given: Any) -> "Manager":
        return cls(**given)

    def generate_sequences(self, batch: Any) -> None:
        async def whole() -> None:
            await self.worker.generate_sequences(batch)
            await asyncio.gather(*self.worker.background_tasks)

        asyncio.run(whole())


@register_trainer("coordinated_here")
class TrainerHere(CoordinatedTrainer):
    """The same trainer, with its parts in this process instead of in Ray's."""

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.ref_in_actor, self.teacher_model_manager, self.distillation_config = True, None, None
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.actor_rollout_wg = Actor(config=self.config.actor_rollout_ref, role="actor")
        set_seed(42)
        self.actor_rollout_wg.init_model()
        self.engine = self.checkpoint_manager = Engine(self.config.actor_rollout_ref.model.path, self.actor_rollout_wg)
        self._load_checkpoint()

    def get_llm_client(self) -> Engine:
        return self.engine
