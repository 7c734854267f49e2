"""Tasks of a service over HTTP, which may be away for a while."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from worker_agent.logs import event
from worker_agent.tasks.task import Task, TaskError, task_of_line

_TIMEOUT_SECONDS = 60.0
_NONE_NOW_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_SHORTEST_ASKED_SECONDS = 0.1
_LONGEST_ASKED_SECONDS = 3600.0


class TaskService:
    """Tasks of `GET address?worker_id=..&count=..`, `count` at a time, each group once.

    200 has tasks as JSON lines, 204 none now (asked again after its Retry-After, else after a second), 410 is the end.
    Anything else, and silence, is logged and tried again, with a pause that grows up to half a minute: a service that
    is away ends no worker. A line that is no task is logged and left out. The service should go on offering a task
    until its rollouts are there: an answer may be lost on its way, and so may a worker.
    """

    def __init__(self, address: str, worker_id: str, token: str | None, count: int) -> None:
        try:
            url = httpx.URL(address)
        except httpx.InvalidURL as error:
            raise TaskError(f"tasks: {address} is no address: {error}") from error
        if url.userinfo:
            raise TaskError("tasks: no user or password in the address of a task service, which is logged: tasks_token")
        if not url.host:
            raise TaskError(f"tasks: {address} names no host")
        self._url = url.copy_merge_params({"worker_id": worker_id, "count": count})
        self._address = address
        self._source = re.sub(r"[^A-Za-z0-9._:-]", "-", url.netloc.decode()).strip("-:")
        self._headers = {"Accept": "application/jsonl"}
        if token is not None:
            if not token.isascii() or not token.isprintable():
                raise TaskError("tasks: the token for the task service holds characters that no token has")
            self._headers["Authorization"] = f"Bearer {token}"
        self._closed = threading.Event()
        self._seen: set[str] = set()

    def close(self) -> None:
        """End the iteration at its next turn."""
        self._closed.set()

    def __iter__(self) -> Iterator[Task]:
        with httpx.Client(headers=self._headers, timeout=_TIMEOUT_SECONDS) as http:
            yield from self._ask(http)

    def _ask(self, http: httpx.Client) -> Iterator[Task]:
        failed = 0
        while not self._closed.is_set():
            try:
                answer = http.get(self._url)
            except httpx.HTTPError as error:
                failed += 1
                self._away(f"{type(error).__name__}: {error}", failed, None)
                continue
            asked = _asked_seconds(answer)
            if answer.status_code == httpx.codes.GONE:
                event("tasks_gone", address=self._address)
                return
            if answer.status_code not in (httpx.codes.OK, httpx.codes.NO_CONTENT):
                failed += 1
                self._away(f"{answer.status_code} {answer.reason_phrase}", failed, asked)
                continue
            if failed:
                event("task_service_back", address=self._address)
            failed = 0
            new = [task for task in self._tasks(answer.content) if task.group_id not in self._seen]
            yield from self._once(new)
            if not new:
                self._closed.wait(_NONE_NOW_SECONDS if asked is None else asked)

    def _tasks(self, content: bytes) -> Iterator[Task]:
        refused: list[str] = []
        for number, line in enumerate(content.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                yield task_of_line(line, f"line {number}", self._source)
            except TaskError as error:
                refused.append(str(error))
        if refused:
            # One line of log, whatever came: an address may turn out to be a page of HTML.
            event("tasks_refused", level=logging.ERROR, address=self._address, lines=len(refused), first=refused[0])

    def _once(self, tasks: list[Task]) -> Iterator[Task]:
        for task in tasks:
            if task.group_id not in self._seen:  # twice in one answer
                self._seen.add(task.group_id)
                yield task

    def _away(self, why: str, failed: int, asked: float | None) -> None:
        pause = min(_LONGEST_PAUSE_SECONDS, _NONE_NOW_SECONDS * 2 ** min(failed - 1, 10)) if asked is None else asked
        event("task_service_away", level=logging.WARNING, address=self._address, error=why, again_in_seconds=pause)
        self._closed.wait(pause)


def _asked_seconds(answer: httpx.Response) -> float | None:
    """Retry-After in seconds, between a tenth of one and an hour; None where there is none, or one that is none."""
    asked = answer.headers.get("Retry-After", "").strip()
    if asked.isdecimal():
        seconds = float(asked[:9])
    else:
        try:
            until = parsedate_to_datetime(asked)
        except (ValueError, OverflowError):
            return None
        seconds = (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(_LONGEST_ASKED_SECONDS, max(_SHORTEST_ASKED_SECONDS, seconds))
