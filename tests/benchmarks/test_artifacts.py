"""The artifact benchmark runs from end to end, gives every line, and leaves nothing behind. Speed is not judged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = [
    "plain copy, synced",
    "plain sha256",
    "client: sha256 before sending",
    "upload, hashed and synced",
    "verification, until committed",
    "download, hashed and synced",
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where Postgres, which is another user where the tests run as root, can enter."""
    folder = Path(tempfile.mkdtemp(prefix="coordinator-tests-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_every_stage_is_there_memory_stays_flat_and_nothing_is_left(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.artifacts", "--megabytes", "300", "--json", str(folder / "numbers.json")],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "numbers.json").read_text())
    assert [stage["name"] for stage in found["stages"]] == STAGES
    assert all(any(line.startswith(name) for line in done.stdout.splitlines()) for name in STAGES)
    # 300 MB went through server and client three times: neither has ever held a third of it at once.
    for stage in found["stages"][2:]:
        assert stage["server_peak"] - found["server_before"] < 100e6, stage
    assert [path.name for path in folder.iterdir()] == ["numbers.json"]
