"""verl 0.9.1's v1 trainer through a coordinator: a sampler, an agent loop worker and a trainer, each a subclass.

    VERL_USE_EXTERNAL_MODULES=examples.verl_loop.coordinated python -m verl.trainer.main_ppo ...
    trainer.v1.trainer_mode=coordinated
    trainer.v1.sampler.custom_sampler.path=pkg://examples.verl_loop.coordinated
    trainer.v1.sampler.custom_sampler.name=CoordinatedBuffer
    trainer.v1.sampler.max_off_policy_threshold=null  # the run's max_lag decides, not verl's
    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=examples.verl_loop.coordinated.CoordinatedManager
    +trainer.v1.sampler.sampler_kwargs.run=my-run
    +trainer.v1.sampler.sampler_kwargs.incarnation=...  # new for each start of verl

The run has `group_size` as verl's rollout.n, and `reward_on_arrival`. verl's data stays in TransferQueue; the
coordinator has a copy of what it must judge, and says what may be trained on. verl's step number is the policy version.
"""

import asyncio
import hashlib
from contextvars import ContextVar
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync, _accumulate_eviction_metrics
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.utils.debug import marked_timer
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.utils.padding import response_from_nested

from coordinator.client import Candidates, Coordinator, Trajectory, Update
from coordinator.rules.manifest import stream_hash
from coordinator.wire.rollouts import ArrivalReward, Rollout, Span

WORKER = "verl"


def say(text: str) -> None:
    print(f"coordinated: {text}", flush=True)


_made_by: ContextVar[list[tuple[int, int]]] = ContextVar("made_by")


class _Segments(LLMServerClient):
    """Notes which version made how many tokens, one request after the other."""

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        output = await super().generate(*args, **kwargs)
        if output.token_ids:
            _made_by.get().append((output.extra_fields["global_steps"], len(output.token_ids)))
        return output


class CoordinatedClient(FullyAsyncLLMServerClient, _Segments):
    """verl's client, which goes on with a rollout that a weight sync cut off; it tells where it was cut.

    verl itself keeps the first and the last version only.
    """

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        _made_by.set([])
        output = await super().generate(*args, **kwargs)
        output.extra_fields["made_by"] = _made_by.get()
        return output


class CapturingWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]  # behind ray.remote
    """verl's agent loop worker; each trajectory goes to the coordinator too, with its reward, before its group ends."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        given = config.trainer.v1.sampler.sampler_kwargs
        self._run, self._incarnation = Coordinator().run(given.run), given.incarnation
        self._contract = self._run.view().contract
        self._rules = hashlib.sha256(str(config.reward).encode()).hexdigest()

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        if not validate:
            # Where it is refused, verl marks the whole group as failed, evicts it and refills.
            await asyncio.to_thread(self._hand_in, output, **kwargs)

    def _hand_in(self, output: Any, uid: str, session_id: int, index: int, global_steps: int, **_: Any) -> None:
        prompt, response = list(output.prompt_ids), list(output.response_ids)
        spans, start = [], len(prompt)
        for version, count in output.extra_fields["made_by"]:
            made_by = self._run.policy(version)
            end = min(start + count, len(prompt) + len(response))
            spans.append(Span(version=version, artifact_hash=made_by.artifact_hash, start=start, end=end))
            start = end
        rollout = Rollout(
            rollout_id=f"{uid}_{session_id}_0",  # verl's own key in TransferQueue
            task_id=f"prompt-{index}",
            task_source=f"verl-step-{global_steps}",  # the step that asked for it
            group_id=uid,
            sample_index=session_id,
            spans=tuple(spans),
            span_source="segmented",
            worker_id=WORKER,
            incarnation=self._incarnation,
            contract=self._contract,
            token_ids=prompt + response,
            action_mask=[False] * len(prompt) + [bool(acts) for acts in output.response_mask],
            behavior_log_probs=[None] * len(prompt) + list(output.response_logprobs),
            reward=ArrivalReward(
                status="ok", value=output.reward_score, ruleset_id="verl-reward", ruleset_hash=self._rules
            ),
        )
        [verdict] = self._run.submit([rollout]).verdicts
        if verdict.verdict not in ("accepted", "duplicate"):
            raise ValueError(f"{rollout.rollout_id}: {verdict.verdict}, {verdict.reason}")


class CoordinatedManager(AgentLoopManagerTQ):
    """verl's agent loop manager, with capturing workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(CapturingWorker)


class CoordinatedActor(ActorRolloutRefWorker):
    """verl's actor, which also says by what hash its weights go."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_hash(self) -> str:
        """The artifact hash of the tensors that `update_weights` sends; every rank takes part in gathering them."""
        tensors, _ = self.actor.engine.get_per_tensor_param(base_sync_done=True)
        hashed = []
        for name, tensor in tensors:
            content = tensor.detach().cpu().contiguous()
            sha256 = hashlib.sha256(content.flatten().view(torch.uint8).numpy()).hexdigest()
            hashed.append((name, str(content.dtype).removeprefix("torch."), tuple(content.shape), sha256))
        return stream_hash(hashed)


class CoordinatedBuffer(ReplayBufferAsync):
    """verl's buffer, whose groups enter a batch only once the coordinator has bound them to the step's update.

    verl takes finished groups, oldest first, as ever. What the coordinator refuses is evicted and refilled, as verl
    does with what it finds stale itself.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.run = Coordinator().run(self.sampler_kwargs.run)
        self.update: Update | None = None
        self.trainer: CoordinatedTrainer  # set by the trainer itself

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """`batch_size` groups that the step's update holds; verl's metrics of what was evicted on the way."""
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        if self.update is None:  # left open until the trainer commits: its lease is renewed meanwhile
            self.update = self.run.update(f"step-{global_steps}")
            self.update.__enter__()
        taken: dict[str, dict[str, Any]] = {}
        missing, refused, metrics = batch_size, 0, {}
        while missing:
            ready, evicted = self.wait_for_sampleable(global_steps, partition_id, missing)
            _accumulate_eviction_metrics(metrics, evicted, 0)
            uids, snapshot, _ = self._select_prompt_uids(partition_id, ready, missing)
            batch = self._materialize_batch(partition_id, uids, snapshot)
            reserved = self.update.reserve(self._candidates(batch), self.trainer.current_log_probs(batch))
            held = {trajectory.rollout_id for trajectory in reserved.admitted}
            taken |= {key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if key in held}
            gone = [verdict for verdict in reserved.verdicts if verdict.rollout_id not in held]
            for verdict in gone:
                say(f"step {global_steps}: {verdict.rollout_id} refused, {verdict.verdict}, lag {verdict.lag}")
            if gone:
                tq.kv_clear(partition_id=partition_id, keys=[verdict.rollout_id for verdict in gone])
            missing = len(set(uids) - set(reserved.admitted.group_ids))
            if missing:
                self.refill_fn(missing)
                say(f"step {global_steps}: {missing} groups refilled")
                refused += missing
        metrics["training/coordinator/refused_groups"] = refused
        return KVBatchMeta(partition_id=partition_id, keys=list(taken), tags=list(taken.values())), metrics

    def _candidates(self, batch: KVBatchMeta) -> Candidates:
        """What verl chose, as the coordinator knows it: tokens from TransferQueue, revision and reward from there."""
        data = tq.kv_batch_get(batch.keys, batch.partition_id, ["input_ids", "response_mask", "rollout_log_probs"])
        groups = {key.split("_")[0] for key in batch.keys}
        known = {view.rollout_id: view for uid in groups for view in self.run.rollouts(group_id=uid)}
        trajectories = []
        for i, key in enumerate(batch.keys):
            view, tokens = known[key], data["input_ids"][i].numpy()
            prompt = len(tokens) - len(data["response_mask"][i])
            trajectories.append(
                Trajectory(
                    **view.model_dump(include={"rollout_id", "revision", "group_id", "task_id", "task_source",
                                               "sample_index", "attempt", "reward", "row_starts"}),
                    policy_version=view.spans[0].version,
                    lag=self.update.policy.version - view.spans[0].version,
                    token_ids=tokens,
                    action_mask=np.pad(data["response_mask"][i].numpy().astype(bool), (prompt, 0)),
                    behavior_log_probs=np.pad(data["rollout_log_probs"][i].numpy(), (prompt, 0)),
                    side_data=None,
                )
            )  # fmt: skip
        return Candidates(tuple(trajectories))


@register_trainer("coordinated")
class CoordinatedTrainer(PPOTrainerColocateAsync):
    """verl's asynchronous trainer; each step is an update, each weight sync makes a version active."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping.keys() & {Role.Actor, Role.ActorRollout, Role.ActorRolloutRef}:
            self.role_worker_mapping[role] = ray.remote(CoordinatedActor)

    def get_llm_client(self) -> CoordinatedClient:
        return self.llm_server_manager.get_client(client_cls=CoordinatedClient)

    def on_init_end(self) -> None:
        super().on_init_end()  # verl's engines have the weights that it begins with now
        given = self.config.trainer.v1.sampler.sampler_kwargs
        self.replay_buffer.trainer = self
        self.run = self.replay_buffer.run
        self.worker = self.run.worker(WORKER, given.incarnation)
        self.worker.register("verl", "0.9.1")
        active = self.run.view().active
        self.worker.ack(active.version, active.artifact_hash)

    def current_log_probs(self, batch: KVBatchMeta) -> list[np.ndarray]:
        """Log-probs of whole sequences under the actor's weights, 0 in the prompt; by verl's own forward pass.

        As many rows as the actor's data-parallel ranks divide.
        """
        temperature = self.config.actor_rollout_ref.rollout.temperature
        batch.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=temperature)
        self.actor_rollout_wg.compute_log_prob(batch)
        data = tq.kv_batch_get(batch.keys, batch.partition_id, ["log_probs", "response_mask", "input_ids"])
        responses = response_from_nested(data["log_probs"], data["response_mask"])
        return [
            np.pad(row.float().numpy(), (len(tokens) - len(row), 0))
            for row, tokens in zip(responses.unbind(), data["input_ids"].unbind(), strict=True)
        ]

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        try:
            batch = super().step(metrics, timing_raw)
        except BaseException as error:
            if self.replay_buffer.update is not None:  # what it holds goes back at once
                self.replay_buffer.update.__exit__(type(error), error, error.__traceback__)
            raise
        self.stepped, self.replay_buffer.update = self.replay_buffer.update, None
        view = self.stepped.commit()  # before verl's checkpoint, which belongs to this commit
        say(f"step {self.global_steps}: commit {view.commit_no}, {len(batch.keys)} rollouts consumed")
        return batch

    def on_step_end(self) -> None:
        version = self.global_steps
        policy = self.run.announce_stream(
            version=version,
            parent_version=version - 1,
            artifact_hash=self.actor_rollout_wg.weights_hash()[0],  # every rank's answer is the same
            base_model=self.run.policies()[0].base_model,
            updates=[self.stepped.id],
        )
        self.worker.heartbeat()  # a worker that was silent for long is not waited for
        self.run.open_activation(version, f"activate-{version}")
        with marked_timer("update_weights", self.timing_raw, color="red"):  # as verl's own on_step_end
            self.checkpoint_manager.update_weights(version)  # returns once its engines have them
            self.worker.ack(version, policy.artifact_hash, caches_reset=["prefix"])
            self.run.activate(version)
            self.checkpoint_manager.resume_generation_replicas()  # so nothing is made by a version that is not active
        say(f"step {version}: version {version} is active")
