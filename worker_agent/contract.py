"""The generation contract that this worker fulfils, and whether it is the run's."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from coordinator.client import Run
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.runs import FirstPolicy, GenerationContract, RunView
from worker_agent.engines.engine import Engine, Sampling
from worker_agent.models import ModelIdentity


class ContractMismatch(Exception):
    """This worker would generate under another contract than the run's; the message names every field."""


class OfModel(TypedDict):
    """The fields of `CreateRun` that the model decides."""

    contract: GenerationContract
    vocab_size: int
    policy: FirstPolicy


def run_of(model: ModelIdentity, dtype: Literal["float32", "bfloat16", "float16", "float8"] = "float32") -> OfModel:
    """What a run on this model is created with: raw log-probs, temperature 1, nothing truncated."""
    return {
        "contract": GenerationContract(
            tokenizer_hash=model.tokenizer_hash,
            chat_template_hash=model.chat_template_hash,
            temperature=1.0,
            top_p=1.0,
            logprobs_mode="raw",
            dtype=dtype,
        ),
        "vocab_size": model.vocab_size,
        "policy": FirstPolicy(
            base_model=BaseModelIdentity(name=model.name, revision=model.revision, sha256=model.sha256)
        ),
    }


def generation_contract(engine: Engine, model: ModelIdentity, sampling: Sampling) -> GenerationContract:
    """The contract of what `engine` generates from `model` under `sampling`."""
    return GenerationContract.model_validate(
        {
            "tokenizer_hash": model.tokenizer_hash,
            "chat_template_hash": model.chat_template_hash,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "logprobs_mode": engine.logprobs_mode,
            "dtype": engine.dtype,
        }
    )


def run_sampling(view: RunView, max_tokens: int, stop: tuple[str, ...]) -> Sampling:
    """How the run wants tokens drawn; length and stop texts are the worker's own."""
    contract = view.contract
    return Sampling(
        temperature=contract.temperature,
        top_p=contract.top_p,
        top_k=contract.top_k,
        min_p=contract.min_p,
        max_tokens=max_tokens,
        stop=stop,
    )


def check_model(run: Run, view: RunView, model: ModelIdentity) -> None:
    """What can be compared without an engine, which may take minutes to start. Raises `ContractMismatch`."""
    ours = {"tokenizer_hash": model.tokenizer_hash, "chat_template_hash": model.chat_template_hash}
    _compare(run, view, ours, model)


def check_contract(run: Run, view: RunView, contract: GenerationContract, model: ModelIdentity) -> None:
    """Raises `ContractMismatch` unless contract, vocabulary and base model are the run's."""
    _compare(run, view, contract.model_dump(), model)


def _compare(run: Run, view: RunView, ours: dict[str, Any], model: ModelIdentity) -> None:
    theirs = view.contract.model_dump()
    first = run.policies()[0].base_model
    ours |= {"vocab_size": model.vocab_size, "base_model.sha256": model.sha256}
    theirs |= {"vocab_size": view.vocab_size, "base_model.sha256": first.sha256}
    differing = [
        f"{name}: the run has {theirs[name]}, this worker {ours[name]}" for name in ours if ours[name] != theirs[name]
    ]
    if differing:
        raise ContractMismatch(
            f"this worker does not fit run {view.run_id} (base model {first.name}, {first.revision}): "
            + "; ".join(differing)
            + ". Start it on the run's model and engine settings, or name another run."
        )
