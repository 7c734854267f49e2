"""What the agent asks of an inference engine, and the values that pass between the two.

Log-probs are natural logarithms, one per token; lengths are in tokens.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coordinator.wire.workers import WeightDigest


class EngineError(Exception):
    """The engine did not do what it was asked; the message says why and what to do."""


@dataclass(frozen=True)
class Policy:
    """One policy version. `folder` holds its verified files; None means the base model itself."""

    run_id: str
    version: int
    artifact_hash: str
    kind: str
    folder: Path | None

    @property
    def key(self) -> tuple[str, int, str]:
        """Run, version and hash: what tells policies apart."""
        return self.run_id, self.version, self.artifact_hash


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `top_k` 0 is off, `temperature` 0 is greedy, a `stop` text ends a completion."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt to be completed `samples` times, all of it reproducible from `seed`."""

    token_ids: tuple[int, ...]
    seed: int
    samples: int


@dataclass(frozen=True)
class Request:
    """One completion to be made, of at most `max_tokens`. `request_id` is its own among those in flight."""

    request_id: str
    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    """One completion. `log_probs[i]` scores `token_ids[i]`; an end-of-sequence token that was drawn is
    included.

    `finish_reason` is "stop", "length", or "abort" for one that was interrupted: it may have no token at all. `text`
    is the decoded completion without the stop text and special tokens.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    text: str


@dataclass(frozen=True)
class LoadReport:
    """What an engine serves after a load, as it was found there.

    `digest` is of the weights in the engine's memory, None where it cannot give one (the base model).
    """

    served_version: int
    served_hash: str
    caches_reset: tuple[str, ...]
    digest: WeightDigest | None
    seconds: float


class Engine(Protocol):
    """An inference engine. `logprobs_mode`: "raw" (before temperature and truncation) or "processed".

    `kinds` are the kinds of policies that it can load: "base", "lora", "full". `load`, `score`, `unload` and `release`
    raise `EngineError` while requests are in flight. One thread at a time uses an engine.
    """

    name: str
    version: str
    kinds: tuple[str, ...]
    logprobs_mode: str
    dtype: str

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat (messages of `role` and `content`), up to where the assistant's turn starts."""
        ...

    def load(self, policy: Policy) -> LoadReport:
        """Make `policy` available. What the report says was probed in the engine, not assumed.

        Raises `EngineError` if the files are unusable or the engine does not hold what they say; policies
        that were served before still are.
        """
        ...

    def begin(self, policy: Policy, requests: Sequence[Request], sampling: Sampling) -> None:
        """Start to complete `requests` with exactly `policy`, which must be loaded, and return at once.

        The bound on tokens is the request's, not the sampling's. Raises `EngineError`, and starts none of them, if
        the policy is not loaded or a request is refused on the spot; others of this engine may be in flight already.
        """
        ...

    def finished(self, wait_seconds: float) -> dict[str, "Completion | EngineError"]:
        """What has ended since the last call, by request; the engine may work only in this call.

        Returns when there is something, after `wait_seconds` without, and at once if nothing is in flight. A request
        that the engine refused or failed ends with its error.
        """
        ...

    def interrupt(self) -> dict[str, "Completion | EngineError"]:
        """End everything in flight. What was not finished comes with the tokens that it has, as "abort"."""
        ...

    def score(self, policy: Policy, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of every token given all before it, per sequence and of its length; index 0 is 0.0."""
        ...

    def unload(self, policy: Policy) -> None:
        """Forget `policy`. Nothing happens if it is not loaded."""
        ...

    def release(self) -> None:
        """Give the memory of weights and caches to others of the GPU, and refuse to load, generate or score with an
        `EngineError` until `resume`.

        Where the weights cannot leave, as on a CPU, only the refusal happens. Nothing happens the second time.
        """
        ...

    def resume(self) -> None:
        """Take the memory back: what was loaded is served again, caches are empty. Nothing happens if it has it."""
        ...

    def close(self) -> None:
        """Free what the engine holds. It serves nothing afterwards."""
        ...


def generate(engine: Engine, policy: Policy, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
    """Complete each prompt with exactly `policy`, which must be loaded: `samples` answers per prompt.

    Every sample has a random stream of its own. Raises `EngineError` for the first that the engine did not complete.
    """
    requests = [
        [
            Request(f"{number}/{index}", prompt.token_ids, sample_seed(prompt.seed, index), sampling.max_tokens)
            for index in range(prompt.samples)
        ]
        for number, prompt in enumerate(prompts)
    ]
    every = [request for samples in requests for request in samples]
    engine.begin(policy, every, sampling)
    done: dict[str, Completion] = {}
    while len(done) < len(every):
        for request_id, completion in engine.finished(1.0).items():
            if isinstance(completion, EngineError):
                engine.interrupt()
                raise completion
            done[request_id] = completion
    return [[done[request.request_id] for request in samples] for samples in requests]


def folder_of(policy: Policy, kinds: Sequence[str]) -> Path | None:
    """Where the policy's files are, None for the base model.

    Raises `EngineError` for a policy that is none of `kinds`, and for one whose folder does not fit its kind: nothing
    else may pass for what an engine serves.
    """
    if policy.kind in kinds and (policy.folder is None) == (policy.kind == "base"):
        return policy.folder
    takes = " and ".join("base without a folder" if kind == "base" else f"{kind} with a folder" for kind in kinds)
    raise EngineError(
        f"policy version {policy.version} is of kind {policy.kind} with {policy.folder or 'no folder'}: this engine "
        f"takes {takes}"
    )


def check_lengths(sequences: Sequence[Sequence[int]], longest: int) -> None:
    """Raises `EngineError` naming the first sequence that is empty or has more than `longest` tokens."""
    for index, tokens in enumerate(sequences):
        if not 0 < len(tokens) <= longest:
            raise EngineError(f"sequence {index} has {len(tokens)} tokens; this engine takes 1 to {longest}")


def sample_seed(seed: int, index: int) -> int:
    """The 63-bit random seed of sample `index` of a prompt seeded `seed`.

    Hashed, because engines that count up from the prompt's seed give neighbouring prompts the same random
    streams.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1
