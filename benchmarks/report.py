"""What the benchmark found: one table for people, the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.processes import Measured

BARE = "statements"
"""The way that the others are compared with."""


@dataclass(frozen=True)
class Line:
    """One phase over all its repetitions: what was done, in which way, and how many rollouts to a call."""

    part: str
    way: str
    size: int
    measured: list[Measured]

    @property
    def rate(self) -> float:
        """Rollouts per second: the median of the repetitions."""
        return median(m.rate for m in self.measured)

    def milliseconds(self, share: float) -> float:
        """The time of one whole call that this share of them did not exceed, over all repetitions."""
        calls = sorted(seconds for m in self.measured for seconds in m.calls)
        return 1e3 * calls[min(len(calls) - 1, int(share * len(calls)))]

    def cpu_microseconds(self) -> dict[str, float]:
        """Processor time per rollout by who spent it: the median of the repetitions."""
        names = self.measured[0].cpu_seconds
        return {name: 1e6 * median(m.cpu_seconds[name] / m.rollouts for m in self.measured) for name in names}

    def stages(self) -> dict[str, float]:
        """Milliseconds of each stage of a call: medians."""
        names = self.measured[0].stages
        return {name: 1e3 * median(s for m in self.measured for s in m.stages[name]) for name in names}


def as_json(machine: dict[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """Everything in the table, and the single repetitions."""
    return {
        "machine": machine,
        "lines": [
            {
                "part": line.part,
                "way": line.way,
                "rollouts_per_call": line.size,
                "rollouts_per_second": line.rate,
                "repetitions": [m.rate for m in line.measured],
                "call_ms": {"p50": line.milliseconds(0.5), "p99": line.milliseconds(0.99)},
                "cpu_microseconds_per_rollout": line.cpu_microseconds(),
                "stage_ms": line.stages(),
            }
            for line in lines
        ],
    }


def as_text(machine: dict[str, Any], lines: Sequence[Line]) -> str:
    """A header about the machine, the table, and where the time of a call goes."""
    bare = {(line.part, line.size): line.rate for line in lines if line.way == BARE}
    spenders = list(lines[0].cpu_microseconds())
    head = ["", "", "a call", "rollouts/s", "min - max", "of bare", "p50 ms", "p99 ms", *spenders]
    rows = [head]
    for line in lines:
        rates = [m.rate for m in line.measured]
        beside = bare.get((line.part, line.size))
        cpu = line.cpu_microseconds()
        rows.append(
            [
                line.part,
                line.way,
                str(line.size),
                f"{line.rate:,.0f}",
                f"{min(rates):,.0f} - {max(rates):,.0f}",
                f"{line.rate / beside:.2f}" if beside else "",
                f"{line.milliseconds(0.5):.1f}",
                f"{line.milliseconds(0.99):.1f}",
                *(f"{cpu[name]:.0f}" for name in spenders),
            ]
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    text = [f"{name}: {value}" for name, value in machine.items()]
    text += ["", "of bare: rollouts/s beside the statements alone; the last columns: processor time, us a rollout"]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        text.append("  ".join(left + right))
    text += ["", "stages of one call, medians in ms"]
    for line in lines:
        if stages := line.stages():
            parts = ", ".join(f"{name} {milliseconds:.1f}" for name, milliseconds in stages.items())
            text.append(f"{line.part}, {line.way}, {line.size}: {parts}")
    return "\n".join(text)
