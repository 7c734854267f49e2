"""Calls over a coordinator that goes away and comes back."""

import threading
import time

import pytest

from coordinator.client import Coordinator, Refused, Unreachable
from tests.client.runs import new_run, new_worker, rewarded_groups
from tests.client.server_process import ServerProcess


def test_a_call_outlives_a_crash_and_restart_of_the_server(mortal_server: ServerProcess) -> None:
    with Coordinator(mortal_server.url, mortal_server.token) as coordinator:
        run = new_run(coordinator)
        rollouts = rewarded_groups(run, new_worker(run), 1)
        mortal_server.kill()
        back = threading.Timer(1.0, mortal_server.start)
        back.start()
        answer = run.submit(rollouts)  # sent while nothing listens
        back.join()
        assert {verdict.verdict for verdict in answer.verdicts} == {"duplicate"}
        assert run.counts().rollouts["rewarded"] == 2


def test_retries_end_after_the_time_that_was_set(mortal_server: ServerProcess) -> None:
    with Coordinator(mortal_server.url, mortal_server.token, retry_seconds=0.8) as coordinator:
        mortal_server.kill()
        started = time.monotonic()
        with pytest.raises(Unreachable, match=r"no answer after \d+ attempts"):
            coordinator.runs()
        assert time.monotonic() - started < 1.5


def test_a_refusal_is_not_tried_again(server: ServerProcess) -> None:
    with Coordinator(server.url, "wrong-token") as coordinator:
        started = time.monotonic()
        with pytest.raises(Refused) as caught:
            coordinator.runs()
        assert time.monotonic() - started < 2
    assert (caught.value.code, caught.value.status) == ("unauthenticated", 401)
    assert "Bearer" in caught.value.next_step


def test_another_server_at_the_address_is_said_to_be_one(server: ServerProcess) -> None:
    with Coordinator(f"{server.url}/elsewhere", server.token) as coordinator, pytest.raises(Refused) as caught:
        coordinator.runs()
    assert caught.value.status == 404
