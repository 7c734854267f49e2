"""docker-compose.yml and the Dockerfile, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def checkers() -> list[list[str]]:
    """The specification's schema, and Compose itself on a machine that has it."""
    found = [[sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]]
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:
        found.append([docker, "compose", "--env-file", "/dev/null", "--file", str(COMPOSE), "config", "--quiet"])
    return found


def test_compose_file_is_valid_under_the_compose_specification(tmp_path: Path) -> None:
    for command in checkers():
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_nothing_is_published_beyond_this_machine() -> None:
    published = [port for service in services().values() for port in service.get("ports", [])]

    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_coordinator_waits_for_a_healthy_postgres_and_has_a_token() -> None:
    coordinator = services()["coordinator"]

    assert coordinator["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert services()["postgres"]["healthcheck"]["test"][0] == "CMD"
    assert coordinator["environment"]["COORDINATOR_ADMIN_TOKEN"]
    assert "@postgres:5432/" in coordinator["environment"]["DATABASE_URL"]


def test_what_must_outlive_the_containers_is_on_named_volumes() -> None:
    volumes = yaml.safe_load(COMPOSE.read_text())["volumes"]
    mounts = dict(mount.split(":", 1) for service in services().values() for mount in service["volumes"])

    assert mounts.keys() == volumes.keys()
    assert f"VOLUME {mounts['artifacts']}" in (ROOT / "Dockerfile").read_text().splitlines()


def test_image_copies_only_what_the_build_context_lets_through() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copies = [shlex.split(line)[1:-1] for line in lines if line.startswith("COPY")]
    sources = {source for copy in copies if not copy[0].startswith("--from") for source in copy}

    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)
