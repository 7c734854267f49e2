"""verl's rollout: its server as a Ray actor, with policies as LoRA adapters sent by verl's own weight sync.

verl's server holds one adapter at a time. Before another policy's is computed with, its tensors are sent again from its
folder and proven again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import worker_agent
from coordinator.wire.workers import WeightDigest
from worker_agent.engines.availability import Availability
from worker_agent.engines.canary import CANARY, same_log_probs
from worker_agent.engines.chat import render_chat
from worker_agent.engines.engine import (
    Completion,
    EngineError,
    LoadReport,
    Policy,
    Request,
    Sampling,
    check_lengths,
    folder_of,
)
from worker_agent.engines.local_ray import LocalRay
from worker_agent.engines.lora_digest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    VERL_ON_VLLM,
    AdapterError,
    check_adapter,
    digest_of_folder,
    is_zero,
    lora_layout,
)
from worker_agent.engines.vllm_engine import lora_room, process_environment
from worker_agent.logs import event
from worker_agent.verl_platform import PLATFORM_VARIABLES, PlatformError, import_verl

_START_SECONDS = 900.0
_ANSWER_SECONDS = 600.0
_SYNC_SECONDS = 60.0
_BUCKET_MEGABYTES = 16  # of shared memory during a sync: more than the largest matrix of an adapter needs
_BATCHED_TOKENS = 2048
_CALLS_AT_ONCE = 1000  # verl's own figure for the server; what comes beyond waits in Ray


@dataclass(frozen=True)
class _Adapter:
    folder: Path
    digest: str  # that its folder has, and the server must hold
    canary: list[float] | None  # None until it was in the server once


@dataclass(frozen=True)
class _Asked:
    request_id: str
    limit: int  # tokens
    stop: tuple[str, ...]


class VerlEngine(Availability):
    """An `Engine` on verl's `vLLMHttpServer`, loaded through its `ServerAdapter`.

    `model` is a model folder, `log` the file for the server's output, `dtype` a torch dtype's name, `max_model_len` the
    longest prompt with its completion in tokens, `max_num_seqs` how many sequences run at once. Adapters may have the
    modules `lora_target_modules` and a rank of up to `max_lora_rank`. One GPU, or the CPU. A
    process that is in a Ray cluster keeps it, else one of its own is started; the server ends with this process.
    Raises `EngineError` if the server does not start, ModuleNotFoundError without verl, vLLM or Ray.

    As many policies as are loaded can be used in turn, but one at a time: requests for another wait for those in flight
    (`begin` refuses them), and a change of policy costs a sync.
    """

    name = "verl"
    kinds: tuple[str, ...] = ("base", "lora")
    logprobs_mode = "raw"

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        dtype: str = "float32",
        max_model_len: int = 128,
        max_num_seqs: int = 16,
        lora_target_modules: Sequence[str] = ("q_proj", "v_proj"),
        max_lora_rank: int = 16,
    ) -> None:
        try:
            on_cpu = import_verl()
        except PlatformError as error:
            raise EngineError(str(error)) from error
        self.dtype = dtype
        self._log = log
        self._max_model_len = max_model_len
        self._lora = tuple(lora_target_modules), max_lora_rank
        self._lock = threading.RLock()
        self._adapters: dict[tuple[str, int, str], _Adapter] = {}
        self._served: tuple[str, int, str] | None = None  # whose adapter is in the server
        self._in_flight: dict[Any, _Asked] = {}  # by Ray's reference to the answer
        self._server: Any = None
        self._ray = LocalRay()
        try:
            self._start(model, on_cpu, max_num_seqs, *self._lora)
        except BaseException:
            self.close()
            raise

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of `messages` through the model's chat template, generation prompt included.

        Raises `EngineError` if the model has no template, or one that refuses them.
        """
        self._check_open()
        return render_chat(self._tokenizer, messages)

    def load(self, policy: Policy) -> LoadReport:
        """Send an adapter through verl's weight sync and prove that the server computes with it; see `Engine.load`.

        The adapter takes the place of the one before, which comes back when it is asked for. What the worker holds is
        compared with the folder where it tells; where it does not, the log-probs must be other than the base model's,
        unless the adapter is zero. The base model is probed by repeating the log-probs of the start.
        """
        started = time.monotonic()
        with self._lock:
            self._check_idle()
            folder = folder_of(policy, self.kinds)
            digest = None
            if folder is None:
                self._serve(policy)
                self._reset_caches()
                if not same_log_probs(self._score([CANARY])[0], self._base_canary, self.dtype):
                    raise EngineError("the base model no longer gives the log-probs of its start: restart the engine")
            else:
                digest = self._load_adapter(policy, folder)
            return LoadReport(
                served_version=policy.version,
                served_hash=policy.artifact_hash,
                caches_reset=("prefix",),
                digest=digest,
                seconds=time.monotonic() - started,
            )

    def begin(self, policy: Policy, requests: Sequence[Request], sampling: Sampling) -> None:
        """Hand `requests` to the server, to be completed with exactly `policy`; returns at once.

        `sampling` is for all of them, but its `max_tokens` is each request's own. Raises `EngineError` if the policy is
        not loaded, if another policy's requests are in flight, if an id is, and if a prompt is empty or leaves no room
        for a token; then nothing has begun.
        """
        with self._lock:
            self._check_open()
            check_lengths([request.token_ids for request in requests], self._max_model_len - 1)
            ids = {asked.request_id for asked in self._in_flight.values()}
            for request in requests:
                if request.max_tokens < 1:
                    raise EngineError(f"refused: request {request.request_id} is for {request.max_tokens} tokens")
                if request.request_id in ids:
                    raise EngineError(f"refused: there are two requests {request.request_id} in flight")
                ids.add(request.request_id)
            if not self._in_flight:
                self._serve(policy)
            elif self._served != (None if folder_of(policy, self.kinds) is None else policy.key):
                raise EngineError(
                    f"requests of another policy than version {policy.version} are in flight, and verl's server holds "
                    f"one at a time: let them finish, or interrupt them"
                )
            shared = {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "stop": list(sampling.stop),
                "logprobs": True,
            }
            for request in requests:
                limit = min(request.max_tokens, self._max_model_len - len(request.token_ids))
                answer = self._ask(request.token_ids, shared | {"seed": request.seed, "max_tokens": limit})
                self._in_flight[answer] = _Asked(request.request_id, limit, sampling.stop)

    def finished(self, wait_seconds: float) -> dict[str, Completion | EngineError]:
        """What has been completed since, by request id, or why it could not be: each is handed over once.

        Waits for at least one of those in flight at the call, or `wait_seconds`; with none in flight it does not wait.
        """
        import ray

        with self._lock:
            answers = list(self._in_flight)
        if not answers:
            return {}
        ray.wait(answers, num_returns=1, timeout=wait_seconds)
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=0)
        return self._taken(ready)

    def interrupt(self) -> dict[str, Completion | EngineError]:
        """End all requests in flight and hand them over: a completion that was not done has the tokens so far, perhaps
        none, and the finish reason "abort". The engine is ready for others then."""
        import ray

        with self._lock:
            answers = list(self._in_flight)
            if answers:
                try:
                    # Those that have not reached vLLM yet are turned away, where they would wait for the gate to open.
                    self._get(self._server.abort_all_requests.remote(reject_request=True))
                    ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_SECONDS)
                finally:
                    self._get(self._server.resume_generation.remote())
            return self._taken(answers)

    def score(self, policy: Policy, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens under `policy`; see `Engine.score`.

        Raises `EngineError` if the policy is not loaded, if a sequence is empty or too long, for what vLLM refuses, and
        while requests are in flight.
        """
        with self._lock:
            self._check_idle()
            check_lengths(sequences, self._max_model_len - 1)
            self._serve(policy)
            return self._score(sequences)

    def unload(self, policy: Policy) -> None:
        """Forget an adapter, and remove it from the worker if it is there; see `Engine.unload`."""
        with self._lock:
            self._check_open()
            if policy.key in self._adapters:
                self._check_idle()
                del self._adapters[policy.key]
                if self._served == policy.key:
                    self._drop()

    def release(self) -> None:
        """verl's own release: vLLM sleeps at level 1, where the base model keeps its weights; see `Engine.release`."""
        with self._lock:
            if self._released:
                return
            self._check_idle()
            self._run(self._rollout.release())
            if not self._get(self._server.is_sleeping.remote()):
                self._wake_up()
                raise EngineError("verl's server was told to sleep and does not: restart the engine")
            self._released = True

    def resume(self) -> None:
        """verl's own resume, weights before key-value cache. An adapter is sent and proven again when it is used."""
        with self._lock:
            if self._closed or not self._released:
                return
            self._wake_up()
            if self._get(self._server.is_sleeping.remote()):
                raise EngineError("verl's server was told to wake up and does not: restart the engine")
            self._drop()
            self._released = False

    def close(self) -> None:
        """End the server, and Ray if it was started here. Requests in flight are lost."""
        import ray

        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._in_flight.clear()
            if self._server is not None:
                ray.kill(self._server)
            self._ray.stop()

    def _start(
        self, model: Path, on_cpu: bool, max_num_seqs: int, lora_target_modules: Sequence[str], max_lora_rank: int
    ) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # verl's adapter looks for them; whatever they say, it is alone with its server.
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("RAY_LOCAL_WORLD_SIZE", "1")
        import ray
        import verl
        import vllm
        from verl.plugin.platform import get_platform
        from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
        from verl.workers.rollout.replica import RolloutMode
        from verl.workers.rollout.vllm_rollout import ServerAdapter

        from worker_agent.engines.verl_server import RolloutServer

        rollout = RolloutConfig(
            name="vllm",
            dtype=self.dtype,
            load_format="auto",  # the base model's own weights: none are sent but adapters
            tensor_model_parallel_size=1,
            n_gpus_per_node=1,
            enforce_eager=True,
            max_model_len=self._max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(_BATCHED_TOKENS, self._max_model_len),
            prompt_length=self._max_model_len,
            response_length=self._max_model_len,
            logprobs_mode="raw_logprobs",
            seed=0,
            skip_tokenizer_init=False,
            enable_prefix_caching=True,
            free_cache_engine=True,
            enable_sleep_mode=not on_cpu,
            checkpoint_engine=CheckpointEngineConfig(
                backend="naive", update_weights_bucket_megabytes=_BUCKET_MEGABYTES
            ),
            engine_kwargs={
                "vllm": {
                    "lora_target_modules": list(lora_target_modules),
                    # The CPU's default of 128 tokens a block never caches a short prompt.
                    "block_size": 32 if on_cpu else None,
                    # One process for vLLM's core and worker: verl ties the worker to the server's life.
                    "distributed_executor_backend": "uni",
                }
            },
        )
        config = HFModelConfig(
            path=str(model),
            lora_rank=lora_room(max_lora_rank),
            target_modules=list(lora_target_modules),
            override_config={"attn_implementation": "eager"},
        )
        self._tokenizer: Any = config.tokenizer
        of_generation = config.generation_config and config.generation_config.eos_token_id
        several = of_generation if isinstance(of_generation, list) else [of_generation]
        self._end_tokens = frozenset(token for token in (self._tokenizer.eos_token_id, *several) if token is not None)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # Engines of other processes on this machine have sockets of the same name but for the rank.
        rank = secrets.randbelow(2**31)
        self._server = (
            ray.remote(RolloutServer)
            .options(
                num_cpus=0,
                max_concurrency=_CALLS_AT_ONCE,
                runtime_env={"env_vars": _server_environment(get_platform())},
            )
            .remote(
                log=str(self._log.resolve()),
                config=rollout,
                model_config=config,
                rollout_mode=RolloutMode.HYBRID,
                workers=[],
                replica_rank=rank,
                node_rank=0,
                gpus_per_node=1,
                nnodes=1,
                cuda_visible_devices="" if on_cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
            )
        )
        self._get(self._server.launch_server.remote(), _START_SECONDS)
        self._rollout: Any = ServerAdapter(rollout, config, device_mesh=None, replica_rank=rank)
        self._rollout.server_handle = self._server
        self.version = f"{verl.__version__}{VERL_ON_VLLM}{vllm.__version__}"
        self._digests = self._gives_digests()
        self._base_canary = self._score([CANARY])[0]
        event(
            "engine_negotiated",
            engine=self.name,
            version=self.version,
            dtype=self.dtype,
            logprobs_mode=self.logprobs_mode,
            max_model_len=self._max_model_len,
            digest=self._digests,
        )

    def _gives_digests(self) -> bool:
        """Whether this vLLM keeps its adapters where `LoraDigest` looks for them."""
        from ray.exceptions import RayTaskError

        try:
            self._in_worker("lora_digest", _adapter_id())
        except EngineError as error:
            if isinstance(error.__cause__, RayTaskError):
                return False
            raise
        return True

    def _load_adapter(self, policy: Policy, folder: Path) -> WeightDigest | None:
        try:
            expected = digest_of_folder(folder, self.dtype)
            check_adapter(folder, *self._lora)
        except AdapterError as error:
            raise EngineError(str(error)) from error
        key = policy.key
        known = self._adapters.get(key)
        try:
            if known is not None and known.digest != expected:
                raise EngineError(f"{folder} has other weights than {known.folder} had at the first load")
            adapter = known or _Adapter(folder, expected, None)
            if self._served != key:
                self._send(policy, adapter)
            self._reset_caches()
            self._adapters[key] = replace(adapter, canary=self._prove(adapter))
        except EngineError as error:
            self._adapters.pop(key, None)
            self._drop()
            raise EngineError(
                f"verl's server does not serve version {policy.version} as its folder has it: {error}; unloaded: load "
                f"it again"
            ) from error
        if not self._digests:
            return None
        layout = lora_layout(self.name, self.version, self.dtype)
        return WeightDigest(layout=str(layout), registered=expected, active=expected)

    def _serve(self, policy: Policy) -> None:
        """Make `policy` what the server computes with."""
        if folder_of(policy, self.kinds) is None:
            if self._served is not None:
                self._drop()
        elif policy.key not in self._adapters:
            raise EngineError(f"policy version {policy.version} ({policy.artifact_hash}) is not loaded: load it first")
        elif self._served != policy.key:
            adapter = self._adapters[policy.key]
            try:
                self._send(policy, adapter)
                self._reset_caches()
                self._prove(adapter)
            except EngineError:
                self._drop()
                raise

    def _send(self, policy: Policy, adapter: _Adapter) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            config = json.loads((adapter.folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            tensors = load_file(adapter.folder / ADAPTER_WEIGHTS)
        except (OSError, ValueError, SafetensorError) as error:
            raise EngineError(f"adapter folder {adapter.folder} is not readable: {error!r}") from error
        self._drop()
        with _no_endless_wait():
            self._run(
                self._rollout.update_weights(
                    iter(tensors.items()), peft_config=config, base_sync_done=True, global_steps=policy.version
                )
            )
        self._served = policy.key

    def _prove(self, adapter: _Adapter) -> list[float]:
        """The canary's log-probs. Raises `EngineError` unless the server holds and computes with `adapter`."""
        canary = self._score([CANARY])[0]
        if adapter.canary is not None and not same_log_probs(canary, adapter.canary, self.dtype):
            raise EngineError("it does not give the log-probs that it gave when it was loaded")
        if self._digests:
            held = self._in_worker("lora_digest", _adapter_id())
            if (held["registered"], held["active"]) != (adapter.digest, adapter.digest):
                raise EngineError(f"its worker holds {held}, expected {adapter.digest}")
        elif canary == self._base_canary and not is_zero(adapter.folder):
            raise EngineError("it answers as the base model does")
        return canary

    def _drop(self) -> None:
        """Leave the server with the base model alone."""
        self._in_worker("remove_lora", _adapter_id())
        if _adapter_id() in self._in_worker("list_loras"):
            raise EngineError("verl's server still holds an adapter after its removal: restart the engine")
        self._served = None

    def _reset_caches(self) -> None:
        if not self._get(self._server.reset_prefix_cache.remote()):
            raise EngineError("vLLM did not reset its prefix cache: requests are still running; load again")

    def _wake_up(self) -> None:
        self._run(self._rollout.resume(tags=["weights"]))
        self._run(self._rollout.resume(tags=["kv_cache"]))

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        import ray

        # Requests with prompt_logprobs never read the prefix cache, so every token is really computed.
        scoring = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answers = [self._ask(tokens, scoring) for tokens in sequences]
        ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_SECONDS)
        scores = []
        for answer, tokens in zip(answers, sequences, strict=True):
            # Entry i is of token i + 1; the last one is verl's padding.
            fields = self._get(answer).extra_fields
            if [token for (token,) in fields["prompt_ids"][:-1]] != list(tokens[1:]):
                raise EngineError(f"verl's server scored other tokens than {list(tokens)}: {fields['prompt_ids']}")
            scores.append([0.0, *(float(log_prob) for (log_prob,) in fields["prompt_logprobs"][:-1])])
        return scores

    def _ask(self, tokens: Sequence[int], sampling: Mapping[str, Any]) -> Any:
        return self._server.generate.remote(list(tokens), dict(sampling), secrets.token_hex(8))

    def _taken(self, answers: Sequence[Any]) -> dict[str, Completion | EngineError]:
        taken: dict[str, Completion | EngineError] = {}
        for answer in answers:
            with self._lock:
                asked = self._in_flight.pop(answer, None)
            if asked is not None:  # nobody else took it meanwhile
                try:
                    taken[asked.request_id] = self._completion(asked, self._get(answer))
                except EngineError as error:
                    taken[asked.request_id] = error
        return taken

    def _completion(self, asked: _Asked, output: Any) -> Completion:
        """verl says "completed" of what vLLM calls "stop" or "length": the tokens tell which."""
        tokens = [int(token) for token in output.token_ids]
        log_probs = [float(log_prob) for log_prob in output.log_probs or ()]
        if len(log_probs) != len(tokens):
            raise EngineError(f"verl's server gave {len(log_probs)} log-probs for {len(tokens)} tokens")
        # Half a character at the end is no text yet; vLLM holds it back too.
        text = self._tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")
        stops = [at for stop in asked.stop if (at := text.find(stop)) >= 0]
        if output.stop_reason == "aborted":
            finish_reason = "abort"
        elif output.stop_reason != "completed":
            raise EngineError(f"verl's server broke a completion off: {output.stop_reason}")
        elif stops or len(tokens) < asked.limit or tokens[-1] in self._end_tokens:
            finish_reason = "stop"
        else:
            finish_reason = "length"
        return Completion(tokens, log_probs, finish_reason, text[: min(stops, default=None)])

    def _in_worker(self, method: str, *arguments: Any) -> Any:
        return self._get(self._server.in_worker.remote(method, *arguments))

    def _run(self, call: Coroutine[Any, Any, None]) -> None:
        """One of verl's adapter's calls, whose errors are the server's."""
        import zmq
        from ray.exceptions import RayError

        try:
            asyncio.run(asyncio.wait_for(call, _ANSWER_SECONDS))
        except RayError as error:
            raise self._refused(error) from error
        except (TimeoutError, zmq.Again) as error:
            raise EngineError(f"verl's server does not answer: restart the engine, see {self._log}") from error

    def _get(self, answer: Any, seconds: float = _ANSWER_SECONDS) -> Any:
        import ray

        try:
            return ray.get(answer, timeout=seconds)
        except ray.exceptions.RayError as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> EngineError:
        from ray.exceptions import GetTimeoutError, RayActorError

        if isinstance(error, RayActorError):
            return EngineError(f"verl's server has ended: restart the engine, see {self._log}")
        if isinstance(error, GetTimeoutError):
            return EngineError(f"verl's server does not answer: restart the engine, see {self._log}")
        return EngineError(f"verl's server refused: {getattr(error, 'cause', error)!r} (its log: {self._log})")


def _adapter_id() -> int:
    """By which verl's server knows the one adapter that it has."""
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID

    return int(VLLM_LORA_INT_ID)


def _server_environment(platform: Any) -> dict[str, str]:
    """Of the actor. The platform's variables are those that verl starts its own servers with."""
    import torch

    # The actor imports its class from here; this package need not be installed for it.
    paths = [str(Path(worker_agent.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return {
        **process_environment(),
        **{name: os.environ[name] for name in PLATFORM_VARIABLES if name in os.environ},
        **dict.fromkeys(platform.ray_noset_envvars(), "1"),
        **platform.rollout_env_vars(),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # Ray's own choice is one thread for an actor that reserves no CPU.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
    }


@contextlib.contextmanager
def _no_endless_wait() -> Iterator[None]:
    """verl sends weights over a socket that waits forever for a worker that has died; here it raises `zmq.Again`."""
    import zmq

    context = zmq.Context.instance()  # verl's choice
    options = {zmq.SNDTIMEO: int(_SYNC_SECONDS * 1000), zmq.RCVTIMEO: int(_SYNC_SECONDS * 1000), zmq.LINGER: 0}
    for option, value in options.items():
        context.setsockopt(option, value)
    try:
        yield
    finally:
        for option in options:
            context.sockopts.pop(option, None)
