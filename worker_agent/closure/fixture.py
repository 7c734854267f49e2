"""The eight rollouts whose log-probs are followed: made once by version 0, and never again."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from worker_agent.closure.profile import MAX_ANSWER_TOKENS, SEED, ClosureError, Profile
from worker_agent.closure.samples import TASKS, Chat
from worker_agent.engines.engine import Engine, Policy, Prompt, Sampling, generate
from worker_agent.models import ModelIdentity


class FixtureRollout(BaseModel):
    """One rollout. `token_ids` is prompt and answer, the answer's end token included.

    `behavior_log_probs[i]` scores answer token i, which is `token_ids[prompt_tokens + i]`, as the engine gave it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout_id: str
    task_id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    behavior_log_probs: tuple[float, ...]
    text: str

    @property
    def action_mask(self) -> list[bool]:
        """Per token, whether it belongs to the answer."""
        return [index >= self.prompt_tokens for index in range(len(self.token_ids))]


class Fixture(BaseModel):
    """The rollouts of one model, and what they were made with: temperature 1, log-probs before any truncation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    revision: str
    model_sha256: str
    tokenizer_hash: str
    chat_template_hash: str
    engine: str
    engine_version: str
    dtype: str
    seed: int
    max_tokens: int
    rollouts: tuple[FixtureRollout, ...]


def fixture_path(profile: Profile, data: Path) -> Path | None:
    """The fixture that comes with this package, else the one that was made below `data`; None: there is none yet."""
    packaged = Path(str(files("worker_agent.closure").joinpath("fixtures", f"{profile.name}.json")))
    return next((path for path in (packaged, made_path(profile, data)) if path.is_file()), None)


def made_path(profile: Profile, data: Path) -> Path:
    """Where a fixture of this model is kept that does not come with the package."""
    return data / "fixtures" / f"{profile.name}.json"


def read_fixture(path: Path) -> tuple[Fixture, str]:
    """A fixture and the sha256 of its file. Raises `ClosureError` for what is none."""
    content = path.read_bytes()
    try:
        fixture = Fixture.model_validate_json(content)
    except ValidationError as error:
        raise ClosureError(f"{path} is no fixture: {error}") from error
    for rollout in fixture.rollouts:
        if not 0 < rollout.prompt_tokens == len(rollout.token_ids) - len(rollout.behavior_log_probs):
            raise ClosureError(f"{path}: the tokens and log-probs of {rollout.rollout_id} do not fit together")
    return fixture, hashlib.sha256(content).hexdigest()


def misfit(fixture: Fixture, model: ModelIdentity) -> str | None:
    """Why these rollouts are not of this model; None: they are."""
    theirs = (fixture.model_sha256, fixture.tokenizer_hash, fixture.chat_template_hash)
    ours = (model.sha256, model.tokenizer_hash, model.chat_template_hash)
    names = ("weights", "tokenizer", "chat template")
    differing = [
        f"{name}: {a[:12]} there, {b[:12]} here" for name, a, b in zip(names, theirs, ours, strict=True) if a != b
    ]
    return f"the fixture was made with another model ({'; '.join(differing)})" if differing else None


def make_fixture(engine: Engine, model: ModelIdentity, chat: Chat) -> Fixture:
    """The first answer of the base model to every task, whatever it says.

    Raises `ClosureError` if an answer has no end within its tokens, since what is measured is whole answers.
    """
    base = Policy("closure-fixture", 0, model.sha256, "base", None)
    prompts = [Prompt(tuple(chat.prompt(task)), SEED + index, 1) for index, task in enumerate(TASKS)]
    answers = generate(engine, base, prompts, Sampling(max_tokens=MAX_ANSWER_TOKENS))
    rollouts = []
    for task, prompt, (answer,) in zip(TASKS, prompts, answers, strict=True):
        if answer.token_ids[-1] != chat.end_token:
            raise ClosureError(f"the answer to {task} did not end within {MAX_ANSWER_TOKENS} tokens: {answer.text!r}")
        rollouts.append(
            FixtureRollout(
                rollout_id=f"{task}:0.0",
                task_id=task,
                prompt_tokens=len(prompt.token_ids),
                token_ids=(*prompt.token_ids, *answer.token_ids),
                behavior_log_probs=tuple(answer.log_probs),
                text=answer.text,
            )
        )
    return Fixture(
        model=model.name,
        revision=model.revision,
        model_sha256=model.sha256,
        tokenizer_hash=model.tokenizer_hash,
        chat_template_hash=model.chat_template_hash,
        engine=engine.name,
        engine_version=engine.version,
        dtype=engine.dtype,
        seed=SEED,
        max_tokens=MAX_ANSWER_TOKENS,
        rollouts=tuple(rollouts),
    )
