"""The metrics that are read when they are asked for: how this process stands, and the last reading of the runs."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.pool import QueuePool

from coordinator.clocks import Sweeps
from coordinator.metrics.standing import CONDITIONS, STATES, Standing
from coordinator.storage.artifacts import ArtifactStore
from coordinator.storage.changes import Changes
from coordinator.storage.database import FAULTS, Database
from coordinator.storage.migrations import newest
from coordinator.watching.feeds import Feeds
from coordinator.wire.events import EVENTS

log = logging.getLogger("coordinator.metrics")

STALE_SECONDS = 60.0
"""An older reading of the runs is not shown."""
SPACE_SECONDS = 60.0


class Space(NamedTuple):
    """The artifact store: bytes of the files in it, and the disk that it lies on."""

    used: int
    free: int
    total: int


def measure(folder: Path) -> Space:
    """Walks the store. Blocks."""
    used = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                used += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # an upload that was finished or given up just now
                continue
    disk = shutil.disk_usage(folder)
    return Space(used, disk.free, disk.total)


class Standings(Collector):
    """Reads nothing but memory, so that a scrape costs the database nothing and answers while it is away."""

    def __init__(self, database: Database, changes: Changes, feeds: Feeds, standing: Standing, sweeps: Sweeps) -> None:
        self._database = database
        self._changes = changes
        self._feeds = feeds
        self._standing = standing
        self._sweeps = sweeps
        self._began = time.time()
        self.space: Space | None = None

    def collect(self) -> Iterator[Metric]:
        """Every metric, those without a sample now included."""
        yield from self._process()
        standing = self._standing
        fresh = standing.read_at is not None and time.time() - standing.read_at < STALE_SECONDS
        yield from _runs(standing if fresh else None)

    def _process(self) -> Iterator[Metric]:
        yield _labelled(
            "build_info", "1, with the release in its label.", "version", {version("rollout-coordinator"): 1}
        )
        yield _labelled("schema_info", "1, with the schema's revision in its label.", "revision", {newest(): 1})
        yield _plain("start_timestamp_seconds", "When this process began to serve, in seconds since 1970.", self._began)
        pool = self._database.engine.pool
        assert isinstance(pool, QueuePool)
        yield _plain(
            "database_connections_in_use", "Connections of the pool that serve a request now.", pool.checkedout()
        )
        yield _plain("database_connections_most", "Connections that the pool may have.", pool.size())
        faults = CounterMetricFamily(
            "coordinator_database_faults", "Transactions and reads that the database ended, by why.", labels=["kind"]
        )
        for kind in FAULTS:
            faults.add_metric([kind], self._database.faults[kind])
        yield faults
        retries = CounterMetricFamily(
            "coordinator_transaction_retries", "Transactions that were tried again after a deadlock or the like."
        )
        retries.add_metric([], self._database.retries)
        yield retries
        yield _labelled(
            "watchers",
            "Streams of events, and questions that long polls wait for: all who wait for the same count as one.",
            "kind",
            {"stream": self._feeds.readers, "long_poll": max(0, self._changes.followers - self._feeds.feeds)},
        )
        yield _plain(
            "sweep_timestamp_seconds",
            "When this process last looked for ended leases and deadlines, in seconds since 1970.",
            self._sweeps.swept_at,
        )
        yield _plain("database_up", "1 if the last reading of the runs succeeded, else 0.", float(self._standing.up))
        yield _plain(
            "database_read_timestamp_seconds",
            "When the runs were last read, in seconds since 1970.",
            self._standing.read_at,
        )
        yield _plain("database_read_seconds", "What that took.", self._standing.read_seconds)
        space = self.space
        yield _plain(
            "artifact_bytes", "Bytes of the files in the artifact store.", None if space is None else space.used
        )
        yield _plain(
            "artifact_disk_free_bytes", "Room on the disk of the artifact store.", None if space is None else space.free
        )
        yield _plain("artifact_disk_bytes", "Size of that disk.", None if space is None else space.total)


async def watch_space(store: ArtifactStore, standings: Standings) -> None:
    """Measures the artifact store every minute until it is cancelled."""
    while True:
        try:
            standings.space = await store.on_disk(measure, store.folder)
        except OSError as error:
            standings.space = None
            log.warning("the artifact store cannot be measured: %s", error)
        await asyncio.sleep(SPACE_SECONDS)


def _runs(standing: Standing | None) -> Iterator[Metric]:
    rollouts = GaugeMetricFamily("coordinator_rollouts", "Rollouts by state.", labels=["run", "state"])
    ages = GaugeMetricFamily(
        "coordinator_oldest_seconds",
        "Age of the oldest open group without a reward (generated), of the oldest that has one and is not reserved "
        "(rewarded), and of the oldest open update (reserved); no sample where there is none.",
        labels=["run", "state"],
    )
    held = GaugeMetricFamily("coordinator_held_groups", "Groups that are held for an update.", labels=["run"])
    leases = GaugeMetricFamily("coordinator_open_updates", "Updates with a live lease.", labels=["run"])
    workers = GaugeMetricFamily(
        "coordinator_workers",
        "Registered workers by condition. One counts in each that holds: live or lost, and fenced, draining, asleep, "
        "suspect.",
        labels=["run", "condition"],
    )
    active = GaugeMetricFamily("coordinator_active_version", "The active policy version.", labels=["run"])
    commits = GaugeMetricFamily(
        "coordinator_last_commit_timestamp_seconds",
        "When the last commit of the surviving line was made, in seconds since 1970; before the first, when the run "
        "was created.",
        labels=["run"],
    )
    opened = GaugeMetricFamily(
        "coordinator_activation_open_seconds",
        "How long the open activation has been open; no sample while none is.",
        labels=["run"],
    )
    acks = GaugeMetricFamily(
        "coordinator_activation_workers",
        "Workers that the open activation requires, by what they said: missing, matching or mismatched.",
        labels=["run", "ack"],
    )
    events = CounterMetricFamily(
        "coordinator_events",
        "Entries of the run's journal by event, since this process first read the run.",
        labels=["run", "event"],
    )
    for run_id, run in (standing.runs if standing is not None else {}).items():
        for state in STATES:
            rollouts.add_metric([run_id, state], run.states.get(state, 0))
        for state, age in run.ages.items():
            if age is not None:
                ages.add_metric([run_id, state], float(age))
        held.add_metric([run_id], run.held_groups)
        leases.add_metric([run_id], run.open_updates)
        for condition in CONDITIONS:
            workers.add_metric([run_id, condition], run.workers.get(condition, 0))
        active.add_metric([run_id], run.active_version)
        commits.add_metric([run_id], run.last_commit_at.timestamp())
        if run.activation_seconds is not None:
            opened.add_metric([run_id], run.activation_seconds)
        for ack, n in run.acks.items():
            acks.add_metric([run_id, ack], n)
        for event in EVENTS:
            events.add_metric([run_id, event], run.events.get(event, 0))
    yield from (rollouts, ages, held, leases, workers, active, commits, opened, acks, events)


def _plain(name: str, meaning: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"coordinator_{name}", meaning, value=value)


def _labelled(name: str, meaning: str, label: str, values: dict[str, float]) -> Metric:
    metric = GaugeMetricFamily(f"coordinator_{name}", meaning, labels=[label])
    for value, n in values.items():
        metric.add_metric([value], n)
    return metric
