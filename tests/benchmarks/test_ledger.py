"""The benchmark runs from end to end, gives every line of its table, and leaves nothing behind. Speed is not judged."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.conftest import Benchmark

WAYS = ("over HTTP", "functions", "statements")
LINES = {
    ("in, JSON", "over HTTP", 32),
    *((part, way, size) for way in WAYS for part, size in (("in", 32), ("in", 256), ("rewards", 256), ("out", 256))),
}


def test_every_line_is_there_and_nothing_is_left(benchmark: Benchmark, folder: Path) -> None:
    done = benchmark("ledger", "--rollouts", "64", "--tokens", "16", "--repetitions", "1")
    found = json.loads((folder / "numbers.json").read_text())
    assert {(line["part"], line["way"], line["rollouts_per_call"]) for line in found["lines"]} == LINES
    for line in found["lines"]:
        assert len(line["repetitions"]) == 1
        assert 0 < line["call_ms"]["p50"] <= line["call_ms"]["p99"]
        assert min(line["repetitions"]) <= line["rollouts_per_second"] <= max(line["repetitions"])
        shown = (line["part"], line["way"], str(line["rollouts_per_call"]), f"{line['rollouts_per_second']:,.0f}")
        assert any(all(word in row for word in shown) for row in done.stdout.splitlines())
    assert "fsync on" in found["machine"]["postgres"]
    assert "1 of 1, out, statements, 256 a call: " in done.stderr
