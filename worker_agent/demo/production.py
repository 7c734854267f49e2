"""One run with its processes: what the demo puts on, and what the test puts on at small size."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from coordinator.client import Coordinator, Run
from coordinator.wire.runs import CreateRun, RunSettings
from worker_agent.contract import run_of
from worker_agent.demo.cast import Cast, DemoError
from worker_agent.demo.task import named_exercise
from worker_agent.models import identify

COORDINATOR, REWARDER, TRAINER = "coordinator", "rewarder", "trainer"
WORKERS = ("worker-1", "worker-2")
GROUP_SIZE = 4
_START_SECONDS = 90.0
_TASKS_PER_WORKER = 200  # more than any run here generates; capacity tickets are the brake


@dataclass(frozen=True)
class Plot:
    """What is put on: a model folder, an exercise by its `module:attribute`, and how much of it."""

    model: Path
    exercise: str
    updates: int = 3
    groups: int = 8


class Production:
    """The processes of one run on the data folder of a coordinator."""

    def __init__(self, data: Path, run_id: str, plot: Plot) -> None:
        self.data = data.absolute()
        self.run_id = run_id
        self.plot = plot
        self.folder = self.data / "demo" / run_id
        self.cast = Cast(self.folder / "logs")
        self.coordinator: Coordinator
        self._tokens: dict[str, str] = {}

    @property
    def url(self) -> str:
        """The coordinator's address."""
        return (self.data / "address").read_text(encoding="utf-8").strip()

    @property
    def run(self) -> Run:
        """The run, as an admin sees it."""
        return self.coordinator.run(self.run_id)

    def start_coordinator(self, between: Callable[[], None] = lambda: None) -> None:
        """Start the coordinator, its Postgres with it, and wait until it serves; `between` is called meanwhile."""
        if self._ready():
            raise DemoError(f"a coordinator serves {self.data} already ({self.url}): stop it, or name another --data")
        self.cast.start(
            COORDINATOR,
            [sys.executable, "-m", "coordinator.cli", "serve", "--port", "0", "--data", str(self.data)],
            plain_environment(),
            last_signal=signal.SIGTERM,  # it stops its Postgres in good order
        )
        until = time.monotonic() + _START_SECONDS
        while not self._ready():
            self.cast.check()
            if time.monotonic() > until:
                raise DemoError(
                    f"{COORDINATOR} was not ready in {_START_SECONDS:g} s: see {self.cast.logs[COORDINATOR]}"
                )
            between()
            time.sleep(0.1)
        admin = (self.data / "admin.token").read_text(encoding="utf-8").strip()
        self.coordinator = Coordinator(self.url, admin)

    def create_run(self, others: tuple[str, ...] = ()) -> None:
        """Create the run with its admission rule, and a token for each process and each of the `others` (workers)."""
        self.coordinator.create_run(
            CreateRun(
                run_id=self.run_id,
                settings=RunSettings(
                    max_lag=1,
                    max_drift=0.5,
                    group_size=GROUP_SIZE,
                    max_attempts=1,
                    min_usable=2,
                    groups_per_update=self.plot.groups,
                ),
                **run_of(identify(self.plot.model)),
            )
        )
        for name in (*WORKERS, *others):
            self.create_token(name, "worker", name)
        self.create_token(REWARDER, "reward")
        self.create_token(TRAINER, "trainer")

    def run_as(self, name: str) -> Run:
        """The run, as the holder of this process's token sees it."""
        # Impatient: a coordinator that died ends the demo, and nobody is to wait for its answer before that.
        return Coordinator(self.url, self._tokens[name], retry_seconds=5.0).run(self.run_id)

    def start_players(self, hang: str | None = None) -> None:
        """Start workers, rewarder and trainer. The check of the group `hang`'s first member hangs."""
        exercise = named_exercise(self.plot.exercise)
        tasks = exercise.tasks(_TASKS_PER_WORKER * len(WORKERS))
        shared = ["--run", self.run_id, "--model", str(self.plot.model)]
        for index, name in enumerate(WORKERS):
            file = self.folder / f"{name}.tasks"
            mine = tasks[index :: len(WORKERS)]
            file.write_text("".join(f"{task.model_dump_json()}\n" for task in mine), encoding="utf-8")
            stops = [argument for text in exercise.stop for argument in ("--stop", text)]
            self.start(name, "worker_agent.cli", "run", *shared, "--worker-id", name, "--tasks", str(file),
                        "--data", str(self.folder / "workers"), "--max-tokens", str(exercise.max_tokens), *stops,
                        "--threads", "1", threads=1)  # fmt: skip
        hanging = [] if hang is None else ["--hang", hang]
        self.start(REWARDER, "worker_agent.demo.rewarder", *shared, "--exercise", self.plot.exercise, *hanging)
        waits = [argument for name in WORKERS for argument in ("--worker", name)]
        self.start(TRAINER, "worker_agent.demo.trainer", *shared, "--out", str(self.folder / "adapters"),
                    "--updates", str(self.plot.updates), "--groups", str(self.plot.groups), *waits,
                    threads=2, may_end=True)  # fmt: skip

    def stop_players(self) -> None:
        """Let the workers hand in what they have and leave, and end the others."""
        self.cast.stop([TRAINER, REWARDER, *WORKERS], patience_seconds=30.0)

    def stop(self, patience_seconds: float = 30.0) -> None:
        """End everything that still runs."""
        self.cast.stop([TRAINER, REWARDER, *WORKERS], patience_seconds)
        self.cast.stop([COORDINATOR], 30.0)

    def told(self, name: str) -> list[dict[str, object]]:
        """The JSON lines in a child's log so far, oldest first; what its libraries print is left out."""
        return self.cast.told(name)

    def create_token(self, name: str, role: str, worker_id: str | None = None) -> None:
        """A token of this run for the process `name`, which `start` hands to it."""
        created = self.coordinator.create_token(
            f"{self.run_id}-{name}",
            role,  # type: ignore[arg-type]  # one of four words, written above
            run_id=self.run_id,
            worker_id=worker_id,
        )
        self._tokens[name] = created.token

    def start(self, name: str, module: str, *arguments: str, threads: int = 1, may_end: bool = False) -> None:
        """Start a Python module as the process `name`, with its token and the coordinator's address."""
        environment = plain_environment() | {
            "COORDINATOR_URL": self.url,
            "COORDINATOR_TOKEN": self._tokens[name],  # not in the process list
            "OMP_NUM_THREADS": str(threads),
        }
        self.cast.start(name, [sys.executable, "-m", module, *arguments], environment, may_end=may_end)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5.0, trust_env=False).status_code == 200
        except (OSError, httpx.HTTPError):
            return False


def plain_environment() -> dict[str, str]:
    """This process's environment without what would send a child to another coordinator or database."""
    foreign = ("COORDINATOR_", "WORKER_", "DATABASE_URL")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
