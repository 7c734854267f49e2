"""Models that are there, that are not, and that cannot be had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker_agent.closure.assets import find
from worker_agent.closure.profile import PROFILES
from worker_agent.models import smollm2

QWEN = PROFILES["qwen2.5-0.5b-instruct"]
assert QWEN.repository is not None and QWEN.revision is not None
_PROGRAM = (
    "from worker_agent.closure.assets import fetch, find\n"
    "from worker_agent.closure.profile import PROFILES, ClosureError\n"
    f"qwen = PROFILES[{QWEN.name!r}]\n"
    "print(find(qwen))\n"
    "try: fetch(qwen, print)\n"
    "except ClosureError as error: print('refused', str(error)[:60])\n"
)


def test_a_hub_that_is_away_is_one_line(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
    environment |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}  # nothing listens there
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "None", done.stderr
    assert lines[-1].startswith(f"refused {QWEN.repository} cannot be fetched"), done.stdout + done.stderr


def test_a_download_that_broke_off_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--Qwen--Qwen2.5-0.5B-Instruct" / "snapshots" / str(QWEN.revision)
    assert find(QWEN) is None
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert find(QWEN) is None
    (folder / "model.safetensors").write_bytes(b"")
    assert find(QWEN) == folder


def test_the_small_model_is_in_the_cache_once_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(PROFILES["smollm2-135m-instruct"]) == smollm2(lambda _: None)
    monkeypatch.setenv("ROLLOUT_MODELS", str(tmp_path))
    assert find(PROFILES["smollm2-135m-instruct"]) is None
