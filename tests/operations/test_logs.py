"""Lines of the log: what belongs to a request, what does not, and what is hidden."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import pytest

from coordinator.operations import logs
from coordinator.storage.changes import Changes
from coordinator.storage.watchers import Watchers


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("coordinator.test", logging.INFO, __file__, 1, message, args, None)


def scope(**ids: str) -> dict[str, object]:
    return {"state": {"request_id": "r-1"}, "path_params": ids}


async def test_what_outlives_a_request_is_not_said_to_be_its_own() -> None:
    told: list[object] = []

    async def ask(run_id: str) -> str:
        told.append(logs.CURRENT.get())
        return run_id

    watchers = Watchers(Changes(), ask)
    token = logs.CURRENT.set(scope(run_id="sums"))
    try:
        assert await watchers.answer("sums", lambda _: True, 0) == "sums"
    finally:
        logs.CURRENT.reset(token)
    assert told == [None]
    await asyncio.sleep(0)


def test_a_line_names_the_ids_that_are_ids() -> None:
    token = logs.CURRENT.set(scope(run_id="sums", update_id="step 1\nforged", rollout_id="rct_0a_secret", name="file"))
    try:
        line = json.loads(logs.JsonLines().format(record("said %s", "ünïcode\nline")))
        assert line["message"] == "said ünïcode\nline"
        assert (line["request_id"], line["run_id"], line["rollout_id"]) == ("r-1", "sums", "rct_0a_***")
        assert not {"update_id", "name"} & line.keys()
        text = logs.TextFormatter().format(record("said %s", "two\nlines"))
        assert text.endswith("info coordinator.test: said two lines request_id=r-1 run_id=sums rollout_id=rct_0a_***")
    finally:
        logs.CURRENT.reset(token)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer ***"),
        ("{'authorization': 'bearer abc'}", "{'authorization': 'bearer ***'}"),
        ("token rct_0123456789ab_x-y_z, next", "token rct_0123456789ab_***, next"),
        ("postgresql+asyncpg://me:pass%40word@db:5432/x", "postgresql+asyncpg://me:***@db:5432/x"),
        ("the word given-secret twice: given-secret", "the word *** twice: ***"),
        ("abc is too short to be one", "abc is too short to be one"),
    ],
)
def test_what_looks_like_a_secret_or_is_known_as_one_is_hidden(text: str, hidden: str) -> None:
    assert logs.Secrets(["given-secret", "abc"]).hide(text) == hidden


HOSTILE = "a\x1b[2Jb\x9b31mc\x07\x7f\u202e\ud800\n2030-01-01T00:00:00.000Z info coordinator.requests: forged"


def failed(message: str) -> logging.LogRecord:
    """A line with the trace of a failure that says this."""
    try:
        raise ValueError(message)
    except ValueError:
        return logging.LogRecord("coordinator.test", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())


def test_a_text_moves_no_cursor_and_forges_no_line() -> None:
    for line in (logs.TextFormatter().format(record("%s", HOSTILE)), logs.TextFormatter().format(failed(HOSTILE))):
        first, *trace = line.split("\n")
        assert all(part.isprintable() for part in (first, *trace))
        assert "\\x1b[2Jb\\x9b31mc\\x07\\x7f\\u202e\\ud800" in line
        assert all(part.startswith("  ") for part in trace)
    said, trace_lines = logs.JsonLines().format(record("%s", HOSTILE)), logs.JsonLines().format(failed(HOSTILE))
    assert json.loads(said)["message"] == HOSTILE
    assert HOSTILE in json.loads(trace_lines)["exc_info"]
    assert "\n" not in said + trace_lines


def test_a_secret_is_hidden_as_json_writes_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'pa"ss\\w\u00f6rd'
    monkeypatch.setattr(logs, "_secrets", logs.Secrets([secret]))
    assert json.loads(logs.JsonLines().format(record("it is %s", secret)))["message"] == "it is ***"
    assert logs.TextFormatter().format(record("it is %s", secret)).endswith("it is ***")
