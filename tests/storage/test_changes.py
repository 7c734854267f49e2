"""Waiters of a run hear of it, of nothing else, and not more often than they can bear. No poll wakes anyone here."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.storage.changes import PAUSE_SECONDS, Changes, Follower

NEVER = 3600.0


@pytest.fixture
async def changes() -> Changes:
    return Changes(poll_seconds=NEVER)


async def test_an_announcement_wakes_the_followers_of_its_run_only(changes: Changes) -> None:
    with changes.follow("a") as one, changes.follow("a") as two, changes.follow("b") as other:
        waits = [asyncio.create_task(follower.next(NEVER)) for follower in (one, two, other)]
        await asyncio.sleep(0)
        changes.announce("a")
        await asyncio.wait_for(asyncio.gather(*waits[:2]), 10)
        assert not waits[2].done()
        changes.hear_everything()
        await asyncio.wait_for(waits[2], 10)


async def test_what_is_announced_while_a_follower_asks_is_not_lost(changes: Changes) -> None:
    with changes.follow("a") as follower:
        changes.announce("a")
        await asyncio.wait_for(follower.next(NEVER), 10)
        changes.announce("a")  # within the pause after the first
        await asyncio.wait_for(follower.next(NEVER), 10)
        ended = asyncio.create_task(follower.next(NEVER))
        await asyncio.sleep(3 * PAUSE_SECONDS)
        assert not ended.done()
        ended.cancel()


async def test_without_an_announcement_the_poll_or_the_end_of_the_wait_returns(changes: Changes) -> None:
    with changes.follow("a") as follower, Changes(poll_seconds=0.01).follow("a") as poller:
        await asyncio.wait_for(follower.next(0.01), 10)
        await asyncio.wait_for(poller.next(NEVER), 10)


async def test_a_storm_wakes_each_of_many_once_in_a_pause(changes: Changes) -> None:
    loop = asyncio.get_running_loop()
    wakes = dict.fromkeys(range(500), 0)

    async def follow(number: int) -> None:
        with changes.follow("a") as follower:
            while True:
                await follower.next(NEVER)
                wakes[number] += 1

    tasks = [asyncio.create_task(follow(number)) for number in wakes]
    await asyncio.sleep(0)
    began = loop.time()
    for _ in range(100):
        changes.announce("a")
        await asyncio.sleep(0.01)
    bearable = (loop.time() - began) / PAUSE_SECONDS + 2
    assert min(wakes.values()) >= 2
    assert max(wakes.values()) <= bearable
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_nothing_is_kept_of_runs_that_nobody_follows(changes: Changes) -> None:
    followers: list[Follower] = [changes.follow(f"run-{number}") for number in range(100)]
    for number, follower in enumerate(followers):
        with follower:
            changes.announce(f"run-{number}")
    for number in range(100, 200):
        changes.announce(f"run-{number}")
    assert changes.take_untold() == {f"run-{number}" for number in range(200)}
    await asyncio.sleep(3 * PAUSE_SECONDS)
    assert [len(kept) for kept in (changes._followers, changes._resting, changes._untold)] == [0, 0, 0]
