"""Every metric with its kind, labels and meaning, as the documentation lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from coordinator.clocks import Sweeps
from coordinator.metrics.collector import Standings
from coordinator.metrics.standing import Standing
from coordinator.operations.numbers import Numbers
from coordinator.storage.changes import Changes
from coordinator.storage.database import connect
from coordinator.watching.feeds import Feeds


class Listed(NamedTuple):
    """One metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    def samples(self) -> tuple[str, ...]:
        """The names that a query may ask for."""
        return (
            tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
            if self.kind == "histogram"
            else (self.name,)
        )


async def _nothing(*_: Any) -> Any:
    raise AssertionError("nobody reads")


def _families() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    database, changes, numbers = connect("postgresql://nobody@127.0.0.1:1/none", pool_size=1), Changes(), Numbers()
    standing = Standing(database, numbers)
    feeds = Feeds(changes, _nothing, _nothing)
    for family in Standings(database, changes, feeds, standing, Sweeps()).collect():
        yield family, tuple(getattr(family, "_labelnames", ()))
    for metric in numbers.registry._collector_to_names:
        assert isinstance(metric, MetricWrapperBase)
        for family in metric.collect():
            yield family, tuple(metric._labelnames)


def every_metric() -> list[Listed]:
    """All of them, by name. It needs no database."""
    return sorted(
        Listed(
            f"{family.name}_total" if family.type == "counter" else family.name,
            family.type,
            labels,
            family.documentation,
        )
        for family, labels in _families()
    )
