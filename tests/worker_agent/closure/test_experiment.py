"""The whole of it at tiny size, in real processes, and what is done when there is a result or none may be made."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.worker_agent.closure.small import TINY, arm_result, keep_fixture, small_fixture
from worker_agent.closure.arm import Job
from worker_agent.closure.experiment import Experiment, perform, run
from worker_agent.closure.profile import ClosureError
from worker_agent.closure.result import ArmResult, write_once
from worker_agent.engines.lora_digest import digest_of_folder
from worker_agent.learner.learner import Learner

pytestmark = pytest.mark.xdist_group("models")

NewLearner = Callable[..., Learner]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The results and the figure, with the time of their last change."""
    files = [*folder.glob("*.json"), folder / "figure.png"]
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def test_both_arms_and_the_coordinator(tmp_path: Path, tiny_model: Path, new_learner: NewLearner) -> None:
    keep_fixture(small_fixture(tiny_model, new_learner()), tmp_path)
    experiment = Experiment("tiny", tmp_path)
    lines: list[str] = []
    perform(TINY, experiment, tiny_model, lines.append)

    release, retain = experiment.arms()
    through = experiment.coordinator()
    assert release is not None and retain is not None and through is not None
    assert release.passed and retain.passed
    assert release.initialization == retain.initialization
    assert release.update and retain.update and release.update.after_sha256 == retain.update.after_sha256
    assert (release.update.changed_tensors, release.update.tensors, release.update.supervised_tokens) == (4, 8, 12)
    names = {arm.arm: [stage.name for stage in arm.stages] for arm in (release, retain)}
    assert [name for name in names["release"] if name not in names["retain"]] == ["release", "resume"]
    assert names["release"].index("release") < names["release"].index("update") < names["release"].index("sync")
    for arm in (release, retain):
        assert arm.decision is not None
        comparisons, sync = arm.decision.comparisons, arm.decision.sync_rpc_and_version
        assert comparisons.same_version_before.tokens == 32
        assert comparisons.change.max_abs_error is not None and comparisons.change.max_abs_error < 1e-3
        adapter = experiment.folder / "adapters" / arm.arm / "v1"
        assert sync.engine_digest_after == digest_of_folder(adapter, "float32") != sync.engine_digest_before
        assert sync.memory_released == (arm.arm == "release")
        assert all(row.learner_after != row.learner_before for row in arm.log_probs)
    assert release.decision is not None
    assert through.passed and through.adapter_sha256 == release.update.after_sha256
    assert {(row.rollout_id, row.verdict == "reserved") for row in through.rollouts} == {
        (row.rollout_id, row.accepted) for row in release.decision.admission
    }
    assert {row.worker_id for row in through.rollouts} == {"worker-1", "worker-2"}
    assert experiment.figure.read_bytes().startswith(b"\x89PNG")

    made = contents(experiment.folder)
    run(TINY, experiment, lines.append)  # which has no model of that name: it reads
    assert contents(experiment.folder) == made
    assert "nothing is run again" in lines[-1]
    shown = subprocess.run(
        [sys.executable, "-m", "worker_agent.cli", "closure", "show", "--label", "tiny", "--data", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert release.update.after_sha256 in shown and "did not pass" not in shown


def test_an_arm_that_begins_otherwise_is_stopped_before_training(
    tmp_path: Path, tiny_model: Path, new_learner: NewLearner
) -> None:
    fixture = keep_fixture(small_fixture(tiny_model, new_learner()), tmp_path)
    job = Job(
        label="tiny", arm="retain", model=tiny_model, device="cpu", dtype="float32", fixture=fixture,
        folder=tmp_path / "adapters", result=tmp_path / "retain.json", initial_sha256="0" * 64,
    )  # fmt: skip
    (tmp_path / "job").write_text(job.model_dump_json())
    subprocess.run([sys.executable, "-m", "worker_agent.closure.arm", str(tmp_path / "job")], timeout=120, check=True)
    result = ArmResult.model_validate_json((tmp_path / "retain.json").read_bytes())
    assert (result.status, result.update, result.decision) == ("stopped", None, None)
    assert result.reason is not None and "0" * 64 in result.reason
    assert [path.name for path in job.folder.iterdir()] == ["v0"]


def test_nothing_follows_a_release_arm_that_did_not_pass(
    tmp_path: Path, tiny_model: Path, new_learner: NewLearner
) -> None:
    keep_fixture(small_fixture(tiny_model, new_learner()), tmp_path)
    experiment = Experiment("tiny", tmp_path)
    write_once(experiment.path("release"), arm_result("tiny", error=1.0))
    before = experiment.path("release").read_bytes()
    perform(TINY, experiment, tiny_model, lambda _: None)
    _, retain = experiment.arms()
    through = experiment.coordinator()
    assert retain is not None and (retain.status, retain.decision) == ("skipped", None)
    assert through is not None and through.status == "skipped"
    assert experiment.path("release").read_bytes() == before
    assert experiment.figure.exists()
    assert not list((experiment.folder / "logs").iterdir())


def test_a_result_of_another_label_is_an_error_and_stays(tmp_path: Path) -> None:
    experiment = Experiment("mine", tmp_path)
    write_once(experiment.path("release"), arm_result("another"))
    before = experiment.path("release").read_bytes()
    with pytest.raises(ClosureError, match="run_label 'another'"):
        run(TINY, experiment, lambda _: None)
    assert experiment.path("release").read_bytes() == before


@pytest.mark.parametrize("command", ["show", "run"])
def test_what_cannot_be_read_is_exit_1(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "release.json").write_text('{"schema_version": 9}')
    done = subprocess.run(
        [sys.executable, "-m", "worker_agent.cli", "closure", command, "--label", "one", "--data", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "schema_version 9" in done.stdout, done.stdout + done.stderr
    assert (folder / "release.json").read_text() == '{"schema_version": 9}'


def test_show_without_a_result(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker_agent.cli", "closure", "show", "--data", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "there is no result" in done.stdout
    assert not list(tmp_path.iterdir())


def test_show_needs_neither_model_nor_torch(tmp_path: Path) -> None:
    write_once(tmp_path / "one" / "release.json", arm_result("one", grad_norm=float("nan")))
    program = (
        "import sys\n"
        "from worker_agent.closure.cli import app\n"
        "try: app(['show', '--label', 'one', '--data', sys.argv[1]])\n"
        "except SystemExit as end: print('exit', end.code)\n"
        "print('loaded', sorted({'torch', 'vllm', 'verl', 'transformers', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-2:] == ["exit 0", "loaded []"], done.stdout + done.stderr
    assert "not finite" in done.stdout and "did not pass" in done.stdout
