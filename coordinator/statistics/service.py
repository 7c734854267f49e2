"""How a run moves: a few bounded reads, asked once a second at most for each run and window, whoever looks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.rollouts.queries import for_run
from coordinator.runs.service import get_run
from coordinator.statistics import queries
from coordinator.wire.statistics import (
    FlowBucket,
    Refused,
    RejectedArrivals,
    StateAge,
    Statistics,
    VersionStatistics,
)

KEPT_SECONDS = 1.0
"""An answer serves everybody who asks for the same within this time."""
STATEMENT_MILLISECONDS = 5000
"""What one statement may take. A page that is looked at must not slow the run down that it shows."""
AT_ONCE = 2
"""Measured at once in one process: the database's connections are the run's own, and a page has one or two of them."""
MOST_WAITING = 30
"""Different questions that wait for their turn; more are refused, for nobody would still be there for the answers."""
BINS_TO_LIMIT = 10
"""Bins of drift from 0 to the limit; as many again lie beyond it."""
MOST_VERSIONS = 32
QUERY_CANCELED = "57014"

_COUNTED = {
    "arrive": "arrived",
    "generation_fail": "generation_failed",
    "reward_ready": "rewarded",
    "reward_fail": "reward_failed",
    "reserve": "reserved",
    "commit": "consumed",
    "abort": "released",
    "quarantine": "quarantined",
    "set_aside": "set_aside",
    "discard": "discarded",
}
"""The field of a bucket that counts an event."""
_LIVE = ("generated", "reward_failed", "rewarded", "reserved")

Key = tuple[str, int, int]
Measure = Callable[[str, int, int], Awaitable[Statistics]]


class Recent:
    """Answers that were made within the last second, and those that are being made: one read for all who ask.

    Different windows are different questions, of which anybody can ask many: they take turns.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._answers: dict[Key, asyncio.Task[Statistics]] = {}

    async def get(self, run_id: str, window_seconds: int, buckets: int) -> Statistics:
        """The statistics of a run, at most about a second old."""
        key = run_id, window_seconds, buckets
        if key not in self._answers:
            if sum(not task.done() for task in self._answers.values()) >= AT_ONCE + MOST_WAITING:
                raise Refusal("unavailable", "too many different statistics are asked for; ask again in a moment")
            self._answers[key] = asyncio.create_task(self._measured(key))
        # Who leaves must not take the answer of the others with him.
        return await asyncio.shield(self._answers[key])

    async def _measured(self, key: Key) -> Statistics:
        try:
            async with self._turn:
                answer = await self._measure(*key)
        except BaseException:
            del self._answers[key]
            raise
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self._answers.pop, key)
        return answer


async def measure(connection: AsyncConnection, run_id: str, window_seconds: int, buckets: int) -> Statistics:
    """Reads the statistics of a run over its last `window_seconds`, in so many buckets.

    Raises Refusal `unavailable` where the window holds more than can be read in time.
    """
    await connection.execute(text(f"SET LOCAL statement_timeout = {STATEMENT_MILLISECONDS}"))
    try:
        return await _measure(connection, run_id, window_seconds, buckets)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != QUERY_CANCELED:
            raise
        raise Refusal(
            "unavailable", f"the last {window_seconds} s hold more than can be read in time; ask for a shorter window"
        ) from error


async def _measure(connection: AsyncConnection, run_id: str, window_seconds: int, buckets: int) -> Statistics:
    run = await get_run(connection, run_id)
    settings = run.settings
    width = window_seconds / buckets
    clock = (await connection.execute(queries.WINDOW, {"bucket_seconds": width, "buckets": buckets})).one()
    window = {"run_no": run.run_no, "begin": clock.begin, "end": clock.now}
    counted: list[dict[str, int]] = [dict.fromkeys(_COUNTED.values(), 0) for _ in range(buckets)]
    for row in await connection.execute(queries.FLOW, window | {"bucket_seconds": width}):
        if row.event in _COUNTED:
            counted[row.bucket][_COUNTED[row.event]] += row.n
    refused = await connection.execute(queries.REFUSED, window)
    rejected = await connection.execute(queries.REJECTED, {"run_no": run.run_no, "begin": clock.begin})
    ages = {
        row.state: StateAge.model_validate(dict(row._mapping))
        for row in await connection.execute(
            for_run(queries.AGES, run.group_column), {"run_no": run.run_no, "end": clock.now}
        )
    }
    bin_width = (settings.max_drift or 0.1) / BINS_TO_LIMIT
    bins = 2 * BINS_TO_LIMIT
    judged = (await connection.execute(queries.JUDGED, window | {"bin_width": bin_width, "bins": bins})).all()
    arrived = (await connection.execute(queries.ARRIVED, {"run_no": run.run_no, "begin": clock.begin})).all()
    return Statistics(
        at=clock.now,
        bucket_seconds=width,
        buckets=[
            FlowBucket(begin=clock.begin + timedelta(seconds=number * width), **counts)
            for number, counts in enumerate(counted)
        ],
        refused=[Refused.model_validate(dict(row._mapping)) for row in refused],
        rejected=[RejectedArrivals.model_validate(dict(row._mapping)) for row in rejected],
        ages=[ages[state] for state in _LIVE if state in ages],
        versions=_versions(arrived, judged, bins),
        max_lag=settings.max_lag,
        max_drift=settings.max_drift,
        lag_gate=settings.lag_gate,
        drift_gate=settings.drift_gate,
        drift_edges=[number * bin_width for number in range(bins + 1)],
    )


def _versions(arrived: Sequence[Any], judged: Sequence[Any], bins: int) -> list[VersionStatistics]:
    states: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for row in arrived:
        states[row.version][row.state] = row.n
    verdicts: defaultdict[int, list[Any]] = defaultdict(list)
    for row in judged:
        verdicts[row.version].append(row)
    found = []
    for version in sorted(states.keys() | verdicts.keys(), reverse=True)[:MOST_VERSIONS]:
        rows = verdicts[version]
        lags: defaultdict[str, int] = defaultdict(int)
        drifts = [0] * (bins + 1)
        for row in sorted(rows, key=lambda row: row.lag):
            lags[str(row.lag)] += row.n
            if row.bin is not None:
                drifts[row.bin] += row.n
        measured = sum(row.measured for row in rows)
        found.append(
            VersionStatistics(
                version=version,
                arrived=sum(states[version].values()),
                states=states[version],
                judged=sum(row.n for row in rows),
                lags=dict(lags),
                drifts=drifts,
                drift_mean=sum(row.total or 0.0 for row in rows) / measured if measured else None,
                drift_max=max((row.greatest for row in rows if row.greatest is not None), default=None),
            )
        )
    return found
