"""A chat as the token ids that a model begins to answer from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worker_agent.engines.engine import EngineError


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of `messages` through the model's chat template, generation prompt included.

    Raises `EngineError` if the model has no template, and for a chat that its template or tokenizer does not take.
    """
    if not tokenizer.chat_template:
        raise EngineError("this model has no chat template: send token ids, or serve an instruct model")
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # a template is a program of the model's: it raises what it likes
        raise EngineError(f"the model's chat template refuses this chat: {error!r}") from error
    return [int(token) for token in rendered["input_ids"]]
