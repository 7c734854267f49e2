"""Rollouts into the coordinator and out of it, over HTTP and beside it the same statements without HTTP.

    python -m benchmarks.ledger

Four producer processes with one connection each send whole groups of 8 rollouts of 512 tokens (ids, log-probs, mask);
rewards follow; then one trainer takes 32 groups at a time, reserves them with current log-probs (the drift gate is on)
and commits, until there are none. Each phase is run three times, in one run of this program with what it is compared
with, since only ratios mean something on a machine that others use too. Bodies are encoded before the clock starts,
and everything is on disk (fsync) before it is answered.

`over HTTP` is the public client and one server process. `functions` are what the endpoints call, on the same database:
decoding and encoding Arrow is in it, HTTP is not. `statements` is the same without decoding: what Postgres and the
road to it cost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import text

from benchmarks import over_http, without_http
from benchmarks.coordinator_here import CoordinatorHere, coordinator_here
from benchmarks.processes import Measured, Processes, Task
from benchmarks.report import Line, as_json, as_text
from benchmarks.workload import ARTIFACT_HASH, GROUP_SIZE, INCARNATION, WORKER, new_run, shares
from coordinator.client import Coordinator
from coordinator.storage.database import connect

PRODUCERS = 4
SMALL, LARGE = 32, 256
WAYS = ("over HTTP", "functions", "statements")


@dataclass(frozen=True)
class Phase:
    """One line of the table, to be run once. `size` is rollouts a call, `processes` None: all."""

    part: str
    way: str
    size: int
    task: Task
    processes: int | None = None


def say(line: str) -> None:
    """Progress goes to stderr, the table to stdout."""
    sys.stderr.write(line + "\n")


def phases(way: str, here: CoordinatorHere, new: Callable[[str], str], json_rollouts: int) -> Iterator[Phase]:
    """All phases of one way, to be run in this order; `new` makes a run with a live worker and answers its id."""
    small, large = new(f"{SMALL}"), new(f"{LARGE}")
    groups = LARGE // GROUP_SIZE
    if way == "over HTTP":
        http = functools.partial(over_http.Address, here.url, here.token)
        yield Phase("in", way, SMALL, over_http.SubmitArrow(http(small), SMALL))
        yield Phase("in", way, LARGE, over_http.SubmitArrow(http(large), LARGE))
        yield Phase("rewards", way, LARGE, over_http.SubmitRewards(http(large), LARGE))
        yield Phase("out", way, LARGE, over_http.Consume(http(large), groups), processes=1)
        json_task = over_http.SubmitJson(http(new("json")), SMALL, json_rollouts // PRODUCERS)
        yield Phase("in, JSON", way, SMALL, json_task)
    else:
        bare = functools.partial(without_http.Address, here.database_url)
        decoding = way == "functions"
        yield Phase("in", way, SMALL, without_http.Submit(bare(small), SMALL, decoding))
        yield Phase("in", way, LARGE, without_http.Submit(bare(large), LARGE, decoding))
        yield Phase("rewards", way, LARGE, without_http.SubmitRewards(bare(large), LARGE))
        yield Phase("out", way, LARGE, without_http.Consume(bare(large), groups, decoding), processes=1)


def make_run(coordinator: Coordinator, run_id: str) -> str:
    """A run whose one worker has confirmed its policy."""
    run = coordinator.create_run(new_run(run_id))
    worker = run.worker(WORKER, INCARNATION)
    worker.register("bench", "1")
    if not worker.ack(0, ARTIFACT_HASH).matching:
        raise RuntimeError("the benchmark's worker could not ack its run's first policy")
    return run_id


def measure(here: CoordinatorHere, rollouts: int, tokens: int, repetitions: int) -> list[Line]:
    """Runs everything: once over a few rollouts to warm up, then the repetitions, each beginning with another way."""
    found: defaultdict[tuple[str, str, int], list[Measured]] = defaultdict(list)
    json_rollouts = max(rollouts // 10, PRODUCERS * GROUP_SIZE)
    with Coordinator(here.url, here.token) as coordinator:
        for repetition in range(repetitions + 1):
            warming = repetition == 0
            count = min(rollouts, 4 * LARGE) if warming else rollouts
            with contextlib.closing(Processes(shares(count, tokens, PRODUCERS), here.cpu_seconds)) as processes:
                first = repetition % len(WAYS)
                for way in WAYS[first:] + WAYS[:first]:
                    prefix = f"{way.replace(' ', '-')}-{repetition}"
                    new = functools.partial(_new_run, coordinator, prefix)
                    for phase in phases(way, here, new, min(json_rollouts, count)):
                        name = f"{phase.part}, {phase.way}, {phase.size} a call"
                        measured = processes.run(name, phase.task, phase.processes)
                        if warming:
                            continue
                        say(f"{repetition} of {repetitions}, {name}: {measured.rate:,.0f} rollouts/s")
                        found[phase.part, phase.way, phase.size].append(measured)
    return [Line(part, way, size, measured) for (part, way, size), measured in sorted(found.items(), key=_order)]


def _new_run(coordinator: Coordinator, prefix: str, name: str) -> str:
    return make_run(coordinator, f"{prefix}-{name}")


def _order(entry: tuple[tuple[str, str, int], object]) -> tuple[int, int, int]:
    part, way, size = entry[0]
    return ("in", "in, JSON", "rewards", "out").index(part), size, WAYS.index(way)


async def _postgres(url: str) -> dict[str, str]:
    """Its version, whether it is durable, and what one durable commit of one row takes on this disk."""
    database = connect(url, pool_size=1)
    try:
        async with database.engine.connect() as connection:
            names = ("server_version", "fsync", "synchronous_commit", "shared_buffers")
            settings = {name: str(await connection.scalar(text(f"SHOW {name}"))) for name in names}
            await connection.execute(text("CREATE TABLE commit_time (n int)"))
            await connection.commit()
            seconds = []
            for number in range(50):
                await connection.execute(text("INSERT INTO commit_time VALUES (:n)"), {"n": number})
                began = time.perf_counter()
                await connection.commit()
                seconds.append(time.perf_counter() - began)
            await connection.execute(text("DROP TABLE commit_time"))
            await connection.commit()
    finally:
        await database.close()
    return settings | {"commit": f"{1e3 * median(seconds):.2f} ms"}


def machine(here: CoordinatorHere) -> dict[str, Any]:
    """What the numbers depend on."""
    postgres = asyncio.run(_postgres(here.database_url))
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
        "load before": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "postgres": ", ".join(f"{name} {value}" for name, value in postgres.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=5000, help="rollouts of each phase (a tenth of it as JSON)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each rollout")
    parser.add_argument("--repetitions", type=int, default=3, help="how often; the table has medians")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    arguments = parser.parse_args()
    least = PRODUCERS * GROUP_SIZE
    if arguments.rollouts < least or arguments.tokens < 4 or arguments.repetitions < 1:
        parser.error(f"at least {least} rollouts of 4 tokens, once")
    with coordinator_here(say) as here:
        about = machine(here)
        about["workload"] = (
            f"{arguments.rollouts} rollouts of {arguments.tokens} tokens in groups of {GROUP_SIZE}, "
            f"{PRODUCERS} producers, 1 trainer; medians of {arguments.repetitions}"
        )
        lines = measure(here, arguments.rollouts, arguments.tokens, arguments.repetitions)
    sys.stdout.write(as_text(about, lines) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(about, lines), indent=2) + "\n")


if __name__ == "__main__":
    main()
