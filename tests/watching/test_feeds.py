"""Many readers of one journal ask together, each at his own pace, and a reader's end is his alone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from coordinator.storage.changes import Changes
from coordinator.watching import feeds as module
from coordinator.watching.feeds import Entry, Feeds, Reader, StreamEnded

NEVER = 3600.0


class Source:
    """A journal and tokens, whose questions are counted, held up, and made to fail."""

    def __init__(self) -> None:
        self.entries = 0
        self.ended: set[str] = set()
        self.asked: list[tuple[int, int]] = []
        self.checked = 0
        self.open = asyncio.Event()
        self.open.set()
        self.fault: Exception | None = None

    async def read(self, run_id: str, after: int, limit: int) -> list[Entry]:
        self.asked.append((after, limit))
        await self.open.wait()
        if self.fault is not None:
            raise self.fault
        return [Entry(n, "event", b"%d" % n) for n in range(after + 1, min(self.entries, after + limit) + 1)]

    async def valid(self, token_ids: Collection[str]) -> frozenset[str]:
        self.checked += 1
        return frozenset(token_ids) - self.ended


async def settled() -> None:
    """Lets everyone run until they wait."""
    for _ in range(30):
        await asyncio.sleep(0)


async def read(reader: Reader, upto: int) -> list[int]:
    """The numbers that a reader gets until he has the one that is named."""
    found: list[int] = []
    async with asyncio.timeout(10):
        while not found or found[-1] < upto:
            found += [entry.event_no for entry in await reader.next(NEVER)]
    return found


@pytest.fixture
async def changes(monkeypatch: pytest.MonkeyPatch) -> Changes:
    monkeypatch.setattr(module, "CHECK_SECONDS", NEVER)
    return Changes(poll_seconds=NEVER)


@pytest.fixture
async def source() -> Source:
    return Source()


@pytest.fixture
async def feeds(changes: Changes, source: Source) -> Feeds:
    return Feeds(changes, source.read, source.valid)


async def test_five_hundred_read_with_one_question_per_change(changes: Changes, source: Source, feeds: Feeds) -> None:
    contexts = [feeds.read("run", 0, f"t{n}", 0) for n in range(500)]
    readers = [context.__enter__() for context in contexts]
    reading = [asyncio.create_task(read(reader, 3)) for reader in readers]
    await settled()
    assert (len(source.asked), source.checked) == (1, 1)
    for number in (1, 2, 3):
        source.entries = number
        changes.announce("run")
        await asyncio.sleep(0.05)
    assert await asyncio.gather(*reading) == [[1, 2, 3]] * 500
    assert (len(source.asked), source.checked) == (4, 4)
    changes.announce("run")  # for something that is no entry
    await asyncio.sleep(0.05)
    assert (len(source.asked), source.checked) == (5, 4)
    for context in contexts:
        context.__exit__(None, None, None)
    await settled()
    assert (feeds._feeds, dict(changes._followers)) == ({}, {})


async def test_a_slow_reader_reads_from_the_table_and_nothing_is_kept_for_him(
    changes: Changes, source: Source, feeds: Feeds
) -> None:
    with feeds.read("run", 0, "slow", 0) as slow, feeds.read("run", 0, "quick", 0) as quick:
        for number in range(1, module.KEPT + 51):
            source.entries = number
            changes.announce("run")
            assert await read(quick, number) == [number]
        assert len(feeds._feeds["run"][0]._recent) == module.KEPT
        before = len(source.asked)
        assert await read(slow, source.entries) == list(range(1, source.entries + 1))
        # He was further behind than what is kept, so one page came from the table, and the rest from memory.
        assert source.asked[before:] == [(0, module.PAGE)]


async def test_one_who_comes_with_an_old_number_gets_every_page(source: Source, feeds: Feeds) -> None:
    source.entries = 3 * module.KEPT
    with feeds.read("run", 5, "t", source.entries) as reader:
        assert await read(reader, source.entries) == list(range(6, source.entries + 1))
    with feeds.read("run", source.entries, "t", source.entries) as reader:
        assert await reader.next(NEVER) == []  # the first call says that there is nothing
        assert reader.caught_up


async def test_more_at_once_than_is_kept_is_read_to_the_end(changes: Changes, source: Source, feeds: Feeds) -> None:
    with feeds.read("run", 0, "t", 0) as reader:
        assert await reader.next(NEVER) == []
        source.entries = 2 * module.KEPT + 10
        changes.announce("run")
        assert await read(reader, source.entries) == list(range(1, source.entries + 1))


async def test_who_joins_is_given_nothing_before_his_token_was_looked_at(
    changes: Changes, source: Source, feeds: Feeds
) -> None:
    source.entries = 2
    with feeds.read("run", 0, "valid", 2) as first:
        assert await read(first, 2) == [1, 2]
        source.ended.add("ended")
        with feeds.read("run", 0, "ended", 2) as second, pytest.raises(StreamEnded):
            await second.next(NEVER)
        source.entries = 3
        changes.announce("run")
        assert await read(first, 3) == [3]


async def test_what_is_recorded_after_a_token_s_end_is_not_told(changes: Changes, source: Source, feeds: Feeds) -> None:
    source.entries = 1
    with feeds.read("run", 0, "a", 1) as a, feeds.read("run", 0, "b", 1) as b:
        assert await read(a, 1) == await read(b, 1) == [1]
        source.open.clear()
        changes.announce("run")  # the question is under way while the token ends and the entry is recorded
        await settled()
        source.ended.add("a")
        source.entries = 2
        source.open.set()
        with pytest.raises(StreamEnded):
            await a.next(NEVER)
        assert await read(b, 2) == [2]


async def test_the_end_of_the_server_ends_all_and_those_who_come_later(source: Source, feeds: Feeds) -> None:
    source.open.clear()  # the database does not answer
    with feeds.read("run", 0, "t", 0) as reader:
        reading = asyncio.create_task(reader.next(NEVER))
        await settled()
        feeds.end()
        with pytest.raises(StreamEnded):
            await asyncio.wait_for(reading, 10)
    with feeds.read("run", 0, "t", 0) as late, pytest.raises(StreamEnded):
        await late.next(NEVER)
    source.open.set()
    await settled()
    assert feeds._feeds == {}


async def test_an_absent_database_is_waited_for(
    changes: Changes, source: Source, feeds: Feeds, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "coordinator.watching")
    with feeds.read("run", 0, "t", 0) as reader:
        assert await reader.next(NEVER) == []
        source.fault = ConnectionResetError("gone")
        source.entries = 2
        changes.announce("run")
        assert await reader.next(0.3) == []
        source.fault = None
        assert await read(reader, 2) == [1, 2]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # however many tries
    assert "does not answer, and those who watch run run hear of nothing: gone" in said[0]
    assert "answers again" in said[1]


async def test_a_question_that_takes_long_holds_up_no_keep_alive(source: Source, feeds: Feeds) -> None:
    source.entries = 3 * module.KEPT
    with feeds.read("run", 0, "t", source.entries) as reader:
        await settled()
        source.open.clear()
        assert await reader.next(0.05) == []  # from the table, which does not answer
        assert await reader.next(0.05) == []
        assert source.asked[-1] == (0, module.PAGE)
        count = len(source.asked)
        source.open.set()
        assert [entry.event_no for entry in await reader.next(NEVER)] == list(range(1, module.PAGE + 1))
        assert len(source.asked) == count


async def test_a_fault_that_is_no_absence_ends_the_streams_and_is_logged(
    changes: Changes, source: Source, feeds: Feeds, caplog: pytest.LogCaptureFixture
) -> None:
    with feeds.read("run", 0, "t", 0) as reader:
        assert await reader.next(NEVER) == []
        source.fault = ValueError("a bug")
        changes.announce("run")
        with pytest.raises(StreamEnded):
            await reader.next(NEVER)
    await settled()
    assert feeds._feeds == {}
    assert "cannot be read" in caplog.text
    source.fault = None
    source.entries = 1
    with feeds.read("run", 0, "t", 1) as again:
        assert await read(again, 1) == [1]


async def test_runs_do_not_wait_for_each_other(changes: Changes, source: Source) -> None:
    stuck = asyncio.Event()

    async def entries(run_id: str, after: int, limit: int) -> list[Entry]:
        if run_id == "slow":
            await stuck.wait()
        return await source.read(run_id, after, limit)

    feeds = Feeds(changes, entries, source.valid)
    source.entries = 1
    with feeds.read("slow", 0, "t", 1) as slow, feeds.read("quick", 0, "t", 1) as quick:
        reading = asyncio.create_task(read(slow, 1))
        assert await read(quick, 1) == [1]
        assert not reading.done()
        stuck.set()
        assert await reading == [1]
