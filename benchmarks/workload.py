"""The rollouts that every part of the benchmark sends, made before any clock starts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.rules.manifest import artifact_hash
from coordinator.wire.columns import Ragged, RolloutColumns, encode_rollouts, nulls_for_nan
from coordinator.wire.policies import BaseModelIdentity
from coordinator.wire.rollouts import Generation, Reward, RolloutIdentity, Span
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract, RunSettings

GROUP_SIZE = 8
VOCAB_SIZE = 151_643
WORKER, INCARNATION = "bench-worker", "bench-worker-1"
RULESET_ID, RULESET_HASH = "bench-rules", "d" * 64
BASE = BaseModelIdentity(name="bench", revision="1", sha256="c" * 64)
ARTIFACT_HASH = artifact_hash("base", BASE.model_dump(), [])
CONTRACT = GenerationContract(
    tokenizer_hash="a" * 64,
    chat_template_hash="b" * 64,
    temperature=1.0,
    top_p=1.0,
    logprobs_mode="raw",
    dtype="bfloat16",
)


def new_run(run_id: str) -> CreateRun:
    """A run with the usual gates: drift is measured, a lease outlives every phase."""
    return CreateRun(
        run_id=run_id,
        settings=RunSettings(group_size=GROUP_SIZE, lost_after_seconds=3600, update_lease_seconds=600),
        contract=CONTRACT,
        vocab_size=VOCAB_SIZE,
        policy=FirstPolicy(base_model=BASE),
    )


def rollout_id(number: int) -> str:
    """The id of a rollout by its number; its group is number // GROUP_SIZE."""
    return f"rollout-{number // GROUP_SIZE:06d}:{number % GROUP_SIZE}"


@dataclass(frozen=True)
class Share:
    """The rollouts of one producer: whole groups, in order; `tokens` to each, a quarter of them prompt."""

    numbers: range
    tokens: int

    def batches(self, size: int) -> list[range]:
        """The numbers, `size` to a call; the last call may be smaller."""
        return [self.numbers[at : at + size] for at in range(0, len(self.numbers), size)]

    def columns(self, numbers: range) -> RolloutColumns:
        """These rollouts as columns: the same for the same numbers, whoever makes them."""
        random = np.random.default_rng(numbers.start)
        offsets = np.arange(len(numbers) + 1, dtype=np.int64) * self.tokens
        prompt = self.tokens // 4
        mask = np.tile(np.arange(self.tokens) >= prompt, len(numbers))
        log_probs = np.where(mask, -random.exponential(0.5, mask.size), np.nan).astype(np.float32)
        identities = [
            RolloutIdentity(
                rollout_id=rollout_id(number),
                task_id=f"task-{number // GROUP_SIZE:06d}",
                task_source="bench",
                group_id=f"group-{number // GROUP_SIZE:06d}",
                sample_index=number % GROUP_SIZE,
                spans=(Span(version=0, artifact_hash=ARTIFACT_HASH, start=prompt, end=self.tokens),),
                span_source="engine",
                worker_id=WORKER,
                incarnation=INCARNATION,
                contract=CONTRACT,
                generation=Generation(seed=number, max_tokens=self.tokens - prompt, finish_reason="stop"),
            )
            for number in numbers
        ]
        return RolloutColumns(
            list(identities),
            [identity.rollout_id for identity in identities],
            Ragged(random.integers(0, VOCAB_SIZE, mask.size), offsets),
            Ragged(mask, offsets),
            Ragged(log_probs, offsets),
            [None] * len(numbers),
        )

    def arrow(self, size: int) -> list[bytes]:
        """One Arrow stream a call."""
        return [encode_rollouts(self.columns(numbers)) for numbers in self.batches(size)]

    def json(self, size: int) -> list[bytes]:
        """One JSON body a call."""
        return [_json(self.columns(numbers)) for numbers in self.batches(size)]

    def rewards(self, size: int) -> list[list[Reward]]:
        """Rewards that differ within each group, `size` to a call."""
        return [[_reward(number) for number in numbers] for numbers in self.batches(size)]


def shares(rollouts: int, tokens: int, producers: int) -> list[Share]:
    """Whole groups, spread evenly over the producers."""
    bounds = [GROUP_SIZE * (rollouts // GROUP_SIZE * k // producers) for k in range(producers + 1)]
    return [Share(range(first, end), tokens) for first, end in itertools.pairwise(bounds)]


def current_log_probs(behavior: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What a trainer would send: float64, a little off the behaviour's, as a bf16 engine is; NaN stays where masked."""
    return [row.astype(np.float64) + 0.01 for row in behavior]


def require(verdicts: Iterable[str], wanted: str) -> None:
    """RuntimeError unless every verdict is the one that a benchmark of good rollouts must get."""
    got = set(verdicts)
    if got != {wanted}:
        raise RuntimeError(f"expected {wanted} for every rollout, got {', '.join(sorted(got)) or 'nothing'}")


def _reward(number: int) -> Reward:
    return Reward(
        rollout_id=rollout_id(number),
        status="ok",
        value=float(number % GROUP_SIZE),
        ruleset_id=RULESET_ID,
        ruleset_hash=RULESET_HASH,
    )


def _json(columns: RolloutColumns) -> bytes:
    items = []
    for place, identity in enumerate(columns.identities):
        assert isinstance(identity, RolloutIdentity)  # this module made them
        items.append(
            identity.model_dump(mode="json", exclude_none=True)
            | {
                "token_ids": columns.token_ids[place].tolist(),
                "action_mask": columns.action_mask[place].tolist(),
                "behavior_log_probs": nulls_for_nan(columns.behavior_log_probs[place]),
            }
        )
    return json.dumps({"rollouts": items}, separators=(",", ":")).encode()
