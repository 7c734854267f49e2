"""Model folders: made once, whole or not at all, and identified by what they contain."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from worker_agent import models

pytestmark = pytest.mark.xdist_group("models")


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tiny model that a test may damage, with a hash memo of its own."""
    monkeypatch.setenv("ROLLOUT_MODELS", str(tmp_path / "cache"))
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_tiny_qwen2_is_the_same_bytes_everywhere(tiny_model: Path, tmp_path: Path) -> None:
    again = models.tiny_qwen2(tmp_path / "again")
    assert {f.name: f.read_bytes() for f in tiny_model.iterdir()} == {f.name: f.read_bytes() for f in again.iterdir()}


def test_tiny_qwen2_has_no_logit_without_a_token(tiny_model: Path) -> None:
    identity = models.identify(tiny_model)
    assert identity.vocab_size == len(AutoTokenizer.from_pretrained(tiny_model))
    assert (identity.name, identity.revision) == ("tiny-qwen2", "seed-0")


def test_two_processes_make_one_folder(tmp_path: Path) -> None:
    program = "import sys, pathlib, worker_agent.models as m; m.tiny_qwen2(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(tmp_path / "model")]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert models.identify(tmp_path / "model").vocab_size > 0
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["model"]


def test_an_interrupted_conversion_leaves_no_folder(tmp_path: Path) -> None:
    def write(into: Path) -> None:
        (into / "config.json").write_text("{}")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models._make_once(tmp_path / "model", write, print)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_smollm2_comes_from_the_wheel() -> None:
    lines: list[str] = []
    folder = models.smollm2(lines.append)
    assert lines == [] or lines[-1].endswith("ready")
    identity = models.identify(folder)
    assert identity.name == "SmolLM2-135M-Instruct" and "Q4_1" in identity.revision
    assert identity.vocab_size == 49152
    # Converted by the pinned transformers, the weights are always these.
    assert identity.sha256 == "fbfc93441cb417614052ef770b3b06b05ca22ecd6a40ab8dfdaf97a3d6d3f04a"
    assert models.smollm2(lambda line: pytest.fail(f"converted twice: {line}")) == folder


def test_identity_follows_the_weights_although_hashes_are_remembered(model: Path) -> None:
    first = models.identify(model)
    assert models.identify(model) == first
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = models.identify(model)
    assert changed.sha256 != first.sha256
    assert changed.tokenizer_hash == first.tokenizer_hash


def test_remembered_hashes_are_really_used(model: Path, tmp_path: Path) -> None:
    first = models.identify(model)
    (memo,) = (tmp_path / "cache" / "identities").iterdir()
    content = json.loads(memo.read_text())
    content["model.safetensors"]["sha256"] = "0" * 64
    memo.write_text(json.dumps(content))
    assert models.identify(model).sha256 != first.sha256


def test_the_chat_template_has_a_hash_of_its_own(model: Path) -> None:
    first = models.identify(model)
    template = model / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    without = models.identify(model)
    assert without.chat_template_hash != first.chat_template_hash
    assert (without.sha256, without.tokenizer_hash) == (first.sha256, first.tokenizer_hash)
    # The older place, as plain text and as a list of named templates.
    config = json.loads((model / "tokenizer_config.json").read_text())
    for value in (text, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": text}]):
        (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": value}))
        assert models.identify(model).chat_template_hash == first.chat_template_hash


def test_a_snapshot_of_the_hub_keeps_its_name_and_commit(model: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--Qwen--Qwen2-0.5B" / "snapshots" / commit
    shutil.copytree(model, snapshot, ignore=shutil.ignore_patterns(models.SOURCE_FILE))
    identity = models.identify(snapshot)
    assert (identity.name, identity.revision) == ("Qwen/Qwen2-0.5B", commit)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(model: Path, missing: str) -> None:
    os.unlink(model / missing)
    with pytest.raises(models.ModelError, match=missing.removeprefix("model")):
        models.identify(model)
