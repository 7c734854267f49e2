"""Tasks of a service over HTTP, against a real one on loopback."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from tests.worker_agent.tasks.serving import GONE, Answer, Service
from tests.worker_agent.tasks.written import line
from worker_agent.tasks import Task, TaskError, TaskQueue, open_tasks

Serve = Callable[..., Service]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Service] = []

    def start(*answers: Answer) -> Service:
        made.append(Service(*answers))
        return made[-1]

    yield start
    for service in made:
        service.stop()


def tasks(*names: str) -> Answer:
    return Answer(200, "".join(line(task_id=name) + "\n" for name in names))


def everything(address: str, token: str | None = None) -> list[Task]:
    with open_tasks(address, "w1", token, 4) as found:
        return list(found)


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, object]]:
    return [record.__dict__["fields"] for record in caplog.records if record.message == name]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker_agent")


def test_it_is_asked_for_so_many_until_it_says_that_there_are_no_more(serve: Serve) -> None:
    service = serve(tasks("a", "b"), tasks("c"), GONE)
    found = everything(f"{service.address}?split=train", "secret")
    assert [t.task_id for t in found] == ["a", "b", "c"]
    assert {t.task_source for t in found} == {service.address.split("/")[2]}
    asked = service.asked[0]
    assert (asked.path, asked.authorization) == ("/tasks", "Bearer secret")
    assert asked.parameters == {"split": ["train"], "worker_id": ["w1"], "count": ["4"]}
    assert len(service.asked) == 3


def test_without_a_token_none_is_sent(serve: Serve) -> None:
    service = serve(GONE)
    assert everything(service.address) == []
    assert service.asked[0].authorization is None


@pytest.mark.parametrize("as_date", [False, True])
def test_none_now_is_asked_again_after_the_time_that_was_named(serve: Serve, as_date: bool) -> None:
    def named() -> str:
        return format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True) if as_date else "2"

    service = serve(Answer(204, headers={"Retry-After": named()}), tasks("a"), GONE)
    began = time.monotonic()
    assert [t.task_id for t in everything(service.address)] == ["a"]
    assert time.monotonic() - began > 1.5  # above the second that is waited unasked: a lower bound, whatever the load


@pytest.mark.parametrize("asked", ["Mon, 01 Jan 99999999999 00:00:00 GMT", "Mon, 01 Jan 2024 00:00:00 +99999999999999"])
def test_a_time_that_no_clock_has_is_none(serve: Serve, asked: str) -> None:
    service = serve(Answer(204, headers={"Retry-After": asked}), tasks("a"), GONE)
    assert [t.task_id for t in everything(service.address)] == ["a"]


def test_a_task_that_is_offered_again_is_not_made_twice(serve: Serve) -> None:
    service = serve(tasks("a", "a", "b"), tasks("a", "b"), tasks("b", "c"), GONE)
    assert [t.task_id for t in everything(service.address)] == ["a", "b", "c"]


def test_a_bad_line_is_left_out_and_said_once(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    body = f"{line(task_id='a')}\n\n<html>\n{line(task_id='../b')}\n{'[' * 100_000}\n{line(task_id='c')}\n"
    service = serve(Answer(200, body), GONE)
    assert [t.task_id for t in everything(service.address)] == ["a", "c"]
    (said,) = events(caplog, "tasks_refused")
    assert (said["lines"], said["address"]) == (3, service.address)
    assert str(said["first"]).startswith("line 3: ")


@pytest.mark.parametrize("status", [302, 401, 404, 429, 500, 503])
def test_no_refusal_ends_the_worker(serve: Serve, caplog: pytest.LogCaptureFixture, status: int) -> None:
    elsewhere = {"Location": "/elsewhere", "Retry-After": "0"}
    service = serve(Answer(status, "no", elsewhere), tasks("a"), GONE)
    assert [t.task_id for t in everything(service.address)] == ["a"]
    (away,) = events(caplog, "task_service_away")
    assert str(away["error"]).startswith(str(status))
    assert [a.path for a in service.asked] == ["/tasks"] * 3  # a redirection is not followed with the token
    assert len(events(caplog, "task_service_back")) == 1


def test_it_goes_away_and_comes_back(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    service = serve(tasks("a"), Answer(204, headers={"Retry-After": "0"}))
    with open_tasks(service.address, "w1", None, 4) as found:
        queue = TaskQueue(found, ahead=8)
        until(lambda: queue.first(4))
        service.stop()
        until(lambda: len(events(caplog, "task_service_away")) >= 2)
        pauses = [away["again_in_seconds"] for away in events(caplog, "task_service_away")]
        assert pauses[:2] == [1.0, 2.0]
        assert "ConnectError" in str(events(caplog, "task_service_away")[0]["error"])
        service.answers = [tasks("a", "b"), GONE]
        service.start()
        until(lambda: len(queue.first(4)) == 2)
        assert [t.task_id for t in queue.first(4)] == ["a", "b"]
        queue.done(queue.first(4))
        until(lambda: not queue.first(1) and queue.ended)


def test_an_iteration_ends_when_it_is_closed_while_nobody_answers(serve: Serve) -> None:
    service = serve(*[Answer(204, headers={"Retry-After": "600"})] * 2)
    found: list[Task] = []
    with open_tasks(service.address, "w1", None, 4) as source:
        reading = threading.Thread(target=lambda: found.extend(source))
        reading.start()
        until(lambda: service.asked)
    reading.join(30)
    assert (found, reading.is_alive()) == ([], False)


@pytest.mark.parametrize(
    ("address", "token", "said"),
    [
        ("http://me:pw@127.0.0.1/tasks", None, "no user or password in the address"),
        ("http:///tasks", None, "names no host"),
        ("http://127.0.0.1:port/tasks", None, "is no address"),
        ("http://127.0.0.1/tasks", "to\nken", "characters that no token has"),
    ],
)
def test_an_address_or_token_that_cannot_be_used_is_said_at_once(address: str, token: str | None, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        everything(address, token)


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.02)
