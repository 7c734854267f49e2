"""vLLM in this process, with policies as LoRA adapters on one base model.

Generation, loading and scoring are serialised by one lock: an adapter is never replaced under a running
request.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from worker_agent.engines.lora_digest import (
    ADAPTER_CONFIG,
    AdapterError,
    LoraDigest,
    check_adapter,
    digest_of_folder,
    lora_layout,
)

MAX_ADAPTERS = 2  # the version that is served and the one that comes next

# vLLM knows an adapter by an integer: never used twice in a process, so no slot can stand for older weights.
_adapter_ids = itertools.count(1)

# vLLM keeps its process groups in globals: closing one of two engines would break the other.
_one_engine = threading.Lock()

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",  # the model is a folder: there is nothing to ask for
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # with it a start takes seconds, not a minute
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines that bind their threads end up on the same core
}


class _Streamed:
    """What a request in flight has produced so far, from the pieces that vLLM gives out."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._text: list[str] = []
        self._finish_reason = "abort"

    def add(self, piece: Any) -> None:
        """A `CompletionOutput` that holds what is new."""
        tokens = [int(token) for token in piece.token_ids]
        self._tokens += tokens
        self._log_probs += [float(entry[token].logprob) for token, entry in zip(tokens, piece.logprobs, strict=True)]
        self._text.append(piece.text)
        self._finish_reason = piece.finish_reason or self._finish_reason

    def completion(self) -> Completion:
        return Completion(self._tokens, self._log_probs, self._finish_reason, "".join(self._text))


class VllmEngine(Availability):
    """An `Engine` on `vllm.LLM`.

    `model` is a model folder, `dtype` a torch dtype's name, `max_model_len` the longest prompt with its
    completion in tokens, `max_num_seqs` how many sequences run at once. Adapters may have the modules
    `lora_target_modules` and a rank of up to `max_lora_rank`. On a GPU `gpu_memory_fraction` of its
    memory is taken (None: as vLLM has it), and only a `releasable` engine can give it back for a while.
    Environment variables that are already set win over the ones this class sets; they count only before the
    first import of vLLM. One engine may be open in a process. `OMP_NUM_THREADS` limits its threads on a CPU.
    """

    name = "vllm"
    kinds: tuple[str, ...] = ("base", "lora")
    logprobs_mode = "raw"

    def __init__(
        self,
        model: Path,
        *,
        dtype: str = "float32",
        max_model_len: int = 128,
        max_num_seqs: int = 16,
        lora_target_modules: Sequence[str] = ("q_proj", "v_proj"),
        max_lora_rank: int = 16,
        gpu_memory_fraction: float | None = None,
        releasable: bool = True,
    ) -> None:
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        import torch

        self._on_cpu = not torch.cuda.is_available()
        if self._on_cpu:
            for variable, value in _CPU_ENVIRONMENT.items():
                os.environ.setdefault(variable, value)
            if "OMP_NUM_THREADS" in os.environ:  # torch reads it at its import, which may lie behind us
                torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        import vllm

        self.version = str(vllm.__version__)
        self.dtype = dtype
        self._max_model_len = max_model_len
        self._lora = tuple(lora_target_modules), max_lora_rank
        self._lock = threading.RLock()
        self._adapters: dict[tuple[str, int, str], Any] = {}  # LoRARequests, in the order of loading
        self._last_used: tuple[str, int, str] | None = None
        self._in_flight: dict[str, _Streamed] = {}
        self._releasable = releasable or self._on_cpu
        on_gpu: dict[str, Any] = {}
        if not self._on_cpu:
            on_gpu["enable_sleep_mode"] = releasable
            if gpu_memory_fraction is not None:
                on_gpu["gpu_memory_utilization"] = gpu_memory_fraction
        if not _one_engine.acquire(blocking=False):
            raise EngineError("this process has an open vLLM engine: close it first, or start another process")
        try:
            self._llm = vllm.LLM(
                model=str(model),
                dtype=dtype,
                seed=0,
                enforce_eager=True,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                enable_prefix_caching=True,
                # The CPU's default of 128 tokens a block never caches a short prompt.
                block_size=32 if self._on_cpu else None,
                logprobs_mode="raw_logprobs",
                distributed_executor_backend="uni",
                enable_lora=True,
                max_loras=MAX_ADAPTERS + 1,  # a new one is loaded and verified before an old one goes
                max_lora_rank=lora_room(max_lora_rank),
                # Unlimited, LoRA lands on the logits of a tied embedding, which fails with prompt_logprobs.
                lora_target_modules=list(lora_target_modules),
                use_tqdm_on_load=False,
                worker_extension_cls=f"{LoraDigest.__module__}.{LoraDigest.__qualname__}",
                **on_gpu,
            )
            self._tokenizer: Any = self._llm.get_tokenizer()
            self._base_canary = self._score([CANARY], None)[0]
        except (ValueError, RuntimeError) as error:  # what it says of its settings, and of a device without room
            _one_engine.release()
            raise EngineError(f"vLLM does not start: {' '.join(str(error).split())}") from error
        except BaseException:
            _one_engine.release()
            raise

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of `messages` through the model's chat template, generation prompt included.

        Raises `EngineError` if the model has no template, or one that refuses them.
        """
        return render_chat(self._tokenizer, messages)

    def load(self, policy: Policy) -> LoadReport:
        """Load an adapter and compare what the worker holds with the folder; see `Engine.load`.

        Two adapters are kept. A third takes the place of the older one, but never of the one that generated
        last. The base model is probed by repeating the log-probs it gave before any adapter was loaded; it has no
        digest, since on a CPU vLLM keeps its matrices packed where nobody can read them.
        """
        started = time.monotonic()
        with self._lock:
            self._check_idle()
            digest: WeightDigest | None = None
            if (folder := folder_of(policy, self.kinds)) is None:
                self._probe_base()
            else:
                digest = self._load_adapter(policy, folder)
            if not self._llm.reset_prefix_cache():
                raise EngineError("vLLM did not reset its prefix cache: requests are still running; load again")
            return LoadReport(
                served_version=policy.version,
                served_hash=policy.artifact_hash,
                caches_reset=("prefix",),
                digest=digest,
                seconds=time.monotonic() - started,
            )

    def begin(self, policy: Policy, requests: Sequence[Request], sampling: Sampling) -> None:
        """See `Engine.begin`. vLLM works only in `finished`, on all requests together.

        Raises `EngineError` if the policy is not loaded, if a prompt is empty or leaves no room for a token, and for
        what vLLM refuses.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        with self._lock:
            self._check_open()
            adapter = self._request_of(policy)
            check_lengths([request.token_ids for request in requests], self._max_model_len - 1)
            self._last_used = policy.key
            begun: list[str] = []
            try:
                with _refusals():
                    for request in requests:
                        parameters = SamplingParams(
                            seed=request.seed,
                            temperature=sampling.temperature,
                            top_p=sampling.top_p,
                            top_k=sampling.top_k,
                            min_p=sampling.min_p,
                            max_tokens=request.max_tokens,
                            stop=list(sampling.stop),
                            logprobs=0,
                            output_kind=RequestOutputKind.DELTA,
                        )
                        prompt: Any = {"type": "token", "prompt_token_ids": list(request.token_ids)}
                        self._llm.llm_engine.add_request(request.request_id, prompt, parameters, lora_request=adapter)
                        begun.append(request.request_id)
                        self._in_flight[request.request_id] = _Streamed()
            except EngineError:
                self._abort(begun)
                raise

    def finished(self, wait_seconds: float) -> dict[str, Completion | EngineError]:
        """See `Engine.finished`."""
        until = time.monotonic() + wait_seconds
        with self._lock:
            done: dict[str, Completion | EngineError] = {}
            while self._in_flight and not done:
                for output in self._llm.llm_engine.step():
                    streamed = self._in_flight[output.request_id]
                    streamed.add(output.outputs[0])
                    if output.finished:
                        del self._in_flight[output.request_id]
                        done[output.request_id] = streamed.completion()
                if time.monotonic() >= until:
                    break
            return done

    def interrupt(self) -> dict[str, Completion | EngineError]:
        """See `Engine.interrupt`."""
        with self._lock:
            left = dict(self._in_flight)
            self._abort(list(left))
            return {request_id: streamed.completion() for request_id, streamed in left.items()}

    def score(self, policy: Policy, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens under `policy`; see `Engine.score`.

        Raises `EngineError` if the policy is not loaded, or if a sequence is empty or too long.
        """
        with self._lock:
            self._check_idle()
            request = self._request_of(policy)
            check_lengths(sequences, self._max_model_len - 1)
            return self._score(sequences, request)

    def unload(self, policy: Policy) -> None:
        """Remove an adapter from the worker; the base model stays. See `Engine.unload`."""
        with self._lock:
            self._check_idle()
            if policy.key in self._adapters:
                self._remove(policy.key)

    def release(self) -> None:
        """Give the memory of weights and key-value cache back until `resume` (vLLM's sleep, level 1).

        Until then everything else raises `EngineError`, and vLLM's scheduler stands still. On a CPU vLLM frees
        nothing. Raises `EngineError` for an engine that is not `releasable`.
        """
        with self._lock:
            if self._released:
                return
            self._check_idle()
            if not self._releasable:
                raise EngineError("this engine keeps its memory: start it as a releasable one")
            self._llm.sleep(level=1)
            if not self._llm.llm_engine.is_sleeping():
                raise EngineError("vLLM was told to sleep and does not: restart it")
            self._released = True

    def resume(self) -> None:
        """Take the memory back, the weights as they were. Nothing happens if it was not released."""
        with self._lock:
            if self._closed or not self._released:
                return
            self._llm.wake_up()
            if self._llm.llm_engine.is_sleeping():
                raise EngineError("vLLM was told to wake up and does not: restart it")
            self._released = False

    def close(self) -> None:
        """Shut vLLM down. It takes torch's process group along: a learner in this process ends with it."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._adapters.clear()
                self._in_flight.clear()
                self._llm.llm_engine.engine_core.shutdown()
                del self._llm
                _one_engine.release()

    def _load_adapter(self, policy: Policy, folder: Path) -> WeightDigest:
        from vllm.lora.request import LoRARequest

        key = policy.key
        try:
            expected = digest_of_folder(folder, self.dtype)
            check_adapter(folder, *self._lora)
        except AdapterError as error:
            raise EngineError(str(error)) from error
        if key not in self._adapters:
            request = LoRARequest(
                f"{policy.run_id}/v{policy.version}/{policy.artifact_hash}", next(_adapter_ids), str(folder)
            )
            try:
                self._llm.llm_engine.add_lora(request)
            except Exception as error:  # vLLM raises whatever its loader meets
                self._llm.llm_engine.remove_lora(request.lora_int_id)  # it may have got half way
                raise EngineError(
                    f"vLLM cannot load the adapter of version {policy.version}: {error}; see {ADAPTER_CONFIG}"
                ) from error
            self._adapters[key] = request
        digest = self._held(self._adapters[key].lora_int_id)
        if digest is None or (digest.registered, digest.active) != (expected, expected):
            self._remove(key)
            raise EngineError(
                f"vLLM does not hold the adapter of version {policy.version} as its folder has it ({digest}, "
                f"expected {expected}); unloaded: load it again"
            )
        while len(self._adapters) > MAX_ADAPTERS:
            self._remove(next(old for old in self._adapters if old not in (key, self._last_used)))
        return digest

    def _held(self, adapter_id: int) -> WeightDigest | None:
        """Of the adapter's weights in the worker's memory, None where it has none."""
        held = self._llm.collective_rpc("lora_digest", args=(adapter_id,))[0]
        if held["registered"] is None:
            return None
        return WeightDigest(
            layout=str(lora_layout(self.name, self.version, self.dtype)),
            registered=held["registered"],
            active=held["active"],
        )

    def _remove(self, key: tuple[str, int, str]) -> None:
        adapter = self._adapters.pop(key)
        self._llm.llm_engine.remove_lora(adapter.lora_int_id)
        if self._held(adapter.lora_int_id) is not None:
            raise EngineError(f"vLLM still holds adapter {adapter.lora_name} after its removal: restart it")

    def _probe_base(self) -> None:
        now = self._score([CANARY], None)[0]
        if not same_log_probs(now, self._base_canary, self.dtype):
            raise EngineError("the base model no longer gives the log-probs it gave at its start: restart the engine")

    def _request_of(self, policy: Policy) -> Any:
        if folder_of(policy, self.kinds) is None:
            return None
        if policy.key not in self._adapters:
            raise EngineError(f"policy version {policy.version} ({policy.artifact_hash}) is not loaded: load it first")
        return self._adapters[policy.key]

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self._in_flight[request_id]
        self._llm.llm_engine.abort_request(request_ids)

    def _score(self, sequences: Sequence[Sequence[int]], request: Any) -> list[list[float]]:
        from vllm import SamplingParams

        # Requests with prompt_logprobs never read the prefix cache, so every token is really computed.
        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompts: Any = [{"prompt_token_ids": list(tokens)} for tokens in sequences]
        with _refusals():
            outputs = self._llm.generate(prompts, parameters, lora_request=request, use_tqdm=False)
        return [
            [
                0.0,
                *(entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)),
            ]
            for output, tokens in zip(outputs, sequences, strict=True)
        ]


def process_environment() -> dict[str, str]:
    """Variables of another process that is to run vLLM as this module does; those that are already set win."""
    import torch

    chosen = _ENVIRONMENT if torch.cuda.is_available() else _ENVIRONMENT | _CPU_ENVIRONMENT
    return {name: os.environ.get(name, value) for name, value in chosen.items()} | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1"
    }


def lora_room(rank: int) -> int:
    """The room that vLLM keeps for adapters of up to `rank`, at most 512: it takes these values alone."""
    return next(room for room in (8, 16, 32, 64, 128, 256, 320, 512) if room >= rank)


def server_start(
    model: Path,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    lora_target_modules: Sequence[str],
    max_lora_rank: int,
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a vLLM server that serves as this module's engine does.

    Variables that are already set win, but for those that the server cannot do without.
    """
    import torch

    arguments = {
        "--model": str(model),
        "--served-model-name": "base",
        "--dtype": dtype,
        "--seed": "0",
        "--max-model-len": str(max_model_len),
        "--max-num-seqs": str(max_num_seqs),
        "--logprobs-mode": "raw_logprobs",
        "--distributed-executor-backend": "uni",
        "--max-loras": str(MAX_ADAPTERS + 1),
        "--max-lora-rank": str(lora_room(max_lora_rank)),
        "--worker-extension-cls": f"{LoraDigest.__module__}.{LoraDigest.__qualname__}",
    }
    sleep: list[str] = []
    if not torch.cuda.is_available():
        arguments["--block-size"] = "32"
    else:
        sleep = ["--enable-sleep-mode"]
    environment = process_environment() | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    flags = ["--enforce-eager", "--enable-prefix-caching", "--enable-lora", "--lora-target-modules"]
    return [*(word for pair in arguments.items() for word in pair), *sleep, *flags, *lora_target_modules], environment


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn vLLM's refusal of a request (sampling or token ids out of range) into an `EngineError`."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except (ValueError, VLLMValidationError) as error:
        raise EngineError(f"vLLM refused the request: {error}") from error
