"""The artifact benchmark runs from end to end, gives every line, and leaves nothing behind. Speed is not judged."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.conftest import Benchmark

STAGES = [
    "plain copy, synced",
    "plain sha256",
    "client: sha256 before sending",
    "upload, hashed and synced",
    "verification, until committed",
    "download, hashed and synced",
]


def test_every_stage_is_there_memory_stays_flat_and_nothing_is_left(benchmark: Benchmark, folder: Path) -> None:
    done = benchmark("artifacts", "--megabytes", "300")
    found = json.loads((folder / "numbers.json").read_text())
    assert [stage["name"] for stage in found["stages"]] == STAGES
    assert all(any(line.startswith(name) for line in done.stdout.splitlines()) for name in STAGES)
    # 300 MB went through server and client three times: neither has ever held a third of it at once.
    for stage in found["stages"][2:]:
        assert stage["server_peak"] - found["server_before"] < 100e6, stage
