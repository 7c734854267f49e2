"""One task, and how it is read from what a source gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from coordinator.wire.base import Identifier


class TaskError(Exception):
    """Tasks that cannot be had or used; the message names the source and the line."""


def _encodable(text: str) -> str:
    text.encode()  # half a surrogate pair is no text
    return text


Encodable = Annotated[str, AfterValidator(_encodable)]


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Encodable
    content: Encodable


class Task(BaseModel):
    """A prompt, answered by one group. `group_id` is the task's id and `task_source` the source's name, unless
    given.

    Rollout ids are made from `group_id`, which leaves it 180 of an id's 200 characters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    task_id: Identifier
    group_id: Identifier = Field(max_length=180)
    messages: tuple[Message, ...] = Field(min_length=1)
    task_source: Identifier


def task_of_line(line: str | bytes, where: str, source: str) -> Task:
    """The task in one line of JSON. Raises `TaskError` naming `where` the line stands."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise TaskError(f"{where}: {error}") from error
    if not isinstance(fields, dict):
        raise TaskError(f"{where}: a task is a JSON object")
    return task_of_fields(fields, where, source)


def task_of_fields(fields: Mapping[str, object], where: str, source: str) -> Task:
    """The task with these fields, what may be left out filled in. Raises `TaskError` naming `where` they come from."""
    try:
        return Task.model_validate({"group_id": fields.get("task_id"), "task_source": source} | dict(fields))
    except ValidationError as error:
        raise TaskError(f"{where}: {error}") from error
