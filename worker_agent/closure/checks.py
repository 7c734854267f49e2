"""The checks that need torch, on the CPU: `python -m worker_agent.closure.checks FIXTURE MODEL OUT`.

Loss, scoring positions and initialisation are checked on a tiny model of random weights, so that they do not wait for
the real one. FIXTURE and MODEL are "-" where there is none. OUT receives the list of `Check`s as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from worker_agent.closure.fixture import read_fixture
from worker_agent.closure.profile import LORA_ALPHA, LORA_RANK, SEED, TARGET_MODULES, ClosureError
from worker_agent.closure.samples import TASKS, Chat
from worker_agent.learner.learner import Learner
from worker_agent.models import tiny_qwen2

_TOLERANCE = 1e-4  # nats, float32 on one machine


@dataclass(frozen=True)
class Check:
    """What was looked at and what was found. `missing`: the model is not in the cache, which `run` can mend."""

    name: str
    ok: bool
    detail: str
    missing: bool = False


def check_tokenizer(fixture: Path, model: Path) -> str:
    """The model's tokenizer and template write the questions as the fixture has them."""
    chat = Chat(model)
    rollouts = read_fixture(fixture)[0].rollouts
    for rollout in rollouts:
        if list(rollout.token_ids[: rollout.prompt_tokens]) != chat.prompt(rollout.task_id):
            raise ClosureError(f"the question {rollout.task_id} is written otherwise than in the fixture")
        if rollout.token_ids[-1] != chat.end_token:
            raise ClosureError(f"the answer to {rollout.task_id} does not end with the token {chat.end_token}")
    if tuple(rollout.task_id for rollout in rollouts) != TASKS:
        raise ClosureError("the fixture answers other tasks")
    return f"{len(rollouts)} prompts as in the fixture, {sum(map(sum, chat.taught()[1]))} supervised tokens"


def check_loss(learner: Learner) -> str:
    """verl's supervised loss is the mean of -log-prob over the answer's tokens."""
    tokens, masks = _sequences()
    scored = np.concatenate(
        [row[np.asarray(mask)] for row, mask in zip(learner.log_probs(tokens, masks), masks, strict=True)]
    )
    expected, loss = float(-scored.mean()), learner.supervised_step(tokens, masks).loss
    if not abs(loss - expected) <= _TOLERANCE:
        raise ClosureError(f"the loss is {loss}, the mean of -log-prob {expected}")
    return f"{loss:.6f}, as by hand"


def check_positions(learner: Learner, model: Path) -> str:
    """The learner's log-prob at index i is that of token i given those before it, as the bare model has it."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens, masks = _sequences()
    bare = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    worst = 0.0
    for ids, mask, scored in zip(tokens, masks, learner.log_probs(tokens, masks), strict=True):
        with torch.no_grad():
            table = bare(torch.tensor([ids])).logits[0].log_softmax(-1)
        for index in np.flatnonzero(mask):
            worst = max(worst, abs(float(table[index - 1, ids[index]]) - float(scored[index])))
    if not worst <= _TOLERANCE:
        raise ClosureError(f"a log-prob is {worst} from that of the same token in the bare model")
    return f"largest difference {worst:.1e}"


def check_initialisation(first: Learner, second: Learner) -> str:
    """Two learners of one seed begin with the same adapter."""
    with tempfile.TemporaryDirectory() as scratch:
        exported = [
            {file.name: file.read_bytes() for file in learner.export_adapter(Path(scratch) / name, "tiny")}
            for name, learner in (("first", first), ("second", second))
        ]
    if exported[0] != exported[1]:
        raise ClosureError("two learners of one seed begin with different adapters")
    return f"seed {SEED} gives the same adapter twice"


def _sequences() -> tuple[list[list[int]], list[list[bool]]]:
    draw = np.random.default_rng(SEED)
    lengths = (9, 14, 11, 17)
    tokens = [draw.integers(3, 400, size=length).tolist() for length in lengths]
    return tokens, [[index >= 5 for index in range(length)] for length in lengths]


def _learner(model: Path) -> Learner:
    return Learner(
        model, lora_rank=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=TARGET_MODULES, seed=SEED, group_size=1
    )


def _checked(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except ClosureError as error:
        return Check(name, False, str(error))


def main() -> None:
    """Exit status 0 when all was checked, whatever was found."""
    fixture, model, out = sys.argv[1:]
    checks = []
    if "-" not in (fixture, model):
        checks.append(_checked("tokenizer", lambda: check_tokenizer(Path(fixture), Path(model))))
    with tempfile.TemporaryDirectory() as scratch:
        tiny = tiny_qwen2(Path(scratch) / "tiny")
        first, second = _learner(tiny), _learner(tiny)
        checks += [
            _checked("initialisation", lambda: check_initialisation(first, second)),
            _checked("positions", lambda: check_positions(second, tiny)),
            _checked("loss", lambda: check_loss(first)),
        ]
    Path(out).write_text(json.dumps([asdict(check) for check in checks]), encoding="utf-8")


if __name__ == "__main__":
    main()
