"""Two hundred watchers in processes of their own, on two replicas, hear of every switch once. Speed is not judged."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.conftest import Benchmark


def test_all_of_two_hundred_watchers_hear_of_every_switch(benchmark: Benchmark, folder: Path) -> None:
    # It fails when a watcher missed a switch or heard of it twice.
    done = benchmark("watching", "--watchers", "200", "--activations", "2")
    found = json.loads((folder / "numbers.json").read_text())
    assert (found["watchers"], found["replicas"], found["activations"]) == (200, 2, 2)
    assert 0 < found["heard_ms"]["p50"] <= found["heard_ms"]["p99"] <= found["heard_ms"]["max"]
    assert found["last_heard_ms"]["max"] == found["heard_ms"]["max"]
    assert "200 watchers on 2 replicas, 2 activations" in done.stdout
