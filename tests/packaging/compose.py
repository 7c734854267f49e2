"""docker-compose.yml as the tests read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"


def document() -> dict[str, Any]:
    """The whole file, its anchors resolved."""
    found: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def services() -> dict[str, dict[str, Any]]:
    """Each service by its name."""
    found: dict[str, dict[str, Any]] = document()["services"]
    return found
