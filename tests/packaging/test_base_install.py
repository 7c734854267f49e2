"""What a trainer gets from a plain ``pip install``: the client and the rules, no server and no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# One process, so that the wheel and the environment are made once.
pytestmark = pytest.mark.xdist_group("base_install")

LIST_LOADED = "import sys, {module}; print(*sorted(sys.modules))"
SERVER_PACKAGES = {"alembic", "asyncpg", "fastapi", "orjson", "sqlalchemy", "starlette", "typer", "uvicorn"}
MODEL_PACKAGES = {"peft", "ray", "torch", "transformers", "verl", "vllm"}


def elsewhere() -> dict[str, str]:
    """The environment of somebody who has no checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command: str | Path, cwd: Path) -> str:
    """The command's stdout; its whole output is in the assertion when it fails."""
    result = subprocess.run(command, cwd=cwd, env=elsewhere(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built with the hatchling that the lock pins."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", folder, ROOT),
        cwd=folder,
    )
    (built,) = folder.glob("rollout_coordinator-*.whl")
    return built


@pytest.fixture(scope="module")
def base_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel and its base dependencies, resolved by pip from the package index."""
    folder = tmp_path_factory.mktemp("base")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=folder)
    return python


@pytest.mark.parametrize("module", ["coordinator.client", "coordinator.rules", "coordinator.wire"])
def test_base_install_imports_without_server_or_torch(base_python: Path, module: str) -> None:
    loaded = run(base_python, "-c", LIST_LOADED.format(module=module), cwd=base_python.parent).split()

    assert module in loaded
    assert not (SERVER_PACKAGES | MODEL_PACKAGES) & set(loaded)


@pytest.mark.parametrize(("script", "extra"), [("coordinator", "[server]"), ("worker-agent", "[worker]")])
def test_a_script_without_its_extra_says_in_one_line_what_to_install(
    base_python: Path, script: str, extra: str
) -> None:
    command = [base_python.parent / script, "--help"]
    ended = subprocess.run(
        command, cwd=base_python.parent, env=elsewhere(), capture_output=True, text=True, check=False
    )
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert line.startswith(f"{script}: typer is not installed: pip install ") and extra in line


def test_the_demo_without_its_extra_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    without = "import sys; sys.modules['verl'] = None; from coordinator.cli import main; main()"
    command = [sys.executable, "-c", without, "demo"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert line.startswith("coordinator: the demo lacks verl: ") and "worker-cpu]" in line


def test_client_loads_no_server_code_where_everything_is_installed(tmp_path: Path) -> None:
    loaded = run(sys.executable, "-c", LIST_LOADED.format(module="coordinator.client"), cwd=tmp_path).split()

    assert not (SERVER_PACKAGES | MODEL_PACKAGES) & set(loaded)


def test_wheel_carries_the_migrations_and_both_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())

    shipped = {f"coordinator/_migrations/{path.relative_to(ROOT / 'migrations')}" for path in migration_files()}
    assert shipped
    assert shipped <= names
    assert {"coordinator/cli/__init__.py", "worker_agent/cli.py"} <= names
    assert not [name for name in names if name.startswith(("migrations/", "tests/"))]


def test_wheel_carries_the_dashboard_with_the_licences_of_its_libraries(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())

    static = ROOT / "coordinator" / "dashboard" / "static"
    shipped = {str(path.relative_to(ROOT)) for path in static.rglob("*") if path.is_file()}
    assert "coordinator/dashboard/static/index.html" in shipped
    assert shipped <= names
    licences = {name.rpartition("/licenses/")[2] for name in names if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", *(name for name in shipped if "/LICENSE" in name)}


def migration_files() -> list[Path]:
    return [path for path in (ROOT / "migrations").rglob("*.py") if "__pycache__" not in path.parts]
