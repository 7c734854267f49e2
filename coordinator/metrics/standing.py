"""How the runs stand, read from the database every few seconds in the background, never by a scrape."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from prometheus_client import Histogram
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import is_connection_fault
from coordinator.metrics import queries
from coordinator.operations.numbers import Numbers
from coordinator.rules.lifecycle import State
from coordinator.storage.database import Database
from coordinator.storage.outage import Outage

log = logging.getLogger("coordinator.metrics")

EVERY_SECONDS = 5.0
COST = 20
"""A read that took t seconds is followed by at least `COST` times t without one."""
MOST_RUNS = 100
"""Runs that are read: those in which anything happened within a day, the latest first."""
MOST_EVENTS = 5000

ENDS = ("succeeded", "failed", "given_up", "superseded")
STAGES = ("downloading", "verifying", "loading")
CONDITIONS = ("live", "lost", "fenced", "draining", "asleep", "suspect")
_STAGE_ENDS = frozenset(
    {"worker.stage", "worker.acked", "worker.failed", "worker.fenced", "worker.registered", "worker.deregistered"}
)
_ACTIVATION_BUCKETS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200)
_STAGE_BUCKETS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


@dataclass
class RunStanding:
    """One run at one moment. Ages are in seconds; None: there is nothing that could have one."""

    active_version: int
    last_commit_at: datetime
    states: dict[str, int] = field(default_factory=dict)
    ages: dict[str, float | None] = field(default_factory=dict)
    held_groups: int = 0
    open_updates: int = 0
    workers: dict[str, int] = field(default_factory=dict)
    activation_seconds: float | None = None
    acks: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)


class Standing:
    """The last reading of all runs, and what their journals said since this process began to read them."""

    def __init__(self, database: Database, numbers: Numbers) -> None:
        self._database = database
        self.runs: dict[str, RunStanding] = {}
        self.read_at: float | None = None
        """When the last reading succeeded, in seconds since 1970."""
        self.up = False
        """Whether the last reading succeeded."""
        self.read_seconds = 0.0
        """What the last reading took."""
        self._one = asyncio.Lock()
        self._seen: dict[int, int] = {}
        self._events: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._stages: dict[tuple[int, str], tuple[str, datetime]] = {}
        self._activations = Histogram(
            "coordinator_activation_seconds",
            "From an activation's opening to its end, by how it ended.",
            ["run", "outcome"],
            buckets=_ACTIVATION_BUCKETS,
            registry=numbers.registry,
        )
        self._stage_seconds = Histogram(
            "coordinator_activation_stage_seconds",
            "What workers spent in a stage of taking up a version, from one report to the next.",
            ["run", "stage"],
            buckets=_STAGE_BUCKETS,
            registry=numbers.registry,
        )

    async def run(self) -> None:
        """Reads until it is cancelled."""
        outage = Outage(log, "and /metrics shows no runs meanwhile")
        while True:
            try:
                await self.read()
            except Exception as error:  # whatever broke one reading must not end all later ones
                if is_connection_fault(error):
                    outage.begins(error)
                else:
                    log.exception("the runs could not be read for /metrics")
            else:
                outage.ends()
            await asyncio.sleep(max(EVERY_SECONDS, COST * self.read_seconds))

    async def read(self) -> None:
        """Once."""
        async with self._one:
            began = time.monotonic()
            try:
                self.runs = await self._database.read(self._read)
            except BaseException:
                self.up = False
                raise
            self.read_seconds = time.monotonic() - began
            self.read_at, self.up = time.time(), True

    async def _read(self, connection: AsyncConnection) -> dict[str, RunStanding]:
        rows = (await connection.execute(queries.RUNS, {"most": MOST_RUNS})).all()
        ids = {row.run_no: row.run_id for row in rows}
        self._forget({*self._seen} - {*ids}, ids)
        # What lies before the first reading was counted by nobody: a counter begins at 0.
        for row in rows:
            self._seen.setdefault(row.run_no, row.event_no)
        await self._read_events(connection, ids)
        runs = {
            row.run_no: RunStanding(row.active_version, row.last_commit_at, events=dict(self._events[row.run_no]))
            for row in rows
        }
        keys = {"run_nos": list(ids)}
        for row in await connection.execute(queries.COUNTS, keys):
            runs[row.run_no].states[row.name] = row.n
        for row in await connection.execute(queries.GROUPS, keys):
            runs[row.run_no].held_groups = row.held
            runs[row.run_no].ages |= {"generated": row.generated, "rewarded": row.rewarded}
        for row in await connection.execute(queries.UPDATES, keys):
            runs[row.run_no].open_updates = row.open
            runs[row.run_no].ages["reserved"] = row.reserved
        for row in await connection.execute(queries.WORKERS, keys):
            runs[row.run_no].workers = {name: getattr(row, name) for name in CONDITIONS}
        for row in await connection.execute(queries.ACTIVATIONS, keys):
            runs[row.run_no].activation_seconds = float(row.open)
            runs[row.run_no].acks = {name: getattr(row, name) for name in ("missing", "matching", "mismatched")}
        return {ids[run_no]: standing for run_no, standing in runs.items()}

    async def _read_events(self, connection: AsyncConnection, ids: dict[int, str]) -> None:
        keys = {"run_nos": list(ids), "seen": [self._seen[run_no] for run_no in ids], "most": MOST_EVENTS}
        for row in await connection.execute(queries.EVENTS, keys):
            self._seen[row.run_no] = row.event_no
            self._events[row.run_no][row.event] += 1
            run_id = ids[row.run_no]
            if row.ended_as is not None:
                self._activations.labels(run_id, row.ended_as).observe(float(row.open_seconds or 0))
            if row.event in _STAGE_ENDS:
                self._end_stage(run_id, row)

    def _end_stage(self, run_id: str, row: Any) -> None:
        """A worker is in one stage until its next word."""
        before = self._stages.pop((row.run_no, row.subject), None)
        if before is not None:
            stage, since = before
            self._stage_seconds.labels(run_id, stage).observe((row.at - since).total_seconds())
        if row.event == "worker.stage":
            self._stages[row.run_no, row.subject] = row.stage, row.at

    def _forget(self, run_nos: set[int], ids: dict[int, str]) -> None:
        """Drops what is kept of runs in which nothing happens any more; their series end."""
        for run_no in run_nos:
            del self._seen[run_no]
            self._events.pop(run_no, None)
        self._stages = {key: value for key, value in self._stages.items() if key[0] not in run_nos}
        for run_id in {*self.runs} - {*ids.values()}:
            for histogram in (self._activations, self._stage_seconds):
                histogram.remove_by_labels({"run": run_id})


STATES = tuple(str(state.value) for state in State)
