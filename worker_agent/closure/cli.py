"""`worker-agent closure preflight|run|show|fixture`."""

from __future__ import annotations

import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from coordinator.client import CoordinatorError
from worker_agent.closure.experiment import Experiment, NotReady, make_fixture_of, run
from worker_agent.closure.preflight import exit_code, preflight
from worker_agent.closure.profile import PROFILES, ClosureError
from worker_agent.closure.show import show_arm, show_coordinator
from worker_agent.demo.cast import DemoError

app = typer.Typer(
    no_args_is_help=True,
    help="One real update carried from learner to engine, and what that does to old rollouts: evidence that the "
    "whole chain holds, made here.",
)
_WIDTH = 140  # where the output is no terminal

ModelName = StrEnum("ModelName", {name: name for name in PROFILES})  # type: ignore[misc]  # names from data

ModelOption = Annotated[ModelName, typer.Option("--model", help="SmolLM2 runs on a CPU, Qwen on a GPU.")]
DataOption = Annotated[Path, typer.Option("--data", help="Folder of all experiments.")]
LabelOption = Annotated[
    str | None, typer.Option("--label", help="Name of this experiment; left out: the model and its device.")
]
_SMALL = ModelName("smollm2-135m-instruct")
_DATA = Path(".closure")


@app.command("preflight")
def preflight_command(model: ModelOption = _SMALL, data: DataOption = _DATA) -> None:
    """Say whether the experiment can be made here. Writes nothing.

    Exit status: 0 ready, 4 only the model is missing; 3 packages, 5 memory, 6 model, 7 fixture, 8 tokenizer, 9 loss,
    10 positions, 11 initialisation; 1 the checks themselves broke down.
    """
    console = _console()
    try:
        checks = preflight(PROFILES[model.value], data)
    except ClosureError as error:
        _failed(console, error)
    for check in checks:
        mark = (
            "[green]ok[/green]     "
            if check.ok
            else "[yellow]missing[/yellow]"
            if check.missing
            else "[red]FAULT[/red]  "
        )
        console.print(f"{mark} {check.name:<15} {escape(check.detail)}", highlight=False, soft_wrap=True)
    raise SystemExit(exit_code(checks))


@app.command("run")
def run_command(model: ModelOption = _SMALL, label: LabelOption = None, data: DataOption = _DATA) -> None:
    """Make the experiment, or what is missing of it, and show it. A result that is there is read, never overwritten.

    Exit status: 0 made, whether or not every check passed; 1 a technical failure; 3 to 11 as preflight has them.
    """
    console = _console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    profile = PROFILES[model.value]
    experiment = Experiment(label or profile.label, data)
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.1f} s[/dim]  {escape(line)}", highlight=False)

    try:
        run(profile, experiment, say)
        _show(console, experiment)
    except NotReady as fault:
        console.print(f"[red]closure:[/red] {escape(str(fault))}", highlight=False, soft_wrap=True)
        raise SystemExit(fault.exit_code) from fault
    except (ClosureError, CoordinatorError, DemoError, OSError) as error:
        _failed(console, error)
    except KeyboardInterrupt:
        console.print("closure: stopped", highlight=False)
        raise SystemExit(130) from None


@app.command("show")
def show_command(
    label: Annotated[str, typer.Option("--label", help="Name of the experiment.")] = PROFILES[_SMALL.value].label,
    data: DataOption = _DATA,
) -> None:
    """Show a result from its files: no model, no GPU.

    Exit status: 0 shown, 1 there is none, or it is of another schema version or label.
    """
    console = _console()
    try:
        _show(console, Experiment(label, data))
    except (ClosureError, OSError) as error:
        _failed(console, error)


@app.command("fixture")
def fixture_command(model: ModelOption = _SMALL, data: DataOption = _DATA) -> None:
    """Make the fixture of a model for which there is none yet, fetching the model if need be.

    `run` does so by itself. Exit status: 0 there is one, 1 a technical failure.
    """
    console = _console()
    try:
        path = make_fixture_of(PROFILES[model.value], data, lambda line: console.print(escape(line), highlight=False))
    except (ClosureError, DemoError, OSError) as error:
        _failed(console, error)
    console.print(str(path), highlight=False, soft_wrap=True)


def _show(console: Console, experiment: Experiment) -> None:
    arms, coordinator = experiment.arms(), experiment.coordinator()
    if not experiment.begun():
        raise ClosureError(
            f"there is no result {experiment.label} in {experiment.data}: `worker-agent closure run` makes one, and "
            f"the published one is shown with --data docs/closure"
        )
    for arm in arms:
        if arm is not None:
            show_arm(console, arm)
    if coordinator is not None:
        show_coordinator(console, coordinator)
    if experiment.figure.exists():
        console.print(f"figure: {experiment.figure}", highlight=False, soft_wrap=True)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


def _failed(console: Console, error: Exception) -> None:
    console.print(f"[red]closure:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise SystemExit(1) from error
