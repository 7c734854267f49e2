"""The reference: plain transformers and peft, one sequence at a time, nothing cached between calls.

Slow, and exact: a sample depends on its prompt, its seed and the policy alone. Other engines are measured against it.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from coordinator.wire.workers import WeightDigest
from worker_agent.engines.availability import Availability
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
    ADAPTER_WEIGHTS,
    AdapterError,
    digest_of_folder,
    lora_layout,
    tensors_digest,
)


class _Decoding:
    """A request in flight, with what was drawn for it so far."""

    def __init__(self, policy: Policy, request: Request, sampling: Sampling) -> None:
        self.policy = policy
        self.request = request
        self.sampling = sampling
        self.draw = torch.Generator().manual_seed(request.seed)
        self.past: Any = None
        self.step = list(request.token_ids)
        self.tokens: list[int] = []
        self.log_probs: list[float] = []


class TransformersEngine(Availability):
    """An `Engine` on transformers and peft.

    `model` is a model folder, `dtype` a torch dtype's name, `max_model_len` the longest prompt with its completion in
    tokens. Adapters lie on the base model, a policy of kind full is a model of its own; all that is loaded stays until
    it is unloaded. There is no prefix cache, so a load reports none as reset.
    """

    name = "transformers"
    kinds: tuple[str, ...] = ("base", "lora", "full")
    logprobs_mode = "raw"

    def __init__(self, model: Path, *, dtype: str = "float32", max_model_len: int = 128) -> None:
        self.version = str(transformers.__version__)
        self.dtype = dtype
        self._dtype = getattr(torch, dtype)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._max_model_len = max_model_len
        self._lock = threading.RLock()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._base: Any = self._read(model)
        self._base_digest = tensors_digest(_weights(self._base))
        self._adapters: dict[tuple[str, int, str], str] = {}
        self._models: dict[tuple[str, int, str], Any] = {}
        self._in_flight: list[_Decoding] = []
        self._end_tokens = _end_tokens(self._tokenizer, self._base)

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of `messages` through the model's chat template, generation prompt included.

        Raises `EngineError` if the model has no template, or one that refuses them.
        """
        self._check_open()
        return render_chat(self._tokenizer, messages)

    def load(self, policy: Policy) -> LoadReport:
        """Load a policy and compare what the model holds with the folder; see `Engine.load`.

        The digest of an adapter is over its matrices, that of another kind over all weights.
        """
        started = time.monotonic()
        with self._lock:
            self._check_idle()
            folder = folder_of(policy, self.kinds)
            if folder is None:
                held, layout = tensors_digest(_weights(self._base)), self._full_layout()
                if held != self._base_digest:
                    raise EngineError("the base model no longer has the weights of its start: restart the engine")
            elif policy.kind == "lora":
                held = self._load_adapter(policy, folder)
                layout = str(lora_layout(self.name, self.version, self.dtype))
            else:
                held, layout = self._load_model(policy, folder), self._full_layout()
            return LoadReport(
                served_version=policy.version,
                served_hash=policy.artifact_hash,
                caches_reset=(),
                digest=WeightDigest(layout=layout, registered=held, active=held),
                seconds=time.monotonic() - started,
            )

    def begin(self, policy: Policy, requests: Sequence[Request], sampling: Sampling) -> None:
        """See `Engine.begin`. The model works only in `finished`, on one request after the other.

        Raises `EngineError` if the policy is not loaded, if a prompt is empty or leaves no room for a token, and for
        sampling parameters or token ids out of range.
        """
        with self._lock:
            self._serving(policy)
            check_lengths([request.token_ids for request in requests], self._max_model_len - 1)
            self._check_tokens([request.token_ids for request in requests])
            for request in requests:
                _check_sampling(sampling, request.max_tokens)
            self._in_flight += [_Decoding(policy, request, sampling) for request in requests]

    def finished(self, wait_seconds: float) -> dict[str, Completion | EngineError]:
        """See `Engine.finished`."""
        until = time.monotonic() + wait_seconds
        with self._lock, torch.inference_mode():
            if not self._in_flight:
                return {}
            first = self._in_flight[0]
            model = self._serving(first.policy)
            while (completion := self._next_token(model, first)) is None:
                if time.monotonic() >= until:
                    return {}
            del self._in_flight[0]
            return {first.request.request_id: completion}

    def interrupt(self) -> dict[str, Completion | EngineError]:
        """See `Engine.interrupt`."""
        with self._lock:
            left, self._in_flight = self._in_flight, []
        return {
            one.request.request_id: Completion(one.tokens, one.log_probs, "abort", self._text(one.tokens))
            for one in left
        }

    def score(self, policy: Policy, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens under `policy`; see `Engine.score`.

        Raises `EngineError` if the policy is not loaded, if a sequence is empty or too long, and for a token id out of
        range.
        """
        with self._lock, torch.inference_mode():
            self._check_idle()
            model = self._serving(policy)
            check_lengths(sequences, self._max_model_len - 1)
            self._check_tokens(sequences)
            return [self._score(model, tokens) for tokens in sequences]

    def unload(self, policy: Policy) -> None:
        """Forget an adapter or a model; the base model stays. See `Engine.unload`."""
        with self._lock:
            self._check_idle()
            self._models.pop(policy.key, None)
            if (adapter := self._adapters.pop(policy.key, None)) is not None:
                self._remove(adapter)

    def release(self) -> None:
        """Move every model to the CPU's memory; see `Engine.release`."""
        with self._lock:
            if not self._released:
                self._check_idle()
                self._released = True
                self._move("cpu")

    def resume(self) -> None:
        """Move every model back; see `Engine.resume`."""
        with self._lock:
            if self._released and not self._closed:
                self._move(self._device)
                self._released = False

    def close(self) -> None:
        """Drop the models."""
        with self._lock:
            self._closed = True
            self._in_flight.clear()
            self._adapters.clear()
            self._models.clear()
            self._base = None

    def _move(self, device: str) -> None:
        for model in (self._base, *self._models.values()):
            model.to(device)
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _read(self, folder: Path) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=self._dtype, attn_implementation="eager", local_files_only=True
        )
        return model.to(self._device).eval().requires_grad_(False)

    def _load_adapter(self, policy: Policy, folder: Path) -> str:
        try:
            expected = digest_of_folder(folder, self.dtype)
        except AdapterError as error:
            raise EngineError(str(error)) from error
        adapter = self._adapters.setdefault(policy.key, f"adapter-{len(self._adapters)}-{time.monotonic_ns()}")
        try:
            if not any(adapter in layer.lora_A for _, layer in _lora_layers(self._base)):
                self._put(adapter, folder)
            held = self._held(adapter)
            if held != expected:
                raise EngineError(
                    f"this engine does not hold the adapter of version {policy.version} as its folder has it ({held}, "
                    f"expected {expected}); unloaded: load it again"
                )
        except EngineError:
            del self._adapters[policy.key]
            self._remove(adapter)
            raise
        return held

    def _put(self, adapter: str, folder: Path) -> None:
        try:
            config: Any = LoraConfig.from_pretrained(str(folder))
            config.inference_mode = True
            inject_adapter_in_model(config, self._base, adapter)
            del self._base.peft_config  # peft's own list, which it warns of: the layers say what is there
            weights = load_file(folder / ADAPTER_WEIGHTS)
        except (OSError, TypeError, ValueError, SafetensorError) as error:
            raise EngineError(f"peft cannot take the adapter in {folder}: {error}") from error
        for name, layer in _lora_layers(self._base):
            for matrix, modules in (("A", layer.lora_A), ("B", layer.lora_B)):
                if adapter not in modules:
                    continue
                key = f"base_model.model.{name}.lora_{matrix}.weight"
                found, place = weights.get(key), modules[adapter].weight
                if found is None or found.shape != place.shape:
                    raise EngineError(
                        f"the adapter in {folder} has {key} of shape {found if found is None else tuple(found.shape)} "
                        f"where the model needs {tuple(place.shape)}"
                    )
                modules[adapter].weight = torch.nn.Parameter(found.to(self._device, self._dtype), requires_grad=False)

    def _held(self, adapter: str) -> str:
        """Of the matrices that the forward pass multiplies with, B with the layer's own scaling."""
        return tensors_digest(
            (f"{name}.{matrix}", weight * layer.scaling[adapter] if matrix == "B" else weight)
            for name, layer in _lora_layers(self._base)
            if adapter in layer.lora_A
            for matrix, weight in (("A", layer.lora_A[adapter].weight), ("B", layer.lora_B[adapter].weight))
        )

    def _remove(self, adapter: str) -> None:
        for _, layer in _lora_layers(self._base):
            layer.set_adapter([], inference_mode=True)  # else peft makes another one active
            layer.delete_adapter(adapter)

    def _load_model(self, policy: Policy, folder: Path) -> str:
        expected = _digest_of_model_folder(folder, self._dtype)
        if policy.key not in self._models:
            try:
                self._models[policy.key] = self._read(folder)
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                raise EngineError(
                    f"transformers cannot load version {policy.version} from {folder}: {error}"
                ) from error
        held = tensors_digest(_weights(self._models[policy.key]))
        if held != expected:
            del self._models[policy.key]
            raise EngineError(
                f"this engine does not hold version {policy.version} as its folder has it ({held}, expected "
                f"{expected}); unloaded: load it again"
            )
        return held

    def _full_layout(self) -> str:
        return f"transformers-{self.version}/full/{self.dtype}/tp1"

    def _serving(self, policy: Policy) -> Any:
        """The model that is `policy`, with its adapter switched on and every other one off."""
        self._check_open()
        folder = folder_of(policy, self.kinds)
        adapter = self._adapters.get(policy.key)
        model = self._models.get(policy.key)
        if folder is not None and adapter is None and model is None:
            raise EngineError(f"policy version {policy.version} ({policy.artifact_hash}) is not loaded: load it first")
        if model is not None:
            return model
        for _, layer in _lora_layers(self._base):
            layer.enable_adapters(adapter is not None)
            if adapter is not None:
                layer.set_adapter(adapter, inference_mode=True)
        return self._base

    def _next_token(self, model: Any, one: _Decoding) -> Completion | None:
        """Draws a token; the completion if it was the last."""
        output = model(
            input_ids=torch.tensor([one.step], device=self._device), past_key_values=one.past, use_cache=True
        )
        one.past, logits = output.past_key_values, output.logits[0, -1].float().cpu()
        token = _draw(logits, one.sampling, one.draw)
        one.step = [token]
        one.tokens.append(token)
        one.log_probs.append(float(torch.log_softmax(logits, dim=-1)[token]))
        text = self._text(one.tokens)
        if token in self._end_tokens:
            return Completion(one.tokens, one.log_probs, "stop", text)
        if ends := [at for stop in one.sampling.stop if (at := text.find(stop)) >= 0]:
            return Completion(one.tokens, one.log_probs, "stop", text[: min(ends)])
        if len(one.tokens) == min(one.request.max_tokens, self._max_model_len - len(one.request.token_ids)):
            return Completion(one.tokens, one.log_probs, "length", text)
        return None

    def _text(self, tokens: list[int]) -> str:
        # Half a character at the end is no text yet; vLLM holds it back too.
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).rstrip("\ufffd")

    def _score(self, model: Any, tokens: Sequence[int]) -> list[float]:
        ids = torch.tensor([list(tokens)], device=self._device)
        log_probs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), dim=-1)
        return [0.0, *log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()]

    def _check_tokens(self, sequences: Sequence[Sequence[int]]) -> None:
        size = self._base.get_input_embeddings().num_embeddings
        for index, tokens in enumerate(sequences):
            if not all(0 <= token < size for token in tokens):
                raise EngineError(f"refused: sequence {index} has a token id outside 0 to {size - 1}")


def _check_sampling(sampling: Sampling, max_tokens: int) -> None:
    in_range = {
        "temperature": sampling.temperature >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "min_p": 0 <= sampling.min_p <= 1,
    }
    wrong = [f"{name} {getattr(sampling, name)}" for name, good in in_range.items() if not good]
    if max_tokens < 1:
        wrong.append(f"max_tokens {max_tokens}")
    if wrong:
        raise EngineError(f"refused: {', '.join(wrong)} out of range")


def _draw(logits: torch.Tensor, sampling: Sampling, draw: torch.Generator) -> int:
    """One token of float32 logits (vocabulary,): temperature, then min_p, top_k and top_p, as vLLM orders them."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits / sampling.temperature, dim=-1)
    probs = torch.where(probs < sampling.min_p * probs.max(), 0.0, probs)
    if sampling.top_k:
        probs = torch.where(probs < probs.topk(min(sampling.top_k, len(probs))).values[-1], 0.0, probs)
    if sampling.top_p < 1:
        ordered, order = (probs / probs.sum()).sort(descending=True)
        probs[order[ordered.cumsum(0) - ordered >= sampling.top_p]] = 0.0
    return int(torch.multinomial(probs, 1, generator=draw))


def _lora_layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's own weights by their names before peft wrapped them; a tied one once, under its first name."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


def _digest_of_model_folder(folder: Path, dtype: torch.dtype) -> str:
    """What a model of `dtype` must hold that was read from `folder`. Raises `EngineError`."""
    named: list[tuple[str, torch.Tensor]] = []
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                named += [(name, tensors.get_tensor(name).to(dtype)) for name in tensors.keys()]  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(f"model folder {folder} is not readable: {error}; download its files again") from error
    for name, tensor in named:
        if not torch.isfinite(tensor).all():
            raise EngineError(f"model folder {folder}: {name} is not finite")
    if config.get_text_config().tie_word_embeddings:
        named = [(name, tensor) for name, tensor in named if name != "lm_head.weight"]
    return tensors_digest(named)


def _end_tokens(tokenizer: Any, model: Any) -> frozenset[int]:
    of_generation = model.generation_config.eos_token_id
    several = of_generation if isinstance(of_generation, list) else [of_generation]
    return frozenset(token for token in (tokenizer.eos_token_id, *several) if token is not None)
