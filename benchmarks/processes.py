"""Processes that stay for the whole benchmark: each prepares a task, waits for the start, and times its calls."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from typing import Protocol

from benchmarks.workload import Share

Answer = tuple[list[float], dict[str, list[float]], float]
START_SECONDS = 120.0
PROGRESS_SECONDS = 2.0


@dataclass
class Times:
    """What one process measured: seconds of each call, and of each stage within it."""

    done: Synchronized[int]
    calls: list[float] = field(default_factory=list)
    stages: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def call(self, began: float, rollouts: int) -> None:
        """Counts one call over this many rollouts that began at this time of `time.perf_counter` and ends now."""
        self.calls.append(time.perf_counter() - began)
        with self.done.get_lock():
            self.done.value += rollouts

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one part of a call."""
        began = time.perf_counter()
        yield
        self.stages[name].append(time.perf_counter() - began)


class Task(Protocol):
    """One phase, as every process of it runs it."""

    def prepared(self, share: Share) -> AbstractContextManager[Callable[[Times], None]]:
        """Makes payloads and connections; what it yields is run once, with the clock on."""


@dataclass(frozen=True)
class Measured:
    """One phase, once: wall seconds from the start until the last process was done; all calls of all processes.

    `cpu_seconds` are of the processor, by who spent them: these processes (`callers`), and whom `cpu` names.
    """

    rollouts: int
    seconds: float
    calls: list[float]
    stages: dict[str, list[float]]
    cpu_seconds: dict[str, float]

    @property
    def rate(self) -> float:
        """Rollouts per second."""
        return self.rollouts / self.seconds


class BenchmarkError(RuntimeError):
    """A process could not do its part; the message is its traceback."""


def _work(pipe: Connection, share: Share, done: Synchronized[int]) -> None:
    """The life of one process: a task, "ready", the start, the times; until the pipe is closed."""
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        try:
            with task.prepared(share) as run:
                pipe.send(None)
                pipe.recv()
                times = Times(done)
                spent = time.process_time()
                run(times)
                pipe.send((times.calls, dict(times.stages), time.process_time() - spent))
        except EOFError:
            return
        except Exception:  # noqa: BLE001  # sent to the parent, which raises it
            pipe.send(traceback.format_exc())


class Processes:
    """As many processes as there are shares, each with its share of the rollouts."""

    def __init__(self, shares: list[Share], cpu: Callable[[], dict[str, float]]) -> None:
        self._cpu = cpu
        context = multiprocessing.get_context("spawn")
        self._done: Synchronized[int] = context.Value("q", 0)
        self._pipes: list[Connection] = []
        self._processes = []
        for share in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, share, self._done), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.rollouts = sum(len(share.numbers) for share in shares)

    def close(self) -> None:
        """Ends them all."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def run(self, name: str, task: Task, processes: int | None = None) -> Measured:
        """Runs the task in all processes, or in the first few, and says every 2 s how far it is."""
        pipes = self._pipes[:processes]
        for pipe in pipes:
            pipe.send(task)
        for pipe in pipes:
            _answer(pipe, START_SECONDS)
        self._done.value = 0
        before = self._cpu()
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send("start")
        waiting = list(pipes)
        calls: list[float] = []
        stages: defaultdict[str, list[float]] = defaultdict(list)
        spent = 0.0
        while waiting:
            ready = [pipe for pipe in wait(waiting, PROGRESS_SECONDS) if isinstance(pipe, Connection)]
            if not ready:
                passed = time.perf_counter() - began
                sys.stderr.write(f"  {name}: {self._done.value} rollouts, {self._done.value / passed:,.0f}/s\n")
            for pipe in ready:
                waiting.remove(pipe)
                theirs, parts, processor = _answer(pipe, 0)
                calls += theirs
                spent += processor
                for stage, times in parts.items():
                    stages[stage] += times
        seconds = time.perf_counter() - began
        after = self._cpu()
        cpu = {"callers": spent} | {name: after[name] - before[name] for name in before}
        return Measured(self._done.value, seconds, calls, dict(stages), cpu)


def _answer(pipe: Connection, seconds: float) -> Answer:
    try:
        if not pipe.poll(seconds):
            raise BenchmarkError(f"a process was not ready within {seconds:.0f} s")
        answer = pipe.recv()
    except EOFError as error:
        raise BenchmarkError("a process of the benchmark has died") from error
    if isinstance(answer, str):
        raise BenchmarkError(answer)
    return answer if answer is not None else ([], {}, 0.0)
