"""verl's v1 trainer on one CPU process and a tiny model, its groups and weights through a coordinator.

    COORDINATOR_URL=http://127.0.0.1:8000 COORDINATOR_TOKEN=... python -m examples.verl_loop.main FOLDER

verl's own here: `TaskRunnerV1` and its configuration, the trainer's loop with its data loader, GRPO advantages and
metrics, TransferQueue with its Ray actors, the single-turn agent loop, and `ActorRolloutRefWorker` with FSDP2, PPO loss
and optimizer. In place of verl's: one process where Ray would have worker groups, and `in_process.Engine` for vLLM.
"""

import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {
    "VERL_USE_EXTERNAL_MODULES": "worker_agent.learner.verl_cpu", "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1",
    "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RAY_USAGE_STATS_ENABLED": "0",
    "TQ_NUM_THREADS": "1",
}  # fmt: skip

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
import verl  # noqa: F401  its plugins come first
from hydra import compose, initialize_config_module
from verl.trainer.main_ppo import TaskRunnerV1

from coordinator.client import Coordinator
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract, RunSettings
from examples.verl_loop.in_process import LORA
from worker_agent.learner.verl_cpu import register_cpu_engines
from worker_agent.models import ModelIdentity, identify, tiny_qwen2


def create_run(model: ModelIdentity) -> str:
    base = BaseModelIdentity(name=model.name, revision=model.revision, sha256=model.sha256)
    contract = GenerationContract(
        tokenizer_hash=model.tokenizer_hash, chat_template_hash=model.chat_template_hash, temperature=1.0, top_p=1.0,
        logprobs_mode="processed", dtype="float32",
    )  # fmt: skip
    settings = RunSettings(group_size=2, max_lag=1, max_drift=0.5, reward_on_arrival=True)
    run = CreateRun(run_id=f"verl-{time.time_ns()}", contract=contract, vocab_size=model.vocab_size, settings=settings,
                    policy=FirstPolicy(base_model=base))  # fmt: skip
    with Coordinator() as coordinator:
        return coordinator.create_run(run).id


def configuration(model: Path, prompts: Path, run_id: str) -> Any:
    overrides = f"""
        data.train_files={prompts} data.val_files={prompts} data.train_batch_size=2 data.dataloader_num_workers=0
        data.max_prompt_length=64 data.max_response_length=8 data.shuffle=false
        actor_rollout_ref.model.path={model} actor_rollout_ref.model.lora_rank={LORA["r"]}
        actor_rollout_ref.model.lora_alpha={LORA["lora_alpha"]} actor_rollout_ref.model.target_modules=[q_proj,v_proj]
        actor_rollout_ref.model.use_remove_padding=false actor_rollout_ref.model.enable_gradient_checkpointing=false
        +actor_rollout_ref.model.override_config.attn_implementation=eager
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
        actor_rollout_ref.actor.fsdp_config.dtype=float32 actor_rollout_ref.actor.fsdp_config.use_torch_compile=false
        actor_rollout_ref.actor.use_torch_compile=false actor_rollout_ref.actor.optim.lr=1e-3
        actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=2
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
        +actor_rollout_ref.rollout.agent.agent_loop_manager_class=examples.verl_loop.in_process.Manager
        algorithm.adv_estimator=grpo critic.enable=false transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        trainer.v1.trainer_mode=coordinated_here trainer.v1.colocate_async.num_warmup_batches=2
        trainer.v1.sampler.custom_sampler.path=pkg://examples.verl_loop.coordinated
        trainer.v1.sampler.custom_sampler.name=CoordinatedBuffer trainer.v1.sampler.max_off_policy_threshold=null
        +trainer.v1.sampler.sampler_kwargs.run={run_id}
        +trainer.v1.sampler.sampler_kwargs.incarnation=verl-{time.time_ns()}
        trainer.total_training_steps=4 trainer.total_epochs=10 trainer.logger=[console] trainer.val_before_train=false
        trainer.test_freq=-1 trainer.save_freq=-1 trainer.resume_mode=disable trainer.device=cpu
        trainer.n_gpus_per_node=1 trainer.nnodes=1
    """
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides.split())


def main() -> None:
    folder = Path(sys.argv[1])
    model = tiny_qwen2(folder / "tiny-qwen2")
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 3 ="}], "data_source": "sums", "extra_info": {"index": i},
             "reward_model": {"ground_truth": str(i + 3)}} for i in range(10)]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    register_cpu_engines()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20,
                 _node_ip_address="127.0.0.1", _temp_dir=scratch)  # fmt: skip
        try:
            here = TaskRunnerV1.__ray_metadata__.modified_class()  # in this process, not in an actor
            here.run(configuration(model, folder / "prompts.parquet", create_run(identify(model))))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
