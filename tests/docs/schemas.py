"""What a JSON, YAML or INI block of the documentation shows, by the name in the mark above it, and who takes it."""

from __future__ import annotations

import configparser
import importlib
import json
import pkgutil
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from pydantic import BaseModel

import coordinator.wire
from coordinator.wire.runs import CreateRun
from tests.docs.commands import check
from worker_agent.configuration import configure


def model(name: str) -> type[BaseModel] | None:
    """The model of this name, of all that cross the network."""
    for module in pkgutil.iter_modules(coordinator.wire.__path__):
        found = getattr(importlib.import_module(f"coordinator.wire.{module.name}"), name, None)
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return None


def _worker_settings(text: str, folder: Path) -> None:
    """All that a worker needs, but for the id, which differs from worker to worker."""
    file = folder / "worker.yaml"
    file.write_text(text, encoding="utf-8")
    configure(file, {"WORKER_ID": "gpu-0"}, {})


def _compose(text: str, folder: Path) -> None:
    """A piece of docker-compose.yml, or of a file that is laid over it."""
    file = folder / "compose.yml"
    file.write_text(text, encoding="utf-8")
    _program([sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)])


def _kubernetes(text: str, folder: Path) -> None:
    for document in yaml.safe_load_all(text):
        kubernetes_validate.validate(document, "1.31", strict=True)


def _prometheus(text: str, folder: Path) -> None:
    file = folder / "prometheus.yml"
    file.write_text(text, encoding="utf-8")
    _program([str(Path(sys.prefix) / "bin" / "promtool"), "check", "config", "--syntax-only", str(file)])


def _systemd(text: str, folder: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    assert set(unit.sections()) <= {"Unit", "Service", "Install"}
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    check([Path(program).name, *arguments])


def _run_file(text: str, folder: Path) -> None:
    """What a run is created with, but for its id, which is given beside the file."""
    CreateRun.model_validate_json(json.dumps({"run_id": "sums"} | yaml.safe_load(text)))


def _log_line(text: str, folder: Path) -> None:
    """A line of the server's log in JSON."""
    assert "\n" not in text.strip()
    assert {"time", "level", "logger", "message"} <= json.loads(text).keys()


SCHEMAS: dict[str, Callable[[str, Path], None]] = {
    "worker settings": _worker_settings,
    "compose": _compose,
    "kubernetes": _kubernetes,
    "log line": _log_line,
    "prometheus": _prometheus,
    "run file": _run_file,
    "systemd": _systemd,
}


def shows(name: str, language: str, text: str, folder: Path) -> None:
    """AssertionError or the model's own error if the text is not what its mark says."""
    if name in SCHEMAS:
        SCHEMAS[name](text, folder)
        return
    found = model(name)
    assert found is not None, f"there is neither a model nor a schema {name}"
    value: Any = json.loads(text) if language == "json" else yaml.safe_load(text)
    found.model_validate_json(json.dumps(value))


def _program(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
