"""Statistics: what they count, and what they cost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.statistics import queries, service
from coordinator.wire.statistics import Statistics
from tests.api.ledger import Api, Ledger, ok, refused

ROWS = 100_000
"""Changes, reservations and rollouts of a run that is long, of which the window holds one in a hundred."""


async def statistics(ledger: Ledger, query: str = "") -> Statistics:
    return Statistics.model_validate(await ledger.get(f"/statistics{query}"))


def total(found: Statistics, field: str) -> int:
    return sum(getattr(bucket, field) for bucket in found.buckets)


async def test_flow_refusals_ages_and_distributions(api: Api) -> None:
    ledger = await Ledger.create(api, max_drift=0.2)
    await ledger.worker()
    used, drifted = await ledger.group("used"), await ledger.group("drifted")
    await ledger.submit(*(ledger.rollout(f"waiting:{i}", "waiting", i) for i in range(2)))
    ok(await ledger.open())
    assert set(await ledger.reserve(*used, shift=0.05)) == {"reserved"}
    assert set(await ledger.reserve(*drifted, shift=1.0)) == {"policy_drift"}
    found = await statistics(ledger, "?window_seconds=60&buckets=4")

    assert (len(found.buckets), found.bucket_seconds) == (4, 15.0)
    assert {name: total(found, name) for name in ("arrived", "rewarded", "reserved", "consumed", "quarantined")} == {
        "arrived": 6,
        "rewarded": 4,
        "reserved": 2,
        "consumed": 0,
        "quarantined": 2,
    }
    assert [(r.event, r.reason, r.rollouts) for r in found.refused] == [("quarantine", "policy_drift", 2)]
    assert {age.state: age.rollouts for age in found.ages} == {"generated": 2, "reserved": 2}
    assert all(0 <= age.median_seconds <= age.oldest_seconds for age in found.ages)
    (version,) = found.versions
    assert (version.version, version.arrived, version.judged) == (0, 6, 4)
    assert version.states == {"generated": 2, "reserved": 2, "quarantined": 2}
    assert version.lags == {"0": 4}
    assert version.drift_max == pytest.approx(1.0)
    # 0.05 lies in [0.04, 0.06), and 1.0 beyond twice the limit.
    assert {number: n for number, n in enumerate(version.drifts) if n} == {2: 2, 20: 2}
    assert found.drift_edges[10] == pytest.approx(found.max_drift)
    assert (found.lag_gate, found.drift_gate) == ("enforce", "enforce")

    worker = (await ledger.get("/workers"))["workers"][0]
    assert (worker["version"], worker["drift_rollouts"]) == (0, 4)
    assert worker["drift"] == pytest.approx((2 * 0.05 + 2 * 1.0) / 4)


async def test_what_was_sent_back_is_told_by_worker(api: Api) -> None:
    ledger = await Ledger.create(api)
    await ledger.worker()
    body = ledger.rollout("bad", "g", 0) | {"token_ids": [1, 2, 3, 4, 5, 1000]}
    assert [verdict["verdict"] for verdict in await ledger.submit(body)] == ["rejected"]
    (rejected,) = (await statistics(ledger)).rejected
    assert (rejected.worker_id, rejected.rollouts) == ("w", 1)
    assert "1000" in rejected.last_detail


async def test_one_read_serves_all_who_ask_at_once(api: Api) -> None:
    ledger = await Ledger.create(api)
    answers = await asyncio.gather(*(statistics(ledger) for _ in range(8)))
    assert len({answer.at for answer in answers}) == 1


async def test_many_different_windows_take_turns_and_have_a_bound() -> None:
    """One who asks for ever other windows must not hold the connections that the run needs."""
    under_way, most, release = 0, 0, asyncio.Event()

    async def measure(*_: object) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await release.wait()
        under_way -= 1

    recent = service.Recent(measure)
    allowed = service.AT_ONCE + service.MOST_WAITING
    asking = [asyncio.create_task(recent.get("run", 60 + n, 1)) for n in range(allowed + 5)]
    await asyncio.wait(asking[allowed:])
    assert {str(task.exception())[:11] for task in asking[allowed:]} == {"unavailable"}
    also = asyncio.create_task(recent.get("run", 60, 1))  # who asks for what is being measured is never refused
    release.set()
    await asyncio.gather(also, *asking[:allowed])
    assert most == service.AT_ONCE
    await recent.get("run", 1000, 1)


async def test_a_run_that_is_not_there_and_windows_out_of_range(api: Api) -> None:
    ledger = await Ledger.create(api)
    refused(await api.call("GET", "/runs/none/statistics"), 404, "run_unknown")
    refused(await api.call("GET", "/runs/none/statistics"), 404, "run_unknown")  # a failure is not kept
    for query in ("window_seconds=59", "window_seconds=86401", "buckets=0", "buckets=241"):
        refused(await ledger.call("GET", f"/statistics?{query}"), 422, "invalid_request")


async def test_a_window_that_holds_too_much_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = await Ledger.create(api)
    monkeypatch.setattr(service, "STATEMENT_MILLISECONDS", 50)
    async with api.database.engine.begin() as connection:
        await connection.execute(text("LOCK TABLE rollout_audit"))
        problem = refused(await ledger.call("GET", "/statistics"), 503, "unavailable")
    assert "shorter window" in problem["detail"]
    ok(await ledger.call("GET", "/statistics"))


HISTORY = (
    """
    INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, actor, at)
    SELECT :run_no, CAST(n AS text), 0, 'arrive', NULL, 'generated', 'worker:w', {at} FROM {numbers}
    """,
    """
    INSERT INTO update_members (run_no, update_id, rollout_id, revision, verdict, group_id, versions, lag, drift, at)
    SELECT :run_no, 'u', CAST(n AS text), 1, 'reserved', 'g', ARRAY[0], 0, 0.01, {at} FROM {numbers}
    """,
    """
    INSERT INTO rollouts (run_no, rollout_id, group_id, sample_index, attempt, state, revision, reason, worker_id,
                          incarnation, contract_no, versions, newest_version, content_hash, arrived_at)
    SELECT :run_no, CAST(n AS text), CAST(n AS text), 0, 0, 'offline', 1, 'group_spent', 'w', 'w-1', 1, ARRAY[0], 0,
           '', {at} FROM {numbers}
    """,
)
"""The changes of a run, its reservations and its rollouts, oldest first, as they lie on disk."""


async def test_a_long_run_costs_what_its_window_holds(api: Api) -> None:
    await Ledger.create(api)
    run_no = (await api.rows("SELECT run_no FROM runs"))[0].run_no
    at = "clock_timestamp() - make_interval(secs => (CAST(:rows AS int) - n) * 0.06)"
    async with api.database.engine.begin() as connection:
        for statement in HISTORY:
            filled = statement.format(at=at, numbers="generate_series(1, CAST(:rows AS int)) AS n")
            await connection.execute(text(filled), {"run_no": run_no, "rows": ROWS})
        for index in ("rollout_audit_at", "update_members_at"):
            await connection.execute(text(f"SELECT brin_summarize_new_values('{index}')"))
        await connection.execute(text("ANALYZE rollout_audit, update_members, rollouts"))
    clock = (await api.rows(queries.WINDOW.text, bucket_seconds=1.0, buckets=60))[0]
    window = {"run_no": run_no, "begin": clock.begin, "end": clock.now}
    for statement, more, index in (
        (queries.FLOW, {"bucket_seconds": 1.0}, "rollout_audit_at"),
        (queries.REFUSED, {}, "rollout_audit_at"),
        (queries.JUDGED, {"bin_width": 0.02, "bins": 20}, "update_members_at"),
        (queries.ARRIVED, {}, "rollouts_arrived"),
    ):
        known = {name: value for name, value in (window | more).items() if f":{name}" in statement.text}
        scans = await api.database.transaction(scans_of, statement.text, known)
        assert {scan["index"] for scan in scans} == {index}, scans
        assert all(scan["visited"] < ROWS / 5 for scan in scans), scans


async def scans_of(connection: AsyncConnection, statement: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Each table that a statement read when it was run: by which index, and how many rows it looked at."""
    plan = await connection.scalar(text(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}"), parameters)
    found, nodes = [], [plan[0]["Plan"]]
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        if "Relation Name" in node:
            index = node.get("Index Name") or next((below.get("Index Name") for below in node.get("Plans", [])), None)
            passed_over = node.get("Rows Removed by Index Recheck", 0) + node.get("Rows Removed by Filter", 0)
            found.append({"index": index, "visited": node["Actual Rows"] + passed_over})
    return found
