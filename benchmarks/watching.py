"""How soon those who watch a run hear of a switch: many streams on two replicas over one database.

    python -m benchmarks.watching

Two client processes follow the run by server-sent events, half of their streams with each replica; one worker acks
version after version through the first replica, which makes the switch. Measured is the time from the entry in the
journal (by Postgres's clock, within the transaction of the switch, so that its commit is in it) to the moment at which
a watcher has the event in hand. All clocks are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import traceback
from contextlib import aclosing
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.coordinator_here import CoordinatorHere, coordinator_here
from benchmarks.workload import ARTIFACT_HASH, BASE, INCARNATION, WORKER, new_run
from coordinator.client import AsyncCoordinator, Coordinator, Run, Worker

PROCESSES, REPLICAS = 2, 2
RUN_ID = "watched"
HEARD_SECONDS = 120.0
PAUSE_SECONDS = 0.2
Heard = list[tuple[int, float]]
"""Of each event that was heard: the version, and the seconds since its entry in the journal."""


def say(line: str) -> None:
    """Progress goes to stderr, the result to stdout."""
    sys.stderr.write(line + "\n")


async def _one(coordinator: AsyncCoordinator, last: int, ready: asyncio.Semaphore) -> Heard:
    """One watcher, until it has heard of the last version."""
    heard: Heard = []
    run = coordinator.run(RUN_ID)
    async with aclosing(run.events(0, only=("run.created", "policy.activated"))) as events:
        async for entry in events:
            now = datetime.now(UTC)
            if entry.event == "run.created":
                ready.release()
                continue
            heard.append((int(entry.subject), (now - entry.at).total_seconds()))
            if heard[-1][0] == last:
                return heard
    raise AssertionError("the events of a run do not end by themselves")


async def _many(pipe: Connection, urls: tuple[str, ...], token: str, watchers: int, last: int) -> list[Heard]:
    coordinators = [AsyncCoordinator(url, token) for url in urls]
    ready = asyncio.Semaphore(0)
    try:
        tasks = [asyncio.create_task(_one(coordinators[number % len(urls)], last, ready)) for number in range(watchers)]
        for _ in tasks:
            await ready.acquire()
        pipe.send("ready")
        return await asyncio.gather(*tasks)
    finally:
        for coordinator in coordinators:
            await coordinator.close()


def _watch(pipe: Connection, urls: tuple[str, ...], token: str, watchers: int, last: int) -> None:
    """The life of one client process: "ready" when all of its streams are open, and what they heard."""
    try:
        pipe.send(asyncio.run(_many(pipe, urls, token, watchers, last)))
    except Exception:  # noqa: BLE001  # sent to the parent, which raises it
        pipe.send(traceback.format_exc())


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(HEARD_SECONDS):
        raise RuntimeError(f"a client process said nothing for {HEARD_SECONDS:.0f} s")
    answer = pipe.recv()
    if isinstance(answer, str) and answer != "ready":
        raise RuntimeError(answer)
    return answer


def _publish(run: Run, folder: Path, version: int) -> str:
    """A version that waits for its only ack; answers its hash."""
    files = folder / str(version)
    files.mkdir()
    (files / "adapter.bin").write_bytes(b"%d" % version)
    policy = run.publish(version=version, parent_version=version - 1, folder=files, base_model=BASE)
    run.open_activation(version, f"activate-{version}")
    return policy.artifact_hash


def _switch(worker: Worker, version: int, artifact_hash: str) -> None:
    verdict = worker.ack(version, artifact_hash)
    if verdict.activation is None or not verdict.activation.activated:
        raise RuntimeError(f"version {version} was not activated: {verdict}")


def measure(here: CoordinatorHere, watchers: int, activations: int) -> list[Heard]:
    """What each watcher heard."""
    context = multiprocessing.get_context("spawn")
    with Coordinator(here.urls[0], here.token) as coordinator, tempfile.TemporaryDirectory() as folder:
        run = coordinator.create_run(new_run(RUN_ID))
        worker = run.worker(WORKER, INCARNATION)
        worker.register("bench", "1")
        worker.ack(0, ARTIFACT_HASH)
        pipes, processes = [], []
        for number in range(PROCESSES):
            ours, theirs = context.Pipe()
            share = len(range(number, watchers, PROCESSES))
            arguments = (theirs, here.urls, here.token, share, activations)
            processes.append(context.Process(target=_watch, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        for pipe in pipes:
            _answer(pipe)
        say(f"{watchers} streams are open")
        for version in range(1, activations + 1):
            artifact_hash = _publish(run, Path(folder), version)
            time.sleep(PAUSE_SECONDS)
            _switch(worker, version, artifact_hash)
        heard: list[Heard] = []
        for pipe in pipes:
            heard += _answer(pipe)
        for process in processes:
            process.join(10)
    return heard


def result(here: CoordinatorHere, heard: list[Heard], activations: int) -> dict[str, Any]:
    """The numbers, in milliseconds. Raises RuntimeError if some watcher did not hear of every switch, once."""
    expected = list(range(1, activations + 1))
    for versions in ([version for version, _ in watcher] for watcher in heard):
        if versions != expected:
            raise RuntimeError(f"a watcher heard of {versions}, not of {expected}")
    every = sorted(1e3 * seconds for watcher in heard for _, seconds in watcher)
    last = [1e3 * max(watcher[at][1] for watcher in heard) for at in range(activations)]
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
        "load": [round(load, 2) for load in os.getloadavg()],
        "watchers": len(heard),
        "replicas": len(here.urls),
        "activations": activations,
        "heard_ms": {"p50": every[len(every) // 2], "p99": every[int(0.99 * len(every))], "max": every[-1]},
        "last_heard_ms": {"p50": median(last), "max": max(last)},
    }


def as_text(found: dict[str, Any]) -> str:
    """The numbers for people."""
    heard, last = found["heard_ms"], found["last_heard_ms"]
    return "\n".join(
        [
            f"machine: {found['machine']}, load {found['load'][0]}",
            f"{found['watchers']} watchers on {found['replicas']} replicas, {found['activations']} activations",
            f"from the switch to a watcher:           p50 {heard['p50']:.0f} ms, p99 {heard['p99']:.0f} ms",
            f"from the switch to the last of them:    p50 {last['p50']:.0f} ms, worst {last['max']:.0f} ms",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__.splitlines()[0])
    parser.add_argument("--watchers", type=int, default=200, help="streams, half of them with each replica")
    parser.add_argument("--activations", type=int, default=30, help="switches that are measured")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    arguments = parser.parse_args()
    if arguments.watchers < PROCESSES or arguments.activations < 1:
        parser.error(f"at least {PROCESSES} watchers and one activation")
    with coordinator_here(say, replicas=REPLICAS) as here:
        found = result(here, measure(here, arguments.watchers, arguments.activations), arguments.activations)
    sys.stdout.write(as_text(found) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
