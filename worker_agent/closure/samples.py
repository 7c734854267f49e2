"""The arithmetic that is asked and that is taught, and how a model's own chat template writes it down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker_agent.closure.profile import ClosureError

TASKS = ("81-47", "36+27", "52-19", "14+58", "63-25", "45+38", "90-34", "27+16")
"""What the trajectories answer: one each, named by its task."""

TAUGHT = (("24+37", "61"), ("75-28", "47"), ("46+19", "65"), ("83-56", "27"))
"""What the one update is made on, with the right answers. None of it is among `TASKS`."""

_EXAMPLES = (("40-16", "24"), ("12+31", "43"), ("58-22", "36"))


class Chat:
    """The tokenizer of a model folder: questions to prompts, answers to tokens.

    `end_token` is the one with which the chat template ends an answer; a converted tokenizer may name another as its
    end of sequence.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        task_id, answer = TAUGHT[0]
        self.end_token = self._answered(task_id, answer)[len(self.prompt(task_id)) + len(self._answer(answer))]

    def prompt(self, task_id: str) -> list[int]:
        """Token ids of the task's question, up to where the answer starts."""
        return self._rendered(messages(task_id), add_generation_prompt=True)

    def taught(self) -> tuple[list[list[int]], list[list[bool]]]:
        """Token ids of each taught question with its answer and the end token, and which of them are the answer's."""
        tokens, masks = [], []
        for task_id, answer in TAUGHT:
            prompt = self.prompt(task_id)
            answered = [*self._answer(answer), self.end_token]
            if self._answered(task_id, answer)[: len(prompt) + len(answered)] != [*prompt, *answered]:
                raise ClosureError(f"the chat template does not write {answer} to {task_id} as prompt, answer and end")
            tokens.append([*prompt, *answered])
            masks.append([False] * len(prompt) + [True] * len(answered))
        return tokens, masks

    def _answer(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False).input_ids]

    def _answered(self, task_id: str, answer: str) -> list[int]:
        chat = [*messages(task_id), {"role": "assistant", "content": answer}]
        return self._rendered(chat, add_generation_prompt=False)

    def _rendered(self, chat: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            chat, add_generation_prompt=add_generation_prompt, return_dict=True
        )
        return [int(token) for token in rendered["input_ids"]]


def messages(task_id: str) -> list[dict[str, str]]:
    """What a task asks, after worked examples: without them the small model now and then finds no end."""
    chat = [{"role": "system", "content": "Answer with the number only."}]
    for example, answer in _EXAMPLES:
        chat += [{"role": "user", "content": _question(example)}, {"role": "assistant", "content": answer}]
    return [*chat, {"role": "user", "content": _question(task_id)}]


def _question(task_id: str) -> str:
    return f"What is {task_id[:2]} {task_id[2]} {task_id[3:]}?"
