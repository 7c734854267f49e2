"""Benchmarks as somebody would start them, from the folder of the project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Benchmark = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where Postgres, which is another user where the tests run as root, can enter."""
    folder = Path(tempfile.mkdtemp(prefix="coordinator-tests-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def benchmark(folder: Path) -> Benchmark:
    """Runs a benchmark with these arguments to its end; its numbers lie in `numbers.json`, and nothing else stays."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json", str(folder / "numbers.json")],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert [path.name for path in folder.iterdir()] == ["numbers.json"]
        return done

    return run
