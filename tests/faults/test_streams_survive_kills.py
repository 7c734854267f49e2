"""Replicas are killed under load while a run is watched: every watcher hears of everything, once and in order."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from threading import Event, Thread

from coordinator.client import AsyncCoordinator, Coordinator, Run
from tests.client.runs import new_run
from tests.client.server_process import ServerProcess

WATCHERS = 40
KILLS = 4


def load(urls: str, token: str, run_id: str, number: int, ended: Event) -> None:
    """Opens and aborts updates, one after the other."""
    with Coordinator(urls, token) as coordinator:
        run, count = coordinator.run(run_id), 0
        while not ended.is_set():
            count += 1
            with run.update(f"u{number}-{count}") as update:
                update.abort("enough")


async def watch(urls: list[str], token: str, run_id: str, heard: list[list[int]], last: asyncio.Future[int]) -> None:
    """All watchers, half of them with each replica, until each has heard of the last event."""

    async def one(number: int) -> None:
        order = urls if number % 2 else urls[::-1]
        async with (
            AsyncCoordinator(",".join(order), token) as coordinator,
            aclosing(coordinator.run(run_id).events(0)) as events,
        ):
            async for entry in events:
                heard[number].append(entry.event_no)
                if last.done() and entry.event_no >= last.result():
                    return

    await asyncio.gather(*(one(number) for number in range(WATCHERS)))


def test_every_watcher_hears_of_everything_once_over_kills_of_either_replica(
    replica_pair: tuple[str, list[ServerProcess]],
) -> None:
    _, servers = replica_pair
    urls, token = [server.url for server in servers], servers[0].token
    ended = Event()
    heard: list[list[int]] = [[] for _ in range(WATCHERS)]
    with Coordinator(",".join(urls), token) as coordinator:
        run = new_run(coordinator)
        writers = [Thread(target=load, args=(",".join(urls), token, run.id, n, ended)) for n in range(3)]
        for writer in writers:
            writer.start()
        try:
            asyncio.run(_kill_under_load(servers, urls, token, run, heard, writers, ended))
        finally:
            ended.set()
            for writer in writers:
                writer.join()
        entries = [entry.event_no for entry in run.journal()]
    assert heard == [entries] * WATCHERS
    assert entries == list(range(1, len(entries) + 1))
    assert len(entries) > 100


async def _kill_under_load(
    servers: list[ServerProcess],
    urls: list[str],
    token: str,
    run: Run,
    heard: list[list[int]],
    writers: list[Thread],
    ended: Event,
) -> None:
    last = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(watch(urls, token, run.id, heard, last))
    for kill in range(KILLS):
        server = servers[kill % 2]
        known = max(map(len, heard))
        while min(map(len, heard)) <= known:  # everybody is connected, and hears
            assert not watching.done(), watching
            await asyncio.sleep(0.05)
        server.kill()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.start)
    ended.set()
    for writer in writers:
        await asyncio.to_thread(writer.join)
    last.set_result((await asyncio.to_thread(run.view)).event_no + 1)
    await asyncio.to_thread(run.worker("w1", "w1-1").register, "hand", "1")
    async with asyncio.timeout(120):
        await watching
