"""`python -m worker_agent.demo --data FOLDER [--keep]`, which `coordinator demo` calls."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.client import CoordinatorError
from worker_agent.demo.cast import DemoError
from worker_agent.demo.production import Plot
from worker_agent.demo.story import tell
from worker_agent.models import ModelError, smollm2

_WIDTH = 120  # where the output is no terminal


def main(
    data: Annotated[Path, typer.Option(help="Folder of the coordinator; each start is a run of its own in it.")] = Path(
        ".data"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Leave the coordinator serving at the end.")] = False,
) -> None:
    """Two vLLM workers, a reward process and a verl trainer around one coordinator, on this machine's CPU."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with console.status("model: SmolLM2-135M-Instruct") as status:
            model = smollm2(lambda line: status.update(f"model: {line}"))
        holds = tell(data, Plot(model, "worker_agent.demo.task:SUMS"), console, keep)
    except (DemoError, ModelError, CoordinatorError) as error:
        console.print(f"[red]demo:[/red] {error}", highlight=False, soft_wrap=True)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        console.print("demo: stopped", highlight=False)
        raise SystemExit(130) from None
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    typer.run(main)
