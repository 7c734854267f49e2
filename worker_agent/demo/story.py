"""The demo from start to end: everything is started, watched, done wrong on purpose, and looked up afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from worker_agent.demo.cast import DemoError
from worker_agent.demo.faults import PROBE, Probe
from worker_agent.demo.production import COORDINATOR, REWARDER, TRAINER, WORKERS, Plot, Production
from worker_agent.demo.record import mishaps, promises, read_record
from worker_agent.demo.summary import Seconds, show
from worker_agent.demo.task import named_exercise

Result = TypeVar("Result")
_LIMIT_SECONDS = 900.0
_LOOK_SECONDS = 0.3


def tell(data: Path, plot: Plot, console: Console, keep: bool) -> bool:
    """Put on the demo and print its summary; whether everything that it is to show did happen.

    Raises `DemoError` as soon as that cannot be any more.
    """
    production = Production(data, f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}", plot)
    patience = 2.0  # after a fault or Ctrl-C nobody waits for workers to leave in good order
    try:
        with _Stage(console) as stage:
            probe, hang = _play(production, stage)
            stage.now("the workers hand in what they have, and leave", production.stop_players)
            record = stage.now("the coordinator is asked what happened", lambda: read_record(production.run))
        holds = show(
            console,
            record,
            _seconds(production),
            promises(record, WORKERS, plot.updates),
            mishaps(record, WORKERS, probe.sent, hang),
        )
        if keep:
            _keep(console, production)
        return holds
    finally:
        production.stop(patience)


class _Stage:
    """The lines and the bar that tell what goes on. Elsewhere than on a terminal only the lines appear."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("updates  [bold]{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._bar = self._progress.add_task("starting", total=None)

    def __enter__(self) -> _Stage:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """A line that stays. From any thread."""
        self._progress.console.print(f"[dim]{time.monotonic() - self._started:6.1f} s[/dim]  {line}", highlight=False)

    def doing(self, what: str, done: int | None = None, total: int | None = None) -> None:
        """What the bar says now."""
        self._progress.update(self._bar, description=what, completed=done, total=total)

    def now(self, what: str, act: Callable[[], Result]) -> Result:
        """Do something that may take a while, and say so."""
        self.doing(what)
        self.say(what)
        return act()


def _play(production: Production, stage: _Stage) -> tuple[Probe, str]:
    """Until the trainer and the probe are through. Answers the probe, and the group whose reward was to hang."""
    stage.now("coordinator: starts, with an embedded Postgres and its migrations", production.start_coordinator)
    production.create_run(others=(PROBE,))
    stage.say(f"coordinator: serves {production.url}, run {production.run_id}, a token for each process")
    hang = named_exercise(production.plot.exercise).tasks(1)[0].group_id
    production.start_players(hang)
    stage.say(f"started: {', '.join((*WORKERS, REWARDER, TRAINER))}; logs in {production.folder / 'logs'}")
    probe = Probe(production.run_as(PROBE), WORKERS, stage.say)
    probe.register()
    with _beside(probe) as check_probe:
        _watch(production, stage, check_probe)
    return probe, hang


@contextmanager
def _beside(probe: Probe) -> Iterator[Callable[[], bool]]:
    """The probe on a thread of its own; yields whether it is through, which raises what it raised."""
    with ThreadPoolExecutor(1, thread_name_prefix="probe") as pool:
        playing = pool.submit(probe.play)

        def through() -> bool:
            if playing.done():
                playing.result()
            return playing.done()

        try:
            yield through
        finally:
            probe.stop()


def _watch(production: Production, stage: _Stage, probe_through: Callable[[], bool]) -> None:
    """Show what the processes say, until trainer and probe are through; every child is watched."""
    until = time.monotonic() + _LIMIT_SECONDS
    heard: dict[str, int] = {}
    done = 0
    doing = "engines and trainer start"
    while True:
        ended = production.cast.ended(TRAINER)
        through = probe_through()
        for name in (*WORKERS, TRAINER):
            lines = production.told(name)
            for line in lines[heard.get(name, 0) :]:
                if (text := _spoken(name, line)) is not None:
                    stage.say(text)
                if line["event"] == "stage":
                    doing = f"update {line['update']}: {_DOING[str(line['stage'])]}"
                if line["event"] == "stage_done" and line["stage"] == "activate":
                    done += 1
            heard[name] = len(lines)
        stage.doing(doing, done, production.plot.updates)
        if ended and through:
            return
        if time.monotonic() > until:
            raise DemoError(f"not through after {_LIMIT_SECONDS:g} s: see the logs in {production.folder / 'logs'}")
        time.sleep(_LOOK_SECONDS)


_DOING = {
    "wait": "waits for groups",
    "score": "scores them with the current weights",
    "reserve": "reserves what is admissible",
    "step": "makes one optimizer step",
    "commit": "commits",
    "publish": "publishes the adapter",
    "activate": "waits for the workers' acks",
}


def _spoken(name: str, line: dict[str, object]) -> str | None:
    """A log line as the demo tells it; None: it does not."""
    match line["event"]:
        case "registered":
            return f"{name}: its vLLM engine is up; registered"
        case "policy_confirmed" if line["version"]:
            return f"{name}: loaded, verified and acked version {line['version']}"
        case "generated":
            versions = " and ".join(str(version) for version in line["versions"])
            return f"{name}: generated {line['groups']} groups with version {versions}"
        case "ready":
            return f"{name}: verl is up"
        case "stage_done" if line["stage"] in ("wait", "score", "reserve", "commit", "publish", "activate"):
            return f"{name}: update {line['update']}: {line['stage']} {line['seconds']} s"
        case "stepped":
            return (f"{name}: update {line['update']}: one step on {line['rollouts']} rollouts, "
                    f"{line['changed_tensors']} tensors changed")  # fmt: skip
        case "nothing_to_learn":
            return f"{name}: update {line['update']}: no group had an advantage; all discarded, no new version"
    return None


def _seconds(production: Production) -> Seconds:
    return {
        (int(str(line["update"])), str(line["stage"])): float(str(line["seconds"]))
        for line in production.told(TRAINER)
        if line["event"] == "stage_done"
    }


def _keep(console: Console, production: Production) -> None:
    """Serve until Ctrl-C."""
    console.print(f"\nThe coordinator serves on: [bold]{production.url}/dashboard[/bold], and its API page /docs")
    console.print(f"admin's token: {production.data / 'admin.token'}")
    for name, log in production.cast.logs.items():
        console.print(f"{name}: {log}", highlight=False)
    console.print("Ctrl-C ends it.")
    try:
        while not production.cast.ended(COORDINATOR):
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        console.print("demo: stopped", highlight=False)
