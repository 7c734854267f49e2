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
class Completion:
    """One completion. `log_probs[i]` scores `token_ids[i]`; an end-of-sequence token that was drawn is
    included.

    `finish_reason` is "stop" or "length". `text` is the decoded completion without the stop text and special
    tokens.
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

    `kinds` are the kinds of policies that it can load: "base", "lora", "full".
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

    def generate(self, policy: Policy, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """Complete each prompt with exactly `policy`, which must be loaded: `samples` answers per prompt."""
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
