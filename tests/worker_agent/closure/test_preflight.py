"""Preflight names what is at fault by its exit status, and writes nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.worker_agent.closure.small import TINY, keep_fixture, small_fixture
from worker_agent.closure import checks, preflight
from worker_agent.closure.checks import Check
from worker_agent.closure.profile import PROFILES, ClosureError
from worker_agent.learner.learner import Learner
from worker_agent.models import smollm2_folder

pytestmark = pytest.mark.xdist_group("models")

SMOLLM2 = PROFILES["smollm2-135m-instruct"]
NewLearner = Callable[..., Learner]


def fault(checked: list[Check]) -> tuple[int, str]:
    """The exit status and the first fault's words."""
    return preflight.exit_code(checked), next(check.detail for check in checked if not check.ok)


def test_only_the_missing_model_is_exit_4_and_nothing_is_written(tmp_path: Path) -> None:
    environment = os.environ | {"ROLLOUT_MODELS": str(tmp_path / "models")}
    done = subprocess.run(
        [sys.executable, "-m", "worker_agent.cli", "closure", "preflight", "--data", str(tmp_path / "data")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 4, done.stdout + done.stderr
    named = {line[8:].split()[0]: line.split()[0] for line in done.stdout.splitlines()}
    assert named == {
        "packages": "ok",
        "memory": "ok",
        "model": "missing",
        "fixture": "ok",
        "initialisation": "ok",
        "positions": "ok",
        "loss": "ok",
    }
    assert not (tmp_path / "data").exists()


def test_a_model_in_the_cache_is_ready(tmp_path: Path, tiny_model: Path, new_learner: NewLearner,
                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(preflight, "find", lambda _: tiny_model)
    keep_fixture(small_fixture(tiny_model, new_learner()), tmp_path)
    found = preflight.preflight(replace(TINY, memory_bytes=0), tmp_path)
    assert preflight.exit_code(found) == 0
    assert [check.name for check in found] == [
        "packages", "memory", "model", "fixture", "tokenizer", "initialisation", "positions", "loss",
    ]  # fmt: skip


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, words = fault(preflight.preflight(replace(SMOLLM2, packages=("no-such-package",)), tmp_path))
    assert code == 3 and "no-such-package" in words
    monkeypatch.setattr(preflight, "VERL_VERSION", "0.0.1")
    code, words = fault(preflight.quick_checks(SMOLLM2, tmp_path))
    assert code == 3 and "0.0.1" in words


def test_memory(tmp_path: Path) -> None:
    code, words = fault(preflight.quick_checks(replace(SMOLLM2, memory_bytes=2**60), tmp_path))
    assert code == 5 and "needed" in words


def test_a_broken_model_is_not_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_MODELS", str(tmp_path / "models"))
    smollm2_folder().mkdir(parents=True)
    code, words = fault([preflight.check_model(SMOLLM2)])
    assert code == 6 and "config.json" in words


def test_a_fixture_of_another_model(tmp_path: Path, tiny_model: Path, new_learner: NewLearner,
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(preflight, "find", lambda _: tiny_model)
    fixture = small_fixture(tiny_model, new_learner())
    path = keep_fixture(fixture.model_copy(update={"model_sha256": "0" * 64}), tmp_path)
    code, words = fault([preflight.check_fixture(TINY, tmp_path)])
    assert code == 7 and "weights" in words
    path.write_text("{}")
    assert fault([preflight.check_fixture(TINY, tmp_path)])[0] == 7


def test_another_fault_weighs_more_than_a_missing_model() -> None:
    missing = Check("model", False, "", missing=True)
    assert preflight.exit_code([missing, Check("loss", True, "")]) == 4
    assert preflight.exit_code([missing, Check("loss", False, "")]) == 9
    assert preflight.exit_code([Check("memory", False, ""), missing]) == 5
    assert len(set(preflight.EXIT_CODES.values())) == len(preflight.EXIT_CODES)
    assert not {0, 1, 2} & set(preflight.EXIT_CODES.values())


def test_a_fixture_that_the_tokenizer_writes_otherwise(tmp_path: Path, tiny_model: Path,
                                                       new_learner: NewLearner) -> None:  # fmt: skip
    fixture = small_fixture(tiny_model, new_learner())
    assert "8 prompts" in checks.check_tokenizer(keep_fixture(fixture, tmp_path), tiny_model)
    first, *rest = fixture.rollouts
    for change, words in (
        ({"token_ids": (first.token_ids[0] + 1, *first.token_ids[1:])}, "written otherwise"),
        ({"token_ids": (*first.token_ids[:-1], 7)}, "does not end"),
    ):
        damaged = fixture.model_copy(update={"rollouts": (first.model_copy(update=change), *rest)})
        with pytest.raises(ClosureError, match=words):
            checks.check_tokenizer(keep_fixture(damaged, tmp_path), tiny_model)
    with pytest.raises(ClosureError, match="other tasks"):
        checks.check_tokenizer(keep_fixture(fixture.model_copy(update={"rollouts": rest}), tmp_path), tiny_model)


def test_a_learner_that_begins_otherwise_or_scores_otherwise(
    tmp_path: Path, tiny_model: Path, new_learner: NewLearner
) -> None:
    learner = new_learner()
    with pytest.raises(ClosureError, match="different adapters"):
        checks.check_initialisation(learner, new_learner(seed=43))
    assert checks.check_initialisation(learner, new_learner())
    assert checks.check_positions(learner, tiny_model)
    assert checks.check_loss(learner)  # which makes a step
    with pytest.raises(ClosureError, match="from that of the same token"):
        checks.check_positions(learner, tiny_model)


@pytest.mark.parametrize("shift", [1, -1])
def test_positions_that_are_off_by_one_are_found(
    tiny_model: Path, new_learner: NewLearner, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    learner = new_learner()
    right = learner.log_probs
    monkeypatch.setattr(learner, "log_probs", lambda *given: [np.roll(row, shift) for row in right(*given)])
    with pytest.raises(ClosureError, match="from that of the same token"):
        checks.check_positions(learner, tiny_model)
