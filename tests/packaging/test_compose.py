"""docker-compose.yml and the Dockerfile, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.compose import FILE, ROOT, document, services

OURS = {"migrate", "coordinator-1", "coordinator-2", "setup", "worker-1", "worker-2", "worker-gpu", "reward", "trainer"}
ENDS = {"migrate", "setup"}
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def checkers() -> list[list[str]]:
    """The specification's schema, and Compose itself on a machine that has it."""
    found = [[sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]]
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:
        found.append([docker, "compose", "--env-file", "/dev/null", "--file", str(FILE), "config", "--quiet"])
    return found


def test_compose_file_is_valid_under_the_compose_specification(tmp_path: Path) -> None:
    for command in checkers():
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_only_the_proxy_and_grafana_are_published_and_to_this_machine_alone() -> None:
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}

    assert published.keys() == {"proxy", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert services()["grafana"]["profiles"] == ["monitoring"]


def test_no_secret_stands_in_the_file() -> None:
    secret = re.compile("PASSWORD|TOKEN|SECRET|DATABASE_URL")
    given = [
        (name, variable, value)
        for name, service in services().items()
        for variable, value in service.get("environment", {}).items()
        if secret.search(variable)
    ]
    assert given
    assert all(variable.endswith("_FILE") and value.startswith("/run/") for _, variable, value in given), given
    assert all(secret["file"].startswith("./deploy/secrets/") for secret in document()["secrets"].values())


def test_the_secrets_are_made_once_and_are_their_owner_s(tmp_path: Path) -> None:
    script = shutil.copy(ROOT / "deploy" / "make-secrets.sh", tmp_path)
    folder = tmp_path / "secrets"
    subprocess.run([script], check=True, capture_output=True)
    made = {file.name: file.read_text() for file in folder.iterdir()}
    subprocess.run([script], check=True, capture_output=True)

    assert made.keys() == document()["secrets"].keys()
    assert {file.name: file.read_text() for file in folder.iterdir()} == made
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # Containers of another user read them, through a mount of each file.
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o444 for file in folder.iterdir())
    assert len(made["admin_token"].strip()) == 64
    assert f":{made['postgres_password'].strip()}@postgres:5432/" in made["database_url"]


def test_what_is_ours_is_confined() -> None:
    assert services().keys() >= OURS
    for name, service in services().items():
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert service["restart"] == ("no" if name in ENDS else "unless-stopped"), name
        if name in OURS | {"proxy"}:
            assert (service["user"], service["read_only"], service["cap_drop"]) == ("10001:10001", True, ["ALL"]), name
        assert "privileged" not in service, name
    assert [name for name, service in services().items() if "cap_add" in service] == ["proxy"]


def test_each_waits_for_what_it_needs() -> None:
    waits = {name: service.get("depends_on", {}) for name, service in services().items()}
    healthy, done = {"condition": "service_healthy"}, {"condition": "service_completed_successfully"}

    assert waits["migrate"] == {"postgres": healthy}
    assert waits["coordinator-1"] == waits["coordinator-2"] == {"migrate": done}
    assert waits["proxy"] == {"coordinator-1": healthy, "coordinator-2": healthy}
    assert waits["setup"] == {"proxy": healthy}
    assert waits["worker-1"] == waits["worker-2"] == waits["reward"] == {"setup": done}
    assert waits["trainer"] == {"worker-1": healthy, "worker-2": healthy}


def test_an_image_of_ours_is_built_by_one_service_that_the_others_wait_for_and_pulled_by_none() -> None:
    builders = {service["image"]: name for name, service in services().items() if "build" in service}

    assert set(builders.values()) == {"migrate", "setup", "worker-gpu"}
    for name in OURS - set(builders.values()):
        waited, ahead = set[str](), [name]
        while ahead:
            found = services()[ahead.pop()].get("depends_on", {}).keys() - waited
            waited |= found
            ahead += found
        assert builders[services()[name]["image"]] in waited, name
        assert services()[name]["pull_policy"] == "never", name


def test_the_proxy_knows_the_replicas() -> None:
    proxied = re.search(r"reverse_proxy (.*) \{", (ROOT / "deploy" / "compose" / "Caddyfile").read_text())

    assert proxied is not None
    assert proxied[1].split() == [f"{name}:8000" for name in services() if name.startswith("coordinator-")]


def mounts() -> dict[str, set[tuple[str, str]]]:
    """By service, what is mounted and where."""
    return {
        name: {(source, target) for source, target in (mount.split(":")[:2] for mount in service.get("volumes", []))}
        for name, service in services().items()
    }


def test_what_must_outlive_the_containers_is_on_named_volumes_that_the_plain_user_may_write() -> None:
    named = {(source, target) for pairs in mounts().values() for source, target in pairs if not source.startswith(".")}
    ours = {target for name in OURS for source, target in mounts()[name] if not source.startswith(".")}
    made = re.findall(
        r"install --directory --owner=coordinator --group=coordinator \\\n\s+(.*?)(?: \\)?$", DOCKERFILE, re.M
    )

    assert {source for source, _ in named} == document()["volumes"].keys()
    # A volume takes the owner of the folder on which it is first mounted.
    assert ours - {"/run/token"} <= {folder for line in made for folder in line.split()}
    for holder in ("trainer", "reward", "worker-1", "worker-2", "worker-gpu"):
        held = {source for source, _ in mounts()[holder] if source.startswith("token-")}
        assert held == {f"token-{holder}"}, "each has its own token and no other"


def test_files_that_are_mounted_are_there() -> None:
    files = {source for pairs in mounts().values() for source, _ in pairs if source.startswith(".")}

    assert files
    assert all((ROOT / file).exists() for file in files), files


def stages() -> dict[str, list[str]]:
    """The instructions of each stage of the Dockerfile, continued lines joined."""
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines():
        if start := re.match(r"FROM \S+ AS (\S+)", line):
            found[start[1]] = []
        elif line and not line.startswith("#"):
            found[list(found)[-1]].append(line)
    return found


def test_images_copy_only_what_the_build_context_lets_through() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [shlex.split(line)[1:-1] for lines in stages().values() for line in lines if line.startswith("COPY")]
    sources = {source for copy in copies if not copy[0].startswith("--from") for source in copy}

    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_every_image_runs_as_the_plain_user_and_the_default_one_is_the_server_s() -> None:
    targets = {service["build"]["target"] for service in services().values() if "build" in service}

    assert targets == {"server", "worker-cpu", "worker-gpu"}
    assert list(stages())[-1] == "server"
    for target in targets:
        assert "USER coordinator" in stages()[target]
        assert next(line for line in stages()[target] if line.startswith("CMD")).startswith('CMD ["')  # no shell
    assert "--uid 10001" in stages()["base"][0]


def test_the_cpu_worker_s_image_takes_from_the_lock_what_is_declared() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        canonicalize_name(Requirement(line).name)
        for line in project["dependencies"] + project["optional-dependencies"]["worker-cpu"]
    }
    base = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    install = next(line for line in stages()["worker-cpu-build"] if "--constraint requirements/cpu.lock" in line)
    installed = {canonicalize_name(name) for name in install.split("--constraint requirements/cpu.lock")[1].split()}

    assert base <= installed <= declared
