"""Whether the experiment can be made here. Nothing here writes a result or touches the GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from worker_agent.closure.assets import find
from worker_agent.closure.checks import Check
from worker_agent.closure.fixture import fixture_path, misfit, read_fixture
from worker_agent.closure.meter import available_bytes
from worker_agent.closure.profile import VERL_VERSION, ClosureError, Profile
from worker_agent.models import ModelError, identify

EXIT_CODES = {
    "packages": 3,
    "missing model": 4,
    "memory": 5,
    "model": 6,
    "fixture": 7,
    "tokenizer": 8,
    "loss": 9,
    "positions": 10,
    "initialisation": 11,
}
"""Exit status by what is at fault; 4 only where nothing else is."""

_GIB = 2**30


def exit_code(checks: Sequence[Check]) -> int:
    """0: ready; 4: nothing but the model is missing; else the code of the first fault."""
    faults = [check for check in checks if not check.ok]
    real = [check for check in faults if not check.missing]
    if real:
        return EXIT_CODES[real[0].name]
    return EXIT_CODES["missing model"] if faults else 0


def preflight(profile: Profile, data: Path) -> list[Check]:
    """All checks, in their order; those that an earlier fault makes senseless are left out.

    Raises `ClosureError` if the process that checks with torch breaks down.
    """
    checks = quick_checks(profile, data)
    return checks if exit_code(checks) == EXIT_CODES["packages"] else [*checks, *slow_checks(profile, data)]


def quick_checks(profile: Profile, data: Path) -> list[Check]:
    """Packages, memory, model and fixture: seconds, without torch."""
    packages = check_packages(profile)
    if not packages.ok:
        return [packages]
    return [packages, check_memory(profile), check_model(profile), check_fixture(profile, data)]


def slow_checks(profile: Profile, data: Path) -> list[Check]:
    """Tokenizer, initialisation, scoring positions and loss, in a process that sees no GPU."""
    fixture = fixture_path(profile, data)
    model = find(profile)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "checks.json"
        command = [
            sys.executable,
            "-m",
            "worker_agent.closure.checks",
            str(fixture or "-"),
            str(model or "-"),
            str(out),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise ClosureError(f"the checks on the CPU broke down: {last}")
        return [Check(**fields) for fields in json.loads(out.read_text(encoding="utf-8"))]


def check_packages(profile: Profile) -> Check:
    """Everything is installed, and verl in the one version that this was written against."""

    def look() -> str:
        found = {name: _installed(name) for name in ("verl", *profile.packages)}
        absent = [name for name, version in found.items() if version is None]
        if absent:
            raise ClosureError(f"not installed: {', '.join(absent)}; see requirements/cpu.lock")
        if found["verl"] != VERL_VERSION:
            raise ClosureError(f"verl is {found['verl']}, this needs {VERL_VERSION}")
        return ", ".join(f"{name} {version}" for name, version in found.items())

    return _checked("packages", look)


def check_memory(profile: Profile) -> Check:
    """Enough main memory is free."""

    def look() -> str:
        free = available_bytes()
        if free < profile.memory_bytes:
            raise ClosureError(f"{free / _GIB:.1f} GiB are free, {profile.memory_bytes / _GIB:.1f} GiB are needed")
        return f"{free / _GIB:.1f} GiB free of {profile.memory_bytes / _GIB:.1f} GiB needed"

    return _checked("memory", look)


def check_model(profile: Profile) -> Check:
    """The model is in the cache, and a model."""
    folder = find(profile)
    if folder is None:
        return Check("model", False, f"{profile.name} is not in the cache: run fetches it", missing=True)

    def look() -> str:
        identity = identify(folder)
        return f"{identity.name} {identity.revision}, sha256 {identity.sha256[:12]}"

    return _checked("model", look)


def check_fixture(profile: Profile, data: Path) -> Check:
    """The fixture is this model's. One that is not there yet is made by `run`, once."""

    def look() -> str:
        path = fixture_path(profile, data)
        if path is None:
            return "there is none yet: run makes it"
        fixture, sha256 = read_fixture(path)
        folder = find(profile)
        if folder is not None and (why := misfit(fixture, identify(folder))):
            raise ClosureError(why)
        return f"{len(fixture.rollouts)} rollouts, sha256 {sha256[:12]}"

    return _checked("fixture", look)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checked(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except (ClosureError, ModelError, OSError) as error:
        return Check(name, False, str(error))
