"""`run`: preflight, model, fixture, the two arms in turn, the coordinator, the figure. What is there stays."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from worker_agent.closure.arm import Job
from worker_agent.closure.assets import fetch, find
from worker_agent.closure.checks import Check
from worker_agent.closure.figure import draw
from worker_agent.closure.fixture import fixture_path, made_path, read_fixture
from worker_agent.closure.fleet import Fleet
from worker_agent.closure.preflight import EXIT_CODES, exit_code, quick_checks, slow_checks
from worker_agent.closure.profile import ARMS, ClosureError, Profile
from worker_agent.closure.result import ArmResult, CoordinatorResult, now, read_result, write_once
from worker_agent.demo.cast import Cast
from worker_agent.demo.production import plain_environment

Say = Callable[[str], None]
_LOOK_SECONDS = 0.3


class NotReady(Exception):
    """Preflight found a fault that `run` cannot mend."""

    def __init__(self, checks: Sequence[Check]) -> None:
        super().__init__("; ".join(f"{check.name}: {check.detail}" for check in checks if not check.ok))
        self.exit_code = exit_code(checks)


@dataclass(frozen=True)
class Experiment:
    """One experiment: a label below `data`, which holds its results, figure, adapters and logs."""

    label: str
    data: Path

    @property
    def folder(self) -> Path:
        """Where all of it lies."""
        return self.data / self.label

    @property
    def figure(self) -> Path:
        """The drawing of both arms."""
        return self.folder / "figure.png"

    def path(self, part: str) -> Path:
        """The result of an arm, or of the coordinator."""
        return self.folder / f"{part}.json"

    def arms(self) -> list[ArmResult | None]:
        """Both arms, None for one that was not made yet. Raises `ClosureError` as `read_result` does."""
        return [read_result(self.path(arm), ArmResult, self.label, arm) for arm in ARMS]

    def coordinator(self) -> CoordinatorResult | None:
        """The coordinator's part, None while it was not made yet."""
        return read_result(self.path("coordinator"), CoordinatorResult, self.label, "coordinator")

    def begun(self) -> bool:
        """Whether anything of it was made."""
        return any(part is not None for part in (*self.arms(), self.coordinator()))

    def complete(self) -> bool:
        """Whether nothing is left to be made."""
        return all(part is not None for part in (*self.arms(), self.coordinator()))


def run(profile: Profile, experiment: Experiment, say: Say) -> None:
    """Make what is missing of the experiment; what is there is read and left as it is.

    Raises `NotReady`, and `ClosureError` or `DemoError` for a technical failure. A check that does not pass is none.
    """
    if experiment.complete():
        say(f"{experiment.label}: is made, nothing is run again")
        _draw(experiment)
        return
    experiment.folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(experiment.folder / ".lock", timeout=0):
            model = _prepare(profile, experiment, say)
            perform(profile, experiment, model, say)
    except Timeout as error:
        raise ClosureError(f"another process makes {experiment.label}: wait for it, or name another --label") from error


def perform(profile: Profile, experiment: Experiment, model: Path, say: Say) -> None:
    """The arms, the coordinator and the figure, as far as they are missing. After preflight."""
    cast = Cast(experiment.folder / "logs")
    fixture = _fixture(profile, experiment.data, model, cast, say)
    release, retain = experiment.arms()
    if release is None:
        release = _arm(profile, experiment, "release", model, fixture, None, cast, say)
    if retain is None:
        if release.passed and release.initialization is not None:
            initial = release.initialization.adapter_sha256
            retain = _arm(profile, experiment, "retain", model, fixture, initial, cast, say)
        else:
            retain = _skipped(release)
            write_once(experiment.path("retain"), retain)
            say("retain: skipped, since the release arm did not pass")
    if experiment.coordinator() is None:
        write_once(
            experiment.path("coordinator"), _through_coordinator(profile, experiment, model, fixture, release, say)
        )
    _draw(experiment)


def make_fixture_of(profile: Profile, data: Path, say: Say) -> Path:
    """The model's fixture, made now if there is none, with the model fetched if need be."""
    model = find(profile) or fetch(profile, say)
    return _fixture(profile, data, model, Cast(data / "logs"), say)


def _fixture(profile: Profile, data: Path, model: Path, cast: Cast, say: Say) -> Path:
    there = fixture_path(profile, data)
    if there is not None:
        return there
    made = made_path(profile, data)
    say("fixture: the base model answers the 8 questions, once")
    _await(cast, "fixture", ["-m", "worker_agent.closure.making", str(model), profile.dtype, str(made)], profile)
    return made


def _prepare(profile: Profile, experiment: Experiment, say: Say) -> Path:
    """Preflight, with the model fetched if that alone is missing; the model's folder."""
    checks = quick_checks(profile, experiment.data)
    if exit_code(checks) == EXIT_CODES["missing model"]:
        fetch(profile, say)
        checks = quick_checks(profile, experiment.data)
    if exit_code(checks) == 0:
        say("preflight: tokenizer, initialisation, scoring positions and loss, on the CPU")
        checks += slow_checks(profile, experiment.data)
    model = find(profile) if exit_code(checks) == 0 else None
    if model is None:
        raise NotReady(checks)
    return model


def _arm(
    profile: Profile,
    experiment: Experiment,
    arm: str,
    model: Path,
    fixture: Path,
    initial_sha256: str | None,
    cast: Cast,
    say: Say,
) -> ArmResult:
    folder = experiment.folder / "adapters" / arm
    if folder.exists():  # of an attempt that was cut off before it had a result
        shutil.rmtree(folder)
    job = Job.model_validate(
        {
            "label": experiment.label,
            "arm": arm,
            "model": model,
            "device": profile.device,
            "dtype": profile.dtype,
            "fixture": fixture,
            "folder": folder,
            "result": experiment.path(arm),
            "initial_sha256": initial_sha256,
        }
    )
    with tempfile.NamedTemporaryFile("w", dir=experiment.folder, suffix=".job", encoding="utf-8") as file:
        file.write(job.model_dump_json())
        file.flush()
        _await(cast, arm, ["-m", "worker_agent.closure.arm", file.name], profile, say)
    result = read_result(experiment.path(arm), ArmResult, experiment.label, arm)
    if result is None:
        raise ClosureError(f"the {arm} arm left no result: see {cast.logs[arm]}")
    return result


def _await(cast: Cast, name: str, arguments: Sequence[str], profile: Profile, say: Say = lambda _: None) -> None:
    """Run a child to its end; `say` gets a line for each of its stages. Raises `DemoError` if it fails."""
    environment = plain_environment() | ({"CUDA_VISIBLE_DEVICES": ""} if profile.device == "cpu" else {})
    cast.start(name, [sys.executable, *arguments], environment, may_end=True)
    heard = 0
    try:
        while True:
            ended = cast.ended(name)
            lines = cast.told(name)
            for line in lines[heard:]:
                if line["event"] == "stage_done":
                    say(f"{name}: {line['stage']} {line['seconds']} s, {line['rss_mib']:.0f} MiB")
            heard = len(lines)
            if ended:
                return
            time.sleep(_LOOK_SECONDS)
    finally:
        cast.stop([name], 5.0)


def _skipped(release: ArmResult) -> ArmResult:
    return release.model_copy(
        update={
            "arm": "retain",
            "status": "skipped",
            "reason": "the release arm did not pass",
            "created_at": now(),
            "initialization": None,
            "update": None,
            "decision": None,
            "generation_before": (),
            "generation_after": (),
            "log_probs": (),
            "stages": (),
        }
    )


def _through_coordinator(
    profile: Profile, experiment: Experiment, model: Path, fixture: Path, release: ArmResult, say: Say
) -> CoordinatorResult:
    if not release.passed:
        say("coordinator: skipped, since the release arm did not pass")
        return CoordinatorResult(
            run_label=experiment.label, status="skipped", reason="the release arm did not pass", created_at=now()
        )
    adapter = experiment.folder / "adapters" / "release" / "v1"
    if not adapter.is_dir():
        raise ClosureError(f"{adapter} is gone, which the coordinator's part needs: name another --label")
    # A run's name is used up: an attempt that was cut off has left one behind.
    attempt = f"closure-{time.time_ns():x}"
    fleet = Fleet(experiment.folder / "coordinator", attempt, model, profile.dtype, fixture, say)
    return fleet.play(experiment.label, release, adapter, read_fixture(fixture)[0])


def _draw(experiment: Experiment) -> None:
    """The figure, where it is not there and there is something to draw."""
    made = [arm for arm in experiment.arms() if arm is not None and arm.decision is not None]
    if made and not experiment.figure.exists():
        scratch = experiment.folder / f".{os.getpid()}.png"
        draw(made, scratch)
        scratch.replace(experiment.figure)
