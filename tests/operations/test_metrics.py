"""`/metrics` over a real ledger: who may read it, what it says, and that it goes on while the database is away."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from coordinator.app import create_app
from coordinator.metrics import collector, endpoint, standing
from coordinator.operations import numbers
from coordinator.storage.database import connect
from tests.api.ledger import Api, Ledger, ok, refused

Samples = dict[tuple[str, tuple[str, ...]], float]


async def scrape(api: Api, who: str | None = "admin") -> Samples:
    """Each sample's value, by its name and its labels' values in the order of their names."""
    answer = await api.http.get("/metrics", headers={"authorization": f"Bearer {api.secrets.get(who or '', who)}"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def reader_of(api: Api) -> standing.Standing:
    """The background reader of the app; its next reading is not waited for."""
    found: standing.Standing = api.app.state.standing
    return found


async def test_what_a_run_does_is_counted(ledger: Ledger) -> None:
    api = ledger.api
    await reader_of(api).read()
    await ledger.group("g")
    await ledger.group("h")
    await ledger.submit(ledger.rollout("x", "x", version=7), ledger.rollout("y", "y", worker_id="other"))
    ok(await ledger.open())
    assert await ledger.reserve("g:0", "g:1", shift=0.05) == ["reserved", "reserved"]
    assert await ledger.reserve("h:0", "h:1", shift=0.9) == ["policy_drift", "policy_drift"]
    ok(await ledger.commit())
    await ledger.publish(1, 0)
    ok(await ledger.activation(1))
    loading = {"incarnation": "w-1", "version": 1, "stage": "loading"}
    ok(await ledger.call("POST", "/workers/w/stage", loading))
    await reader_of(api).read()
    told = await scrape(api)
    assert told["coordinator_arrivals_total", ("", "run", "generated", "accepted")] == 4
    assert told["coordinator_arrivals_total", ("policy_unknown", "run", "quarantined", "accepted")] == 1
    assert told["coordinator_rewards_total", ("run", "stored")] == 4
    assert told["coordinator_reservations_total", ("run", "reserved", "reserved")] == 2
    assert told["coordinator_reservations_total", ("run", "quarantined", "policy_drift")] == 2
    assert told["coordinator_reserve_lag_versions_bucket", ("0.0", "run")] == 4
    assert told["coordinator_reserve_drift_nats_bucket", ("0.07", "run")] == 2
    assert told["coordinator_reserve_drift_nats_count", ("run",)] == 4
    assert told["coordinator_requests_total", ("reserve_rollouts", "200")] == 2
    assert told["coordinator_request_seconds_count", ("reserve_rollouts",)] == 2
    assert told["coordinator_rollouts", ("run", "consumed")] == 2
    assert told["coordinator_rollouts", ("run", "quarantined")] >= 3
    assert told["coordinator_workers", ("live", "run")] == 1
    assert told["coordinator_activation_workers", ("missing", "run")] == 1
    assert told["coordinator_activation_open_seconds", ("run",)] >= 0
    assert told["coordinator_events_total", ("update.committed", "run")] == 1
    assert told["coordinator_events_total", ("update.expired", "run")] == 0
    assert told["coordinator_database_up", ()] == 1
    assert told["coordinator_active_version", ("run",)] == 0

    await ledger.ack("w", 1)
    await reader_of(api).read()
    told = await scrape(api)
    assert told["coordinator_activation_seconds_count", ("succeeded", "run")] == 1
    assert told["coordinator_activation_stage_seconds_count", ("run", "loading")] == 1
    assert ("coordinator_activation_open_seconds", ("run",)) not in told
    assert told["coordinator_active_version", ("run",)] == 1
    page = (await api.http.get("/metrics", headers={"authorization": f"Bearer {api.secrets['admin']}"})).text
    command = [Path(sys.prefix) / "bin" / "promtool", "check", "metrics"]
    done = await asyncio.to_thread(subprocess.run, command, input=page, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


async def test_who_may_read_them_and_in_which_format(ledger: Ledger, tmp_path: Path) -> None:
    api = ledger.api
    refused(await api.http.get("/metrics"), 401, "unauthenticated")
    refused(await api.http.get("/metrics", headers={"authorization": "Bearer wrong"}), 401, "unauthenticated")
    await api.token("eye", "viewer")
    await api.token("bound", "viewer", "run")
    assert ("coordinator_requests_in_flight", ()) in await scrape(api, "eye")
    bound = {"authorization": f"Bearer {api.secrets['bound']}"}
    refused(await api.http.get("/metrics", headers=bound), 403, "forbidden")
    accept = {"authorization": f"Bearer {api.secrets['eye']}", "accept": "application/openmetrics-text; version=1.0.0"}
    answer = await api.http.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert any(family.name == "coordinator_requests" for family in openmetrics(answer.text))

    other = create_app(connect("postgresql://nobody@127.0.0.1:1/none"), tmp_path / "other", metrics_open=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=other), base_url="http://test") as http:
        assert (await http.get("/metrics")).status_code == 200


async def test_they_are_there_while_the_database_is_away(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has read them before reads on; nobody else gets in."""
    await api.token("eye", "viewer")
    await api.token("late", "viewer")
    await scrape(api, "eye")

    async def away(*_: object) -> None:
        raise ConnectionRefusedError("the database is away")

    await reader_of(api).read()
    monkeypatch.setattr(api.database, "read", away)
    monkeypatch.setattr(endpoint, "CHECK_SECONDS", 0.0)
    with pytest.raises(ConnectionRefusedError):
        await reader_of(api).read()
    assert (await scrape(api, "eye"))["coordinator_database_up", ()] == 0
    late = {"authorization": f"Bearer {api.secrets['late']}"}
    refused(await api.http.get("/metrics", headers=late), 503, "unavailable")


async def test_runs_beyond_the_cap_make_room_for_each_other(ledger: Ledger) -> None:
    counted = ledger.api.app.state.numbers
    for n in range(numbers.MOST_RUNS + 5):
        counted.reserved(f"run-{n}", [])
        counted._arrivals.labels(f"run-{n}", "accepted", "generated", "").inc()
    runs = {
        sample.labels["run"]
        for metric in counted.registry.collect()
        if metric.name == "coordinator_arrivals"
        for sample in metric.samples
    }
    assert len(runs) == numbers.MOST_RUNS
    assert "run-0" not in runs and f"run-{numbers.MOST_RUNS + 4}" in runs


async def test_the_store_and_its_disk_are_measured(api: Api, tmp_path: Path) -> None:
    (tmp_path / "store" / "ab").mkdir(parents=True)
    (tmp_path / "store" / "ab" / "file").write_bytes(b"x" * 1000)
    space = await asyncio.to_thread(collector.measure, tmp_path / "store")
    assert (
        space.used == 1000
        and 0 < space.free <= space.total == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    )
