"""Chats that a model's template or tokenizer does not take."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from worker_agent.engines.chat import render_chat
from worker_agent.engines.engine import EngineError

MESSAGES = [{"role": "user", "content": "2+3="}]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{", "TemplateSyntaxError"),
        ("", "no chat template"),
    ],
)
def test_what_a_template_raises_is_the_tasks_error(tiny_model: Path, template: str, said: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, local_files_only=True)
    assert render_chat(tokenizer, MESSAGES)
    tokenizer.chat_template = template
    with pytest.raises(EngineError, match=said):
        render_chat(tokenizer, MESSAGES)
