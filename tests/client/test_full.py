"""Arrivals at a coordinator whose storage is full: both clients wait as long as it says, within their time."""

import pytest

from coordinator.client import AsyncCoordinator, Coordinator, Refused
from tests.client.relay import Relay
from tests.client.runs import group, new_run, new_worker
from tests.client.server_process import ServerProcess


def test_an_arrival_waits_what_it_is_told_while_the_storage_is_full(
    coordinator: Coordinator, server: ServerProcess
) -> None:
    run = new_run(coordinator)
    rollouts = group(new_worker(run), run.view().active, "g")
    with Relay(server.url) as relay, Coordinator(relay.url, server.token) as client:
        relay.full_for = 2
        answer = client.run(run.id).submit(rollouts)
    assert {verdict.verdict for verdict in answer.verdicts} == {"accepted"}
    first, second, third = relay.asked_at
    assert second - first >= 1
    assert third - second >= 1


def test_a_storage_that_stays_full_is_a_refusal(coordinator: Coordinator, server: ServerProcess) -> None:
    run = new_run(coordinator)
    rollouts = group(new_worker(run), run.view().active, "g")
    with Relay(server.url) as relay, Coordinator(relay.url, server.token, retry_seconds=2.5) as client:
        relay.full_for = 100
        with pytest.raises(Refused) as caught:
            client.run(run.id).submit(rollouts)
        assert (caught.value.code, caught.value.status, len(relay.asked_at)) == ("storage_full", 429, 3)
        relay.retry_after = 3600  # beyond the time for retries: nothing is gained by waiting
        with pytest.raises(Refused):
            client.run(run.id).submit(rollouts)
        assert len(relay.asked_at) == 4


async def test_the_async_client_waits_likewise(coordinator: Coordinator, server: ServerProcess) -> None:
    run = new_run(coordinator)
    rollouts = group(new_worker(run), run.view().active, "g")
    with Relay(server.url) as relay:
        async with AsyncCoordinator(relay.url, server.token, retry_seconds=5) as client:
            relay.full_for = 1
            answer = await client.run(run.id).submit(rollouts)
    assert {verdict.verdict for verdict in answer.verdicts} == {"accepted"}
    first, second = relay.asked_at
    assert second - first >= 1
