"""vLLM behind its HTTP server, started here or already running, with policies as LoRA adapters on one base model.

What a server can do depends on its version and on how it was started, so it is asked first; see `Abilities`. The
server is this engine's alone: at the start, adapters that an earlier life left behind are removed, and a pause or a
sleep that it did not end is ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from coordinator.wire.workers import WeightDigest
from worker_agent.engines.availability import Availability
from worker_agent.engines.canary import CANARY, same_log_probs
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
from worker_agent.engines.lora_digest import AdapterError, check_adapter, digest_of_folder, is_zero, lora_layout
from worker_agent.engines.vllm_engine import MAX_ADAPTERS, server_start
from worker_agent.engines.vllm_process import VllmProcess
from worker_agent.engines.vllm_streams import Streams, refused
from worker_agent.logs import event

_REQUEST_SECONDS = 600.0


@dataclass(frozen=True)
class Abilities:
    """What the server can do beside completions.

    `adapters`: loads them while it runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING). `pause`, `reset` (of the prefix cache) and
    `sleep` come with VLLM_SERVER_DEV_MODE, `digest` also needs `LoraDigest` as its --worker-extension-cls and one
    worker. Without `digest` a load is proven by log-probs alone.
    """

    adapters: bool
    pause: bool
    reset: bool
    sleep: bool
    digest: bool


@dataclass(frozen=True)
class _Adapter:
    name: str  # by which the server serves it: used for one loading only, since caches are keyed by it
    worker_id: int | None  # by which its worker knows it, where it can be asked
    canary: list[float]


class VllmServerEngine(Availability):
    """An `Engine` on a vLLM server.

    With `url` the server that runs there is used; it must serve the weights of `model` and read adapter folders under
    the paths that this process uses. Otherwise one is started on `model` (a model folder) with its output in the file
    `log`, on the main thread: it ends with this process. `dtype` is a torch dtype's name, `max_model_len` the longest
    prompt with its completion in tokens, `max_num_seqs` how many sequences run at once; adapters may have the modules
    `lora_target_modules` and a rank of up to `max_lora_rank`. A running server wins. Raises `EngineError` if
    the server does not start, does not answer, or is none.
    """

    name = "vllm-server"

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        url: str | None = None,
        dtype: str = "float32",
        max_model_len: int = 128,
        max_num_seqs: int = 16,
        lora_target_modules: Sequence[str] = ("q_proj", "v_proj"),
        max_lora_rank: int = 16,
    ) -> None:
        self._lock = threading.RLock()
        self._adapters: dict[tuple[str, int, str], _Adapter] = {}  # in the order of loading
        self._last_used: tuple[str, int, str] | None = None
        self._process: VllmProcess | None = None
        self._lora = (tuple(lora_target_modules), max_lora_rank) if url is None else None  # else the server knows
        if self._lora is not None:
            arguments, environment = server_start(model, dtype, max_model_len, max_num_seqs, *self._lora)
            self._process = VllmProcess(arguments, environment, log)
            url = self._process.url
        # No connection is kept: the server closes idle ones, and those on which it answered a 500.
        limits = httpx.Limits(max_connections=max_num_seqs, max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, timeout=_REQUEST_SECONDS, limits=limits, trust_env=False)
        self._requests = ThreadPoolExecutor(max_num_seqs, thread_name_prefix="vllm-request")
        self._in_flight: Streams = Streams(url, _REQUEST_SECONDS)
        try:
            self._negotiate(dtype)
        except (KeyError, StopIteration, TypeError, ValueError) as error:
            self.close()
            raise EngineError(f"what answers at {url} is no vLLM server that this engine knows: {error!r}") from error
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The server's address."""
        return str(self._http.base_url)

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of `messages` through the served model's chat template, generation prompt included.

        Raises `EngineError` if the model has no template.
        """
        self._check_open()
        body = {"model": self._base_name, "messages": [dict(message) for message in messages]}
        return [int(token) for token in self._post("/tokenize", body)["tokens"]]

    def load(self, policy: Policy) -> LoadReport:
        """Load an adapter under a name of its own and prove that it is what the server answers with.

        Generation is paused meanwhile where the server can; what it holds is compared with the folder where it tells,
        and in any case the name must answer: other than the base model, unless the adapter is zero. Two adapters are
        kept; a third takes the place of the older one, but never of the one that generated last. The base model is
        probed by repeating the log-probs of the start.
        """
        started = time.monotonic()
        with self._lock:
            self._check_idle()
            folder = folder_of(policy, self.kinds)
            digest = None
            if folder is None:
                self._probe_base()
            else:
                digest = self._load_adapter(policy, folder)
            return LoadReport(
                served_version=policy.version,
                served_hash=policy.artifact_hash,
                caches_reset=("prefix",) if self.abilities.reset else (),
                digest=digest,
                seconds=time.monotonic() - started,
            )

    def begin(self, policy: Policy, requests: Sequence[Request], sampling: Sampling) -> None:
        """See `Engine.begin`. What the server refuses comes out of `finished`.

        Raises `EngineError` if the policy is not loaded, or if a prompt is empty or leaves no room for a token.
        """
        with self._lock:
            self._check_open()
            served = self._served_name(policy)
            check_lengths([request.token_ids for request in requests], self._max_model_len - 1)
            self._last_used = policy.key
            for request in requests:
                self._in_flight.begin(
                    request.request_id,
                    _completion_request(served, request.token_ids) | {
                        "stream": True,
                        "seed": request.seed,
                        "temperature": sampling.temperature,
                        "top_p": sampling.top_p,
                        "top_k": sampling.top_k,
                        "min_p": sampling.min_p,
                        # The server refuses what goes beyond its length; in process vLLM cuts it.
                        "max_tokens": min(request.max_tokens, self._max_model_len - len(request.token_ids)),
                        "stop": list(sampling.stop),
                        "logprobs": 0,
                    },
                )  # fmt: skip

    def finished(self, wait_seconds: float) -> dict[str, Completion | EngineError]:
        """See `Engine.finished`; the server works on in between."""
        return self._in_flight.finished(wait_seconds)

    def interrupt(self) -> dict[str, Completion | EngineError]:
        """See `Engine.interrupt`."""
        return self._in_flight.interrupt()

    def score(self, policy: Policy, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens under `policy`; see `Engine.score`.

        Raises `EngineError` if the policy is not loaded, if a sequence is empty or too long, and for what the server
        refuses.
        """
        with self._lock:
            self._check_idle()
            served = self._served_name(policy)
            check_lengths(sequences, self._max_model_len - 1)
            return self._score(served, sequences)

    def unload(self, policy: Policy) -> None:
        """Remove an adapter from the server and, where it can be asked, from its worker. See `Engine.unload`."""
        with self._lock:
            self._check_idle()
            if policy.key in self._adapters:
                self._remove(policy.key)

    def release(self) -> None:
        """Put the server to sleep at level 1: weights go to the CPU's memory, caches are dropped; see `Engine.release`.

        A server that cannot sleep keeps its memory, which an event says.
        """
        with self._lock:
            if self._released:
                return
            self._check_idle()
            if not self.abilities.sleep:
                event("engine_keeps_its_memory", level=logging.WARNING, url=self.url)
            else:
                answer = self._call("POST", "/sleep?level=1&mode=wait")
                if answer.status_code != 200 or not self._get("/is_sleeping")["is_sleeping"]:
                    self._post("/wake_up")  # it may have stopped to schedule before it failed
                    raise refused("/sleep", answer)
            self._released = True

    def resume(self) -> None:
        """Wake the server up; see `Engine.resume`."""
        with self._lock:
            if self._released and not self._closed:
                if self.abilities.sleep:
                    self._post("/wake_up")
                    if self._get("/is_sleeping")["is_sleeping"]:
                        raise EngineError(f"the vLLM server at {self.url} did not wake up: restart it")
                self._released = False

    def close(self) -> None:
        """End a server that was started here; remove this engine's adapters from another."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._in_flight.interrupt()
            try:
                if self._process is None:
                    self._wake_for_others()
                    for key in list(self._adapters):
                        self._remove(key)
            except EngineError as error:  # the server has gone, and they with it
                event("adapters_left_behind", url=self.url, error=str(error))
            finally:
                self._in_flight.close()
                self._requests.shutdown()
                self._http.close()
                if self._process is not None:
                    self._process.stop()

    def _wake_for_others(self) -> None:
        if self._released and self.abilities.sleep:
            self._post("/wake_up")

    def _negotiate(self, dtype: str) -> None:
        self.version = str(self._get("/version")["version"])
        cards = self._get("/v1/models")["data"]
        base = next(card for card in cards if card.get("parent") is None)
        self._base_name, self._max_model_len = str(base["id"]), int(base["max_model_len"])
        self.dtype = self._own_dtype() or dtype
        self.abilities = Abilities(
            adapters=self._call("POST", "/v1/load_lora_adapter", {}).status_code != 404,
            pause=self._call("GET", "/is_paused").status_code == 200,
            reset=self._call("POST", "/reset_prefix_cache").status_code == 200,
            sleep=self._call("GET", "/is_sleeping").status_code == 200,
            digest=self._gives_digests(),
        )
        self.kinds: tuple[str, ...] = ("base", "lora") if self.abilities.adapters else ("base",)
        self._begin_clean([str(card["id"]) for card in cards if card.get("parent") is not None])
        self._base_canary = self._score(self._base_name, [CANARY])[0]
        self.logprobs_mode = self._measured_mode()
        event(
            "engine_negotiated",
            engine=self.name,
            version=self.version,
            url=self.url,
            dtype=self.dtype,
            logprobs_mode=self.logprobs_mode,
            max_model_len=self._max_model_len,
            **asdict(self.abilities),
        )

    def _own_dtype(self) -> str | None:
        answer = self._call("GET", "/server_info?config_format=json")
        if answer.status_code != 200:
            return None
        config = answer.json()["vllm_config"]["model_config"]
        if "logits" in config["logprobs_mode"]:
            raise EngineError(f"the server at {self.url} gives {config['logprobs_mode']}: start it with raw_logprobs")
        return str(config["dtype"]).removeprefix("torch.")

    def _gives_digests(self) -> bool:
        answer = self._call("POST", "/collective_rpc", {"method": "lora_digest", "args": [0]})
        return answer.status_code == 200 and len(answer.json()["results"]) == 1

    def _measured_mode(self) -> str:
        """Whether log-probs of sampled tokens are those before or after the temperature, by drawing some."""
        request = _completion_request(self._base_name, CANARY)
        request |= {"temperature": 0.25, "max_tokens": 8, "logprobs": 0, "seed": 0, "ignore_eos": True}
        (drawn,) = self._complete([request], _completion)
        scored = self._score(self._base_name, [[*CANARY, *drawn.token_ids]])[0][len(CANARY) :]
        return "raw" if same_log_probs(drawn.log_probs, scored, self.dtype) else "processed"

    def _begin_clean(self, names: Sequence[str]) -> None:
        for name in names:
            self._post("/v1/unload_lora_adapter", {"lora_name": name})
        if self.abilities.digest:
            for worker_id in self._worker_ids():
                self._rpc("remove_lora", worker_id)
        if self.abilities.sleep and self._get("/is_sleeping")["is_sleeping"]:
            self._post("/wake_up")
        if self.abilities.pause and self._get("/is_paused")["is_paused"]:
            self._post("/resume")

    def _probe_base(self) -> None:
        self._reset_caches()
        if not same_log_probs(self._score(self._base_name, [CANARY])[0], self._base_canary, self.dtype):
            raise EngineError("the base model no longer gives the log-probs it gave at its start: restart the server")

    def _load_adapter(self, policy: Policy, folder: Path) -> WeightDigest | None:
        try:
            expected = digest_of_folder(folder, self.dtype)
            if self._lora is not None:
                check_adapter(folder, *self._lora)
        except AdapterError as error:
            raise EngineError(str(error)) from error
        key = policy.key
        if key not in self._adapters:
            name = f"{policy.run_id}/v{policy.version}/{policy.artifact_hash}/{uuid.uuid4().hex}"
            self._adapters[key] = _Adapter(name, None, [])
            try:
                with self._paused():
                    worker_id = self._put(name, folder)
                    self._adapters[key] = _Adapter(name, worker_id, [])
                    self._reset_caches()
                self._adapters[key] = _Adapter(name, worker_id, self._score(name, [CANARY])[0])
            except EngineError:
                self._remove(key)
                raise
        else:
            self._reset_caches()
        try:
            digest = self._prove(self._adapters[key], folder, expected)
        except EngineError as error:
            self._remove(key)
            raise EngineError(
                f"the server does not serve version {policy.version} as its folder has it: {error}; unloaded: load it "
                f"again"
            ) from error
        while len(self._adapters) > MAX_ADAPTERS:
            self._remove(next(old for old in self._adapters if old not in (key, self._last_used)))
        return digest

    def _put(self, name: str, folder: Path) -> int | None:
        before = self._worker_ids() if self.abilities.digest else set()
        self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        if not self.abilities.digest:
            return None
        new = self._worker_ids() - before
        if len(new) != 1:
            raise EngineError(f"the server's worker took up {len(new)} adapters for one: is someone else loading?")
        return new.pop()

    def _prove(self, adapter: _Adapter, folder: Path, expected: str) -> WeightDigest | None:
        """Raises `EngineError` unless the server holds and answers with what is in `folder`."""
        canary = self._score(adapter.name, [CANARY])[0]
        if not same_log_probs(canary, adapter.canary, self.dtype):
            raise EngineError("it does not give the log-probs that it gave when it was loaded")
        if adapter.worker_id is not None:
            held = self._held(adapter.worker_id)
            if (held["registered"], held["active"]) != (expected, expected):
                raise EngineError(f"its worker holds {held}, expected {expected}")
            layout = lora_layout(self.name, self.version, self.dtype)
            return WeightDigest(layout=str(layout), registered=expected, active=expected)
        if canary == self._base_canary and not is_zero(folder):
            raise EngineError("it answers as the base model does")
        return None

    def _remove(self, key: tuple[str, int, str]) -> None:
        adapter = self._adapters.pop(key)
        answer = self._call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter.name})
        if answer.status_code not in (200, 404):
            raise refused("/v1/unload_lora_adapter", answer)
        if adapter.worker_id is not None:
            # The server forgets the name alone.
            self._rpc("remove_lora", adapter.worker_id)
            if self._held(adapter.worker_id)["registered"] is not None:
                raise EngineError(f"vLLM still holds adapter {adapter.name} after its removal: restart it")

    def _served_name(self, policy: Policy) -> str:
        if folder_of(policy, self.kinds) is None:
            return self._base_name
        if policy.key not in self._adapters:
            raise EngineError(f"policy version {policy.version} ({policy.artifact_hash}) is not loaded: load it first")
        return self._adapters[policy.key].name

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        if not self.abilities.pause:
            yield
            return
        self._post("/pause?mode=wait")
        try:
            yield
        finally:
            self._post("/resume")

    def _reset_caches(self) -> None:
        if self.abilities.reset and not self._post("/reset_prefix_cache")["success"]:
            raise EngineError("vLLM did not reset its prefix cache: requests are still running; load again")

    def _worker_ids(self) -> set[int]:
        return set(self._rpc("list_loras"))

    def _held(self, worker_id: int) -> dict[str, str | None]:
        held: dict[str, str | None] = self._rpc("lora_digest", worker_id)
        return held

    def _rpc(self, method: str, *arguments: int) -> Any:
        return self._post("/collective_rpc", {"method": method, "args": list(arguments)})["results"][0]

    def _score(self, served: str, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        # Requests with prompt_logprobs never read the prefix cache, so every token is really computed.
        bodies = [
            _completion_request(served, tokens) | {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            for tokens in sequences
        ]
        return self._complete(bodies, _scores)

    def _complete(self, bodies: Sequence[Mapping[str, Any]], read: Any) -> list[Any]:
        def one(body: Mapping[str, Any]) -> Any:
            answer = self._post("/v1/completions", body)
            (choice,) = answer["choices"]
            if answer["model"] != body["model"] or choice["prompt_token_ids"] != body["prompt"]:
                raise EngineError(
                    f"the server answered for {answer['model']} and {choice['prompt_token_ids']} where "
                    f"{body['model']} and {body['prompt']} were asked"
                )
            return read(choice)

        return list(self._requests.map(one, bodies))

    def _get(self, path: str) -> Any:
        return self._answer(path, self._call("GET", path))

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._answer(path, self._call("POST", path, body))

    def _answer(self, path: str, answer: httpx.Response) -> Any:
        if answer.status_code != 200:
            raise refused(path, answer)
        return answer.json() if answer.headers.get("content-type") == "application/json" else None

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            ended = self._process and self._process.ended()
            raise EngineError(ended or f"the vLLM server at {self.url} does not answer {path}: {error!r}") from error


def _completion_request(served: str, tokens: Sequence[int]) -> dict[str, Any]:
    """What every request says of itself: a model's generation_config.json would fill in what it leaves out."""
    return {
        "model": served,
        "prompt": list(tokens),
        "return_token_ids": True,
        "add_special_tokens": False,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def _completion(choice: Mapping[str, Any]) -> Completion:
    if choice["finish_reason"] not in ("stop", "length"):
        raise EngineError(f"the server broke a completion off: {choice['finish_reason']}")
    return Completion(
        token_ids=[int(token) for token in choice["token_ids"]],
        log_probs=[float(log_prob) for log_prob in choice["logprobs"]["token_logprobs"]],
        finish_reason=str(choice["finish_reason"]),
        text=str(choice["text"]),
    )


def _scores(choice: Mapping[str, Any]) -> list[float]:
    pairs = zip(choice["prompt_logprobs"][1:], choice["prompt_token_ids"][1:], strict=True)
    return [0.0, *(float(entry[str(token)]["logprob"]) for entry, token in pairs)]
