"""Files of others are byte for byte what their packages hold, each with its licence."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from coordinator.dashboard.pages import STATIC

FOLDERS = {"dashboard": STATIC / "vendor", "tests": Path(__file__).parent / "vendor"}


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_every_file_is_in_the_lock_with_its_hash(folder: Path) -> None:
    lock = json.loads((folder / "lock.json").read_text(encoding="utf-8"))
    locked = {name: file["sha256"] for package in lock for name, file in package["files"].items()}
    there = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.parent != folder
    }
    assert there == locked
    for package in lock:
        assert re.fullmatch(r"[0-9a-f]{64}", package["tarball_sha256"])
        assert any("LICENSE" in name for name in package["files"]), package["package"]


def test_the_dashboard_asks_no_other_host() -> None:
    for path in STATIC.rglob("*"):
        if path.suffix in (".js", ".html", ".css") and "vendor" not in path.parts:
            assert not re.search(r"https?://(?!www\.w3\.org/)", path.read_text(encoding="utf-8")), path
