"""The whole of verl's v1 trainer on a CPU and a tiny model, its groups and weights through a coordinator.

    COORDINATOR_URL=http://127.0.0.1:8000 COORDINATOR_TOKEN=... python -m examples.verl_loop.main FOLDER

Five steps of verl's own `TaskRunnerV1`, in this process, with all that it starts in Ray: TransferQueue, the actor with
FSDP2, a vLLM server that takes its weights from the actor, agent loops and reward workers. The token is an admin's, who
also makes the run.
"""

import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "examples.verl_loop.on_a_cpu,examples.verl_loop.coordinated",  # GPU: the second alone
    "VERL_PLATFORM": "cpu", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1", "TQ_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_LOCAL_WORLD_SIZE": "1",
    "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "COORDINATOR_URL": os.environ["COORDINATOR_URL"], "COORDINATOR_TOKEN": os.environ["COORDINATOR_TOKEN"],
}  # fmt: skip
os.environ |= ENVIRONMENT  # before verl is imported

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import ray  # noqa: E402
import verl  # noqa: E402, F401  its external modules come first
from hydra import compose, initialize_config_module  # noqa: E402
from verl.trainer.main_ppo import TaskRunnerV1  # noqa: E402

from coordinator.client import Coordinator  # noqa: E402
from coordinator.wire.policies import BaseModelIdentity  # noqa: E402
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract, RunSettings  # noqa: E402
from worker_agent.models import ModelIdentity, identify, tiny_qwen2  # noqa: E402


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
    """verl's own, with what the coordinator needs first, then what is tiny, then what a CPU wants."""
    overrides = f"""
        trainer.v1.trainer_mode=coordinated trainer.v1.colocate_async.num_warmup_batches=2
        trainer.v1.sampler.custom_sampler.path=pkg://examples.verl_loop.coordinated
        trainer.v1.sampler.custom_sampler.name=CoordinatedBuffer trainer.v1.sampler.max_off_policy_threshold=null
        +actor_rollout_ref.rollout.agent.agent_loop_manager_class=examples.verl_loop.coordinated.CoordinatedManager
        +trainer.v1.sampler.sampler_kwargs.run={run_id}
        +trainer.v1.sampler.sampler_kwargs.incarnation=verl-{time.time_ns()}

        data.train_files={prompts} data.val_files={prompts} data.train_batch_size=2 data.dataloader_num_workers=0
        data.max_prompt_length=64 data.max_response_length=300 algorithm.adv_estimator=grpo critic.enable=false
        reward.num_workers=1 reward.custom_reward_function.path={ROOT}/examples/verl_loop/reward.py
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        actor_rollout_ref.model.path={model} actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=16
        actor_rollout_ref.model.target_modules=[q_proj,v_proj]
        actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.ppo_mini_batch_size=2
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.agent.num_workers=1
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 actor_rollout_ref.rollout.max_model_len=384
        actor_rollout_ref.rollout.max_num_seqs=8 actor_rollout_ref.rollout.max_num_batched_tokens=512
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64
        trainer.total_training_steps=5 trainer.total_epochs=10 trainer.logger=[console] trainer.val_before_train=false
        trainer.test_freq=-1 trainer.save_freq=-1 trainer.resume_mode=disable trainer.n_gpus_per_node=1 trainer.nnodes=1

        trainer.device=cpu actor_rollout_ref.model.use_remove_padding=false
        actor_rollout_ref.model.enable_gradient_checkpointing=false
        +actor_rollout_ref.model.override_config.attn_implementation=eager
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
        actor_rollout_ref.actor.fsdp_config.dtype=float32 actor_rollout_ref.actor.fsdp_config.use_torch_compile=false
        actor_rollout_ref.actor.use_torch_compile=false actor_rollout_ref.rollout.dtype=float32
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.load_format=auto
        actor_rollout_ref.rollout.enforce_eager=true actor_rollout_ref.rollout.enable_prefix_caching=false
        +actor_rollout_ref.rollout.enable_sleep_mode=false actor_rollout_ref.rollout.skip_tokenizer_init=false
        +actor_rollout_ref.rollout.engine_kwargs.vllm.lora_target_modules=[q_proj,v_proj]
    """
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides.split())


def main() -> None:
    folder = Path(sys.argv[1])
    model = tiny_qwen2(folder / "tiny-qwen2")
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 3 ="}], "data_source": "sums", "extra_info": {"index": i},
             "reward_model": {"ground_truth": str(i + 3)}} for i in range(10)]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    sys.path.append(str(ROOT))  # Ray puts these in front of an actor's one after the other: the last comes first
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        ray.init(num_cpus=16, num_gpus=1, include_dashboard=False, object_store_memory=200 * 2**20, _temp_dir=scratch,
                 _node_ip_address="127.0.0.1", runtime_env={"env_vars": ENVIRONMENT})  # fmt: skip
        try:
            here = TaskRunnerV1.__ray_metadata__.modified_class()  # what `python -m verl.trainer.main_ppo` has in Ray
            here.run(configuration(model, folder / "prompts.parquet", create_run(identify(model))))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
