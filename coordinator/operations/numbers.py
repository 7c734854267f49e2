"""What this process counts by itself: requests, verdicts, lag and drift. `/metrics` shows it beside what is read."""

from __future__ import annotations

from collections import Counter as Tally
from collections import OrderedDict
from typing import Annotated, cast

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.wire.rollouts import ArrivalAnswer, RewardAnswer
from coordinator.wire.updates import ReserveVerdict

MOST_RUNS = 200
"""Runs that have series of their own in one process; the one that is silent for longest makes room for another."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAGS = (0, 1, 2, 3, 4, 6, 8, 16, 32)
_DRIFTS = (0.005, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)


class Numbers:
    """The counters and histograms of one app, in a registry of its own.

    The only label that a caller can choose is the run, of which there are at most `MOST_RUNS`.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.in_flight = Gauge("coordinator_requests_in_flight", "Requests under way.", registry=registry)
        self._requests = Counter(
            "coordinator_requests",
            "Answers by operation (its name in the OpenAPI document) and HTTP status; 499: the client left before.",
            ["operation", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "coordinator_request_seconds",
            "From a request's head to its answer's end. Calls that wait on purpose count with their wait.",
            ["operation"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._arrivals = Counter(
            "coordinator_arrivals",
            "Rollouts sent, by verdict, the state that they got, and the gate's or the fault's reason.",
            ["run", "verdict", "state", "reason"],
            registry=registry,
        )
        self._rewards = Counter(
            "coordinator_rewards", "Rewards sent, by verdict.", ["run", "verdict"], registry=registry
        )
        self._reservations = Counter(
            "coordinator_reservations",
            "Rollouts named for reservation, by verdict and the state that they have since.",
            ["run", "verdict", "state"],
            registry=registry,
        )
        self._lag = Histogram(
            "coordinator_reserve_lag_versions",
            "Lag of rollouts that reached the freshness check of a reservation, in version numbers.",
            ["run"],
            buckets=_LAGS,
            registry=registry,
        )
        self._drift = Histogram(
            "coordinator_reserve_drift_nats",
            "Measured mean |log-ratio| of rollouts named for reservation, in nats a token.",
            ["run"],
            buckets=_DRIFTS,
            registry=registry,
        )
        self._runs: OrderedDict[str, None] = OrderedDict()

    def request(self, operation: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(operation, status).inc()
        self._seconds.labels(operation).observe(seconds)

    def arrived(self, run_id: str, answer: ArrivalAnswer) -> None:
        """Rollouts, or reports of failed ones, got their verdicts."""
        self._touch(run_id)
        for labels, n in Tally((v.verdict, v.state or "", v.reason or "") for v in answer.verdicts).items():
            self._arrivals.labels(run_id, *labels).inc(n)

    def rewarded(self, run_id: str, answer: RewardAnswer) -> None:
        """Rewards got their verdicts."""
        self._touch(run_id)
        for verdict, n in Tally(v.verdict for v in answer.verdicts).items():
            self._rewards.labels(run_id, verdict).inc(n)

    def reserved(self, run_id: str, verdicts: list[ReserveVerdict]) -> None:
        """Rollouts got their verdicts at a reservation. One that is sent again is measured once."""
        self._touch(run_id)
        for labels, n in Tally((v.verdict, v.state or "") for v in verdicts).items():
            self._reservations.labels(run_id, *labels).inc(n)
        for histogram, values in (
            (self._lag, [v.lag for v in verdicts if v.verdict != "idempotent_retry" and v.lag is not None]),
            (self._drift, [v.drift for v in verdicts if v.verdict != "idempotent_retry" and v.drift is not None]),
        ):
            if values:
                of_run = histogram.labels(run_id)
                for value in values:
                    of_run.observe(value)

    def _touch(self, run_id: str) -> None:
        self._runs[run_id] = None
        self._runs.move_to_end(run_id)
        if len(self._runs) > MOST_RUNS:
            silent, _ = self._runs.popitem(last=False)
            for metric in (self._arrivals, self._rewards, self._reservations, self._lag, self._drift):
                metric.remove_by_labels({"run": silent})


async def numbers_of(request: Request) -> Numbers:
    """The app's counters."""
    return cast(Numbers, request.app.state.numbers)


NumbersHere = Annotated[Numbers, Depends(numbers_of)]
