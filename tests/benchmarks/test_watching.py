"""Two hundred watchers in processes of their own, on two replicas, hear of every switch once. Speed is not judged."""

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


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where Postgres, which is another user where the tests run as root, can enter."""
    folder = Path(tempfile.mkdtemp(prefix="coordinator-tests-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_all_of_two_hundred_watchers_hear_of_every_switch(folder: Path) -> None:
    command = (sys.executable, "-m", "benchmarks.watching", "--watchers", "200", "--activations", "2")
    done = subprocess.run(
        [*command, "--json", str(folder / "numbers.json")],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]  # it fails when a watcher missed a switch or heard of it twice
    found = json.loads((folder / "numbers.json").read_text())
    assert (found["watchers"], found["replicas"], found["activations"]) == (200, 2, 2)
    assert 0 < found["heard_ms"]["p50"] <= found["heard_ms"]["p99"] <= found["heard_ms"]["max"]
    assert found["last_heard_ms"]["max"] == found["heard_ms"]["max"]
    assert "200 watchers on 2 replicas, 2 activations" in done.stdout
    assert [path.name for path in folder.iterdir()] == ["numbers.json"]
