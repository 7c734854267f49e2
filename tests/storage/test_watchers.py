"""Many who wait for the answer to one question cost as much as one."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.storage.changes import Changes
from coordinator.storage.watchers import Watchers

NEVER = 3600.0


class Source:
    """A number per run that can be asked for, counted, held up and made to fail."""

    def __init__(self) -> None:
        self.value = 0
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()
        self.fault: Exception | None = None

    async def ask(self, run_id: str) -> int:
        self.asked += 1
        value = self.value
        await self.open.wait()
        if self.fault is not None:
            raise self.fault
        return value


async def settled() -> None:
    """Lets everyone run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def changes() -> Changes:
    return Changes(poll_seconds=NEVER)


@pytest.fixture
async def source() -> Source:
    return Source()


async def test_five_hundred_wait_with_one_question_per_change(changes: Changes, source: Source) -> None:
    watchers = Watchers(changes, source.ask)
    waits = [asyncio.create_task(watchers.answer("run", lambda value: value >= 2, NEVER)) for _ in range(500)]
    await settled()
    assert source.asked == 1
    source.value = 1
    changes.announce("run")
    await settled()
    assert source.asked == 2
    assert not any(wait.done() for wait in waits)
    source.value = 2
    changes.announce("run")
    assert await asyncio.wait_for(asyncio.gather(*waits), 10) == [2] * 500
    assert source.asked == 3
    await settled()
    assert watchers._questions == {}


async def test_an_answer_is_never_older_than_the_call(changes: Changes, source: Source) -> None:
    watchers = Watchers(changes, source.ask)
    source.open.clear()
    early = asyncio.create_task(watchers.answer("run", lambda value: True, NEVER))
    await settled()
    source.value = 7  # the question under way has already read 0
    late = asyncio.create_task(watchers.answer("run", lambda value: True, 0))
    await settled()
    source.open.set()
    assert await asyncio.wait_for(asyncio.gather(early, late), 10) == [0, 7]


async def test_at_its_end_a_wait_gets_what_is_true_then(changes: Changes, source: Source) -> None:
    watchers = Watchers(changes, source.ask)
    patient = asyncio.create_task(watchers.answer("run", lambda value: value > 5, NEVER))
    assert await asyncio.wait_for(watchers.answer("run", lambda value: value > 5, 0), 10) == 0
    source.value = 5
    assert await asyncio.wait_for(watchers.answer("run", lambda value: value > 5, 0.05), 10) == 5
    assert not patient.done()
    patient.cancel()
    await asyncio.gather(patient, return_exceptions=True)
    await settled()
    assert watchers._questions == {}


async def test_a_question_that_fails_fails_for_those_who_wait_and_for_nobody_after(
    changes: Changes, source: Source
) -> None:
    watchers = Watchers(changes, source.ask)
    waits = [asyncio.create_task(watchers.answer("run", lambda value: value > 0, NEVER)) for _ in range(3)]
    await settled()
    source.fault = ConnectionResetError("gone")
    changes.announce("run")
    outcomes = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 10)
    assert [type(outcome) for outcome in outcomes] == [ConnectionResetError] * 3
    source.fault = None
    assert await asyncio.wait_for(watchers.answer("run", lambda value: value == 0, NEVER), 10) == 0


async def test_who_leaves_takes_nobody_along(changes: Changes, source: Source) -> None:
    watchers = Watchers(changes, source.ask)
    source.open.clear()
    leaving, staying = (asyncio.create_task(watchers.answer("run", lambda value: value == 0, NEVER)) for _ in range(2))
    await settled()
    leaving.cancel()
    await settled()
    source.open.set()
    assert await asyncio.wait_for(staying, 10) == 0
    assert leaving.cancelled()


async def test_runs_do_not_wait_for_each_other(changes: Changes) -> None:
    stuck = asyncio.Event()

    async def ask(run_id: str) -> str:
        if run_id == "slow":
            await stuck.wait()
        return run_id

    watchers = Watchers(changes, ask)
    slow = asyncio.create_task(watchers.answer("slow", lambda _: True, NEVER))
    await settled()
    assert await asyncio.wait_for(watchers.answer("quick", lambda _: True, NEVER), 10) == "quick"
    stuck.set()
    assert await asyncio.wait_for(slow, 10) == "slow"
