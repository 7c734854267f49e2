"""The numbers of `/metrics`, in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from worker_agent.status.vitals import Vitals


@dataclass(frozen=True)
class Backlog:
    """What lies in a spool: batches, their bytes, and the age of the oldest in seconds (0 when there is none)."""

    batches: int
    bytes: int
    oldest_seconds: float


def backlog(spool: Path) -> Backlog:
    """What lies in the spool folder. Batches come and go meanwhile."""
    sizes: list[int] = []
    written: list[float] = []
    for path in spool.glob("*.arrow"):
        try:
            found = path.stat()
        except FileNotFoundError:  # sent just now
            continue
        sizes.append(found.st_size)
        written.append(found.st_mtime)
    return Backlog(len(sizes), sum(sizes), max(0.0, time.time() - min(written)) if written else 0.0)


class Numbers(Collector):
    """A worker's metrics as they are at each collection. No label's value comes from outside."""

    def __init__(self, vitals: Vitals, spool: Path) -> None:
        self._vitals = vitals
        self._spool = spool

    def collect(self) -> Iterator[Metric]:
        """Every metric, those without a sample now included."""
        now, spool = self._vitals, backlog(self._spool)
        yield _counter("rollouts_generated", "Rollouts that the engine made.", now.rollouts_generated)
        yield _counter("tokens_generated", "Tokens of the completions in them.", now.tokens_generated)
        yield _counter("rollouts_spooled", "Rollouts that were written to disk, to be sent.", now.rollouts_spooled)
        delivered = CounterMetricFamily(
            "worker_agent_rollouts_delivered", "Rollouts that the coordinator answered for.", labels=["verdict"]
        )
        for verdict, count in list(now.rollouts_delivered.items()):
            delivered.add_metric([verdict], count)
        yield delivered
        yield _counter(
            "rollouts_rejected", "Rollouts that were put aside in the folder rejected.", now.rollouts_rejected
        )
        yield _gauge("groups_in_flight", "Groups that are being generated.", now.groups_in_flight)
        yield _gauge("spool_batches", "Batches on disk that the coordinator has not answered for.", spool.batches)
        yield _gauge("spool_bytes", "Bytes of these batches.", spool.bytes)
        yield _gauge(
            "spool_oldest_seconds", "Age of the oldest of these batches, 0 when there is none.", spool.oldest_seconds
        )
        yield _gauge(
            "served_version",
            "The active version, while it is loaded and confirmed; no sample while it is not.",
            now.served_version,
        )
        loads = SummaryMetricFamily(
            "worker_agent_load_seconds",
            "Attempts to take up a policy, download included: _count of them, and _sum of their seconds.",
            labels=["result"],
        )
        for result, load in list(now.loads.items()):
            loads.add_metric([result], load.count, load.seconds)
        yield loads
        yield _gauge(
            "heartbeat_age_seconds",
            "Seconds since the coordinator last answered a heartbeat; no sample before the first.",
            now.silence_seconds(),
        )
        yield _gauge("engine_up", "1 while the engine is there and its last call did not fail.", now.engine_up)
        yield _gauge("asleep", "1 while the engine gives its GPU away.", now.asleep_seconds() > 0)
        yield _gauge("fenced", "1 while the coordinator has this worker fenced, as far as it knows.", now.fenced)


def registry(vitals: Vitals, spool: Path) -> CollectorRegistry:
    """A registry of its own: engines put theirs into the one of the process."""
    made = CollectorRegistry()
    made.register(Numbers(vitals, spool))
    return made


def _counter(name: str, meaning: str, value: int) -> Metric:
    return CounterMetricFamily(f"worker_agent_{name}", meaning, value=value)


def _gauge(name: str, meaning: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"worker_agent_{name}", meaning, value=None if value is None else float(value))
