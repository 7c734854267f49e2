"""One learner: verl's `TrainingWorker` over a LoRA adapter, with verl's own losses (PPO, supervised) and GRPO
advantages."""

import json
import os
import tempfile
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.client import Run
from coordinator.wire.policies import BaseModelIdentity, PolicyView
from worker_agent.learner.publishing import publish_adapter
from worker_agent.verl_platform import PlatformError, import_verl

if TYPE_CHECKING:
    import torch


class LearnerError(Exception):
    """The learner cannot train on what it was given, or cannot run here; the message says why."""


@dataclass(frozen=True)
class TrainingSequence:
    """One row of a batch, all of length `len(token_ids)`, index i about token i.

    `action_mask[0]` is false: the first token has nothing before it. The mask may have holes (tool output).
    `old_log_probs` (float32) are the behaviour policy's, read at action tokens only. `advantage` holds for
    the whole row.
    """

    token_ids: Sequence[int]
    action_mask: Sequence[bool]
    old_log_probs: np.ndarray
    advantage: float


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    `loss` is the mean over the batch's action tokens, `grad_norm` the L2 norm before clipping at 1.0;
    `tensors` counts the adapter's tensors, `changed_tensors` those whose bytes changed, `delta_l2` is the L2
    norm of the whole change.
    """

    loss: float
    grad_norm: float
    changed_tensors: int
    tensors: int
    delta_l2: float
    seconds: float


class Learner:
    """A model with one trainable LoRA adapter, in float32, in this process.

    `model` is a model folder. Two learners of the same arguments hold the same adapter, and after the same
    steps again. `micro_batch_size` rows go through the model at once; batches of any size are accepted.
    `group_size` is how many rollouts a prompt has. Raises `LearnerError` if verl was imported before on
    another platform than this machine's.
    """

    def __init__(
        self,
        model: Path,
        *,
        lora_rank: int = 16,
        lora_alpha: int = 32,
        target_modules: Sequence[str] = ("q_proj", "v_proj"),
        learning_rate: float = 1e-3,
        seed: int = 42,
        micro_batch_size: int = 4,
        group_size: int,
    ) -> None:
        _prepare_verl()
        from transformers import set_seed
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import (
            FSDPActorConfig,
            FSDPEngineConfig,
            FSDPOptimizerConfig,
            HFModelConfig,
            TrainingWorkerConfig,
        )
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import ppo_loss, sft_loss

        self._micro_batch_size = micro_batch_size
        self._worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=str(model),
                    lora_rank=lora_rank,
                    lora_alpha=lora_alpha,
                    target_modules=list(target_modules),
                    use_remove_padding=False,  # packing needs flash attention
                    enable_gradient_checkpointing=False,
                    override_config={"attn_implementation": "eager"},
                ),
                engine_config=FSDPEngineConfig(
                    strategy="fsdp2",
                    model_dtype="fp32",
                    dtype="float32",
                    mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                    use_torch_compile=False,
                    use_dynamic_bsz=False,
                    micro_batch_size_per_gpu=micro_batch_size,
                    infer_micro_batch_size_per_gpu=micro_batch_size,
                    use_orig_params=True,
                    seed=seed,
                    full_determinism=True,
                ),
                optimizer_config=FSDPOptimizerConfig(
                    lr=learning_rate,
                    weight_decay=0.0,
                    clip_grad=1.0,
                    lr_scheduler_type="constant",
                    lr_warmup_steps=0,
                    total_training_steps=1,
                ),
                checkpoint_config=CheckpointConfig(),
                profiler_config=None,
            )
        )
        set_seed(seed)  # immediately before the weights are drawn, or the adapter depends on what ran before
        self._worker.reset()
        actor = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=group_size,
            ppo_micro_batch_size_per_gpu=micro_batch_size,
            use_torch_compile=False,
            clip_ratio=0.2,
            clip_ratio_low=0.2,
            clip_ratio_high=0.2,
            loss_agg_mode="token-mean",
            entropy_coeff=0.0,
            use_kl_loss=False,
        )
        self._ppo_loss = partial(ppo_loss, config=actor)
        self._supervised_loss = partial(sft_loss, config=None)

    def log_probs(self, token_ids: Sequence[Sequence[int]], action_masks: Sequence[Sequence[bool]]) -> list[np.ndarray]:
        """Log-probs of given tokens under the current weights, at temperature 1.

        Per sequence a float32 array of shape (len(token_ids[i]),), whose entry j scores token j given all
        before it; 0.0 where the mask is false. Raises `LearnerError` on a malformed sequence.
        """
        from verl.utils import tensordict_utils as tu

        rows = _unscored(token_ids, action_masks)
        if not rows:
            return []
        batch = self._batch(rows)
        tu.assign_non_tensor(batch, compute_loss=False)
        output = self._worker.infer_batch(batch)["log_probs"].unbind()
        results = []
        for row, scored in zip(rows, output[: len(rows)], strict=True):
            # verl's entry j scores token j + 1, and its last one belongs to no token.
            shifted = np.concatenate([np.zeros(1, np.float32), scored[:-1].float().numpy()])
            results.append(np.where(row.action_mask, shifted, np.float32(0.0)))
        return results

    def group_advantages(self, rewards: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
        """verl's GRPO advantages: (reward - group mean) / (group standard deviation + 1e-6), one per rollout.

        A rollout that is alone in its group keeps its reward. Raises `LearnerError` on unequal lengths or a
        reward that is not finite.
        """
        import torch
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn

        if len(rewards) != len(groups):
            raise LearnerError(f"{len(rewards)} rewards but {len(groups)} group names")
        if not np.isfinite(np.asarray(rewards, np.float64)).all():
            raise LearnerError("a reward is not finite: leave failed rewards out of the batch")
        if not rewards:
            return []
        index = np.empty(len(groups), dtype=object)
        index[:] = list(groups)
        per_token = torch.tensor(rewards, dtype=torch.float32).unsqueeze(1)
        advantages, _ = get_adv_estimator_fn("grpo")(
            token_level_rewards=per_token, response_mask=torch.ones_like(per_token), index=index
        )
        return [float(value) for value in advantages[:, 0]]

    def policy_gradient_step(self, batch: Sequence[TrainingSequence]) -> StepReport:
        """One optimizer step on verl's clipped PPO loss (clip 0.2, mean over action tokens).

        Raises `LearnerError` on an empty batch, a malformed sequence, or an old log-prob or advantage that is
        not finite; then nothing was changed.
        """
        rows = [
            _Row.of(index, row.token_ids, row.action_mask, row.old_log_probs, row.advantage)
            for index, row in enumerate(batch)
        ]
        return self._step(rows, self._ppo_loss)

    def supervised_step(self, token_ids: Sequence[Sequence[int]], action_masks: Sequence[Sequence[bool]]) -> StepReport:
        """One optimizer step on verl's supervised loss: the mean of -log-prob over the tokens in the masks.

        Raises `LearnerError` on no sequence or a malformed one; then nothing was changed.
        """
        return self._step(_unscored(token_ids, action_masks), self._supervised_loss)

    def _step(self, rows: "Sequence[_Row]", loss: Any) -> StepReport:
        import torch
        from verl.utils import tensordict_utils as tu

        if not rows:
            raise LearnerError("a step needs at least one sequence")
        started = time.monotonic()
        self._worker.set_loss_fn(loss)
        before, _ = self._adapter()
        metrics = tu.get(self._worker.train_batch(self._batch(rows)), "metrics")
        after, _ = self._adapter()
        squared = sum(float(((after[name] - before[name]).double() ** 2).sum()) for name in before)
        return StepReport(
            loss=float(metrics["loss"]),
            grad_norm=float(metrics["grad_norm"]),
            changed_tensors=sum(not torch.equal(before[name], after[name]) for name in before),
            tensors=len(before),
            delta_l2=squared**0.5,
            seconds=time.monotonic() - started,
        )

    def export_adapter(self, folder: Path, base_model_name: str) -> list[Path]:
        """Write the adapter in PEFT's layout to `folder`, which must not exist, and return its files.

        `base_model_name` stands in the configuration for the model, whose folder means nothing elsewhere. The
        folder appears complete or not at all, and the same weights give the same bytes. Raises `LearnerError`
        if it exists.
        """
        from peft import LoraConfig
        from safetensors.torch import save_file

        folder = folder.resolve()
        if folder.exists():
            raise LearnerError(f"{folder} exists: an adapter folder is never written again, name a new one")
        tensors, config = self._adapter()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            made = Path(scratch) / "adapter"
            made.mkdir()
            save_file(tensors, made / "adapter_model.safetensors", metadata={"format": "pt"})
            settings = LoraConfig(
                r=config["r"],
                lora_alpha=config["lora_alpha"],
                target_modules=list(config["target_modules"]),
                base_model_name_or_path=base_model_name,
                task_type="CAUSAL_LM",
                inference_mode=True,
            ).to_dict()
            # Written here, because peft writes its sets in an order that changes from process to process.
            text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)
            (made / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
            made.rename(folder)
        return sorted(folder.iterdir())

    def publish(
        self,
        run: Run,
        *,
        version: int,
        parent_version: int,
        folder: Path,
        base_model: BaseModelIdentity,
        updates: Sequence[str] = (),
    ) -> PolicyView:
        """Export the adapter to `folder` and make it policy `version`, with the digests that engines must report.

        See `export_adapter` and `publish_adapter`; after a crash between the two, the latter takes the folder on.
        """
        self.export_adapter(folder, base_model.name)
        return publish_adapter(
            run,
            version=version,
            parent_version=parent_version,
            folder=folder,
            base_model=base_model,
            updates=updates,
        )

    def _adapter(self) -> "tuple[dict[str, torch.Tensor], dict[str, Any]]":
        """Copies of the adapter's tensors, by PEFT's names, and its configuration."""
        tensors, config = self._worker.engine.get_per_tensor_param(base_sync_done=True)
        return {name: tensor.detach().float().cpu().clone().contiguous() for name, tensor in tensors}, config

    def _batch(self, rows: "Sequence[_Row]") -> Any:
        """verl's batch of `rows`, filled up to whole micro-batches, as verl demands.

        A filling row has an empty mask, so it adds 0 to the sum of the loss and 0 to the number of tokens it
        is divided by.
        """
        import torch
        from verl.utils import tensordict_utils as tu
        from verl.utils.dataset.dataset_utils import DatasetPadMode

        filling = _Row(np.zeros(2, np.int64), np.zeros(2, bool), 1, np.zeros(2, np.float32), 0.0)
        full = [*rows, *[filling] * (-len(rows) % self._micro_batch_size)]

        def nested(arrays: Sequence[np.ndarray]) -> torch.Tensor:
            return torch.nested.as_nested_tensor([torch.from_numpy(a) for a in arrays], layout=torch.jagged)

        return tu.get_tensordict(
            {
                "input_ids": nested([r.token_ids for r in full]),
                "position_ids": nested([np.arange(len(r.token_ids)) for r in full]),
                "prompts": nested([r.token_ids[: r.start] for r in full]),
                "responses": nested([r.token_ids[r.start :] for r in full]),
                "loss_mask": nested([r.action_mask.astype(np.int64) for r in full]),
                "response_mask": nested([r.action_mask[r.start :].astype(np.int64) for r in full]),
                "old_log_probs": nested([r.old_log_probs[r.start :] for r in full]),
                "advantages": nested([np.full(len(r.token_ids) - r.start, r.advantage, np.float32) for r in full]),
            },
            non_tensor_dict={
                "temperature": 1.0,
                "pad_mode": DatasetPadMode.NO_PADDING,
                "pad_token_id": 0,
                "global_batch_size": len(rows),
                "micro_batch_size_per_gpu": self._micro_batch_size,
                "use_dynamic_bsz": False,
                "use_remove_padding": False,
                "use_fused_kernels": False,
                "calculate_entropy": False,
            },
        )


@dataclass(frozen=True)
class _Row:
    token_ids: np.ndarray  # int64
    action_mask: np.ndarray  # bool
    start: int  # the first action token: everything before it is the prompt
    old_log_probs: np.ndarray  # float32, 0.0 where the mask is false
    advantage: float

    @classmethod
    def of(
        cls,
        index: int,
        tokens: Sequence[int],
        mask: Sequence[bool],
        old_log_probs: np.ndarray,
        advantage: float,
    ) -> "_Row":
        ids, actions = np.asarray(tokens, np.int64), np.asarray(mask, bool)
        old = np.asarray(old_log_probs, np.float32)
        if not ids.shape == actions.shape == old.shape or ids.ndim != 1:
            raise LearnerError(
                f"sequence {index}: {ids.size} tokens, {actions.size} mask entries, {old.size} log-probs"
            )
        if not actions.any():
            raise LearnerError(f"sequence {index} has no action token")
        if actions[0]:
            raise LearnerError(f"sequence {index}: the first token cannot be an action, nothing comes before it")
        if not np.isfinite(old[actions]).all() or not np.isfinite(advantage):
            raise LearnerError(f"sequence {index}: an old log-prob of an action token or the advantage is not finite")
        # Masked log-probs may be anything; not-a-number would survive the multiplication with the mask.
        return cls(ids, actions, int(actions.argmax()), np.where(actions, old, np.float32(0.0)), advantage)


def _unscored(token_ids: Sequence[Sequence[int]], action_masks: Sequence[Sequence[bool]]) -> list[_Row]:
    """Rows without a behaviour policy. Raises `LearnerError` if they do not fit together."""
    if len(token_ids) != len(action_masks):
        raise LearnerError(f"{len(token_ids)} sequences but {len(action_masks)} action masks")
    return [
        _Row.of(index, tokens, mask, np.zeros(len(tokens), np.float32), 0.0)
        for index, (tokens, mask) in enumerate(zip(token_ids, action_masks, strict=True))
    ]


def _prepare_verl() -> None:
    """Import verl on this machine's platform, with a process group of one."""
    for variable, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
    ):
        os.environ.setdefault(variable, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")  # verl's worker wants to know it; the group below uses no port
    try:
        on_cpu = import_verl()
    except PlatformError as error:
        raise LearnerError(str(error)) from error
    import torch

    if on_cpu:
        from worker_agent.learner.verl_cpu import register_cpu_engines

        register_cpu_engines()
    if not torch.distributed.is_initialized():
        # verl would build "cpu:gloo,cpu:gloo" and fail on a CPU; a group made before is taken as it is.
        torch.distributed.init_process_group(
            "gloo" if on_cpu else "cpu:gloo,cuda:nccl",
            store=torch.distributed.HashStore(),
            rank=0,
            world_size=1,
        )
