"""The async client against a real coordinator: what its source cannot share with the sync one, and the whole path."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.client import (
    AsyncCoordinator,
    AsyncRun,
    Candidates,
    Coordinator,
    LeaseExpired,
    Refused,
    UpdateFenced,
)
from coordinator.wire.rollouts import Reward
from coordinator.wire.runs import CreateRun, FirstPolicy, RunSettings
from coordinator.wire.updates import Discard
from tests.client.relay import Relay
from tests.client.runs import BASE, CONTRACT, LOG_PROB, group, new_run, new_worker, rewarded_groups, write_adapter
from tests.client.server_process import ServerProcess


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[AsyncCoordinator]:
    async with AsyncCoordinator(server.url, server.token) as client:
        yield client


def current_of(candidates: Candidates) -> list[np.ndarray]:
    return [np.full(len(ids), LOG_PROB + 0.01) for ids in candidates.token_ids]


def prepared(coordinator: Coordinator, client: AsyncCoordinator, groups: int = 1, **settings: object) -> AsyncRun:
    """A run with rewarded groups, made by the sync client beforehand."""
    run = new_run(coordinator, **settings)
    rewarded_groups(run, new_worker(run), groups)
    return client.run(run.id)


def left_over() -> set[str]:
    """Names of the tasks of this loop beside the test's own."""
    return {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}}


async def seen(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


async def test_the_whole_path(client: AsyncCoordinator, tmp_path: Path) -> None:
    run = await client.create_run(
        CreateRun(
            run_id="async-path",
            settings=RunSettings(group_size=2),
            contract=CONTRACT,
            vocab_size=100,
            policy=FirstPolicy(base_model=BASE),
        )
    )
    assert "async-path" in {view.run_id for view in await client.runs()}
    worker = run.worker("w1", "w1-1")
    await worker.register("hand", "1")
    active = (await run.view()).active
    assert (await worker.ack(active.version, active.artifact_hash)).matching
    rollouts = [r for name in ("a", "b") for r in group(worker, active, name)]  # type: ignore[arg-type]
    assert {v.verdict for v in (await run.submit(rollouts)).verdicts} == {"accepted"}
    rewards = [
        Reward(rollout_id=r.rollout_id, status="ok", value=1.0, ruleset_id="count", ruleset_hash="d" * 64)
        for r in rollouts
    ]
    assert {v.verdict for v in (await run.reward(rewards)).verdicts} == {"stored"}

    async with run.update() as update:
        candidates = await update.candidates(groups=2, wait_seconds=5)
        reserved = await update.reserve(candidates, current_of(candidates), use=["x", "y", "x", "y"])
        assert [verdict.verdict for verdict in reserved.verdicts] == ["reserved"] * 4
        assert len(reserved.admitted) == 4
        committed = await update.commit([Discard(rollout_id="b:0.0", reason="no advantage")])
    assert (committed.state, committed.commit_no, update.policy) == ("committed", 1, active)
    assert {r.rollout_id async for r in run.rollouts(state="consumed")} == {"a:0.0", "a:1.0", "b:1.0"}
    assert {member.use for member in (await run.lineage(update.id)).members} == {"x", "y"}

    sent: dict[str, int] = {}
    folder = write_adapter(tmp_path / "adapter")
    policy = await run.publish(
        version=1,
        parent_version=0,
        updates=[update.id],
        folder=folder,
        base_model=BASE,
        progress=lambda name, count, size: sent.update({name: count}),
    )
    assert (policy.state, sent["adapter_model.safetensors"]) == ("committed", 2_100_000)

    async def confirm() -> None:
        watch = await worker.heartbeat()
        while watch.candidate is None:
            watch = await run.watch(watch.event_no, 10)
        await run.download(watch.candidate.version, tmp_path / "v1", artifact_hash=watch.candidate.artifact_hash)
        await worker.ack(watch.candidate.version, watch.candidate.artifact_hash)

    activation, _ = await asyncio.gather(run.activate(1), confirm())
    assert activation.state == "succeeded"
    assert (await run.view()).active.version == 1
    assert (tmp_path / "v1" / "adapter_model.safetensors").read_bytes() == (
        folder / "adapter_model.safetensors"
    ).read_bytes()
    events = [entry.event async for entry in run.journal()]
    assert {"update.opened", "update.committed"} <= set(events)
    assert [failure async for failure in run.failures()] == []


async def test_an_exception_aborts_with_its_reason(coordinator: Coordinator, client: AsyncCoordinator) -> None:
    run = prepared(coordinator, client)
    with pytest.raises(ZeroDivisionError):
        async with run.update() as update:
            candidates = await update.candidates(groups=1)
            await update.reserve(candidates, current_of(candidates))
            raise ZeroDivisionError("loss exploded")
    view = await run.update_view(update.id)
    assert (view.state, view.reason) == ("aborted", "ZeroDivisionError: loss exploded")
    assert (await run.counts()).rollouts["rewarded"] == 2
    assert left_over() == set()


async def test_leaving_without_a_commit_aborts(coordinator: Coordinator, client: AsyncCoordinator) -> None:
    run = prepared(coordinator, client)
    async with run.update() as update:
        pass
    assert (await run.update_view(update.id)).reason == "left without commit"
    assert left_over() == set()


async def test_an_update_is_not_usable_before_it_is_entered(coordinator: Coordinator, client: AsyncCoordinator) -> None:
    update = prepared(coordinator, client).update()
    with pytest.raises(RuntimeError, match=r"async with run\.update\(\)"):
        await update.candidates(groups=1)
    with pytest.raises(RuntimeError, match=r"async with run\.update\(\)"):
        _ = update.policy


async def test_a_cancellation_aborts_and_goes_on(coordinator: Coordinator, client: AsyncCoordinator) -> None:
    run = prepared(coordinator, client)
    inside = asyncio.Event()

    async def step() -> None:
        async with run.update("cancelled") as update:
            candidates = await update.candidates(groups=1)
            await update.reserve(candidates, current_of(candidates))
            inside.set()
            await update.candidates(groups=8, wait_seconds=60)

    stepping = asyncio.create_task(step())
    await inside.wait()
    stepping.cancel("the job was preempted")
    with pytest.raises(asyncio.CancelledError):
        await stepping
    assert stepping.cancelled()
    view = await run.update_view("cancelled")
    assert (view.state, view.reason) == ("aborted", "CancelledError: the job was preempted")
    assert (await run.counts()).rollouts["rewarded"] == 2
    assert left_over() == set()


async def test_a_timeout_around_an_update_aborts_it(coordinator: Coordinator, client: AsyncCoordinator) -> None:
    run = prepared(coordinator, client)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1), run.update("late") as update:
            await update.candidates(groups=8, wait_seconds=60)
    view = await run.update_view("late")
    assert (view.state, view.reason) == ("aborted", "CancelledError")
    assert left_over() == set()


async def test_a_cancellation_while_it_opens_leaves_no_open_update(
    coordinator: Coordinator, server: ServerProcess
) -> None:
    run = new_run(coordinator)

    async def step(client: AsyncCoordinator) -> None:
        async with client.run(run.id).update("opening"):
            raise AssertionError("it was never entered")

    with Relay(server.url) as relay:
        async with AsyncCoordinator(relay.url, server.token) as client:
            relay.hold = "/updates/opening"
            stepping = asyncio.create_task(step(client))
            await seen(relay.held)  # the coordinator has opened it, and its answer is on the way
            stepping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stepping
    assert run.update_view("opening").state == "aborted"
    assert left_over() == set()


async def test_a_second_cancellation_does_not_cut_the_abort_off(
    coordinator: Coordinator, server: ServerProcess
) -> None:
    run = new_run(coordinator)
    inside = asyncio.Event()
    ended: list[set[str]] = []

    async def step(client: AsyncCoordinator) -> None:
        try:
            async with client.run(run.id).update("twice"):
                inside.set()
                await asyncio.sleep(60)
        finally:
            ended.append(left_over())

    with Relay(server.url) as relay:
        async with AsyncCoordinator(relay.url, server.token) as client:
            relay.hold = "/abort"
            stepping = asyncio.create_task(step(client))
            await inside.wait()
            stepping.cancel()
            await seen(relay.held)
            stepping.cancel()
            await asyncio.sleep(0.1)
            assert not stepping.done()  # it waits for the answer to its abort
            relay.let_go.set()
            with pytest.raises(asyncio.CancelledError):
                await stepping
    assert run.update_view("twice").state == "aborted"
    assert not {name for name in ended[0] if name.startswith("renew")}


async def test_a_coordinator_that_does_not_answer_holds_no_exception_up(
    coordinator: Coordinator, server: ServerProcess
) -> None:
    run = new_run(coordinator)
    with Relay(server.url) as relay:
        async with AsyncCoordinator(relay.url, server.token, timeout_seconds=3600) as client:
            relay.hold = "/abort"
            with pytest.raises(ZeroDivisionError) as caught:
                async with client.run(run.id).update():
                    raise ZeroDivisionError
    assert "could not be aborted either" in caught.value.__notes__[0]
    assert left_over() == set()


async def test_the_lease_is_renewed_while_the_block_awaits(coordinator: Coordinator, client: AsyncCoordinator) -> None:
    run = prepared(coordinator, client, update_lease_seconds=1.5)
    async with run.update() as update:
        candidates = await update.candidates(groups=1)
        await update.reserve(candidates, current_of(candidates))
        await asyncio.to_thread(time.sleep, 3.5)  # as a learner's step would
        assert (await update.commit()).state == "committed"
    assert left_over() == set()


async def test_a_blocked_event_loop_loses_the_lease(coordinator: Coordinator, client: AsyncCoordinator) -> None:
    run = prepared(coordinator, client, update_lease_seconds=1.5)
    with pytest.raises((LeaseExpired, UpdateFenced)):
        async with run.update() as update:
            candidates = await update.candidates(groups=1)
            await update.reserve(candidates, current_of(candidates))
            time.sleep(3.0)  # noqa: ASYNC251 (that is what is tested)
            await update.commit()
    assert (await run.counts()).rollouts["rewarded"] == 2
    assert left_over() == set()


async def test_a_call_outlives_a_crash_and_restart_of_the_server(mortal_server: ServerProcess) -> None:
    with Coordinator(mortal_server.url, mortal_server.token) as coordinator:
        run = new_run(coordinator)
        rollouts = rewarded_groups(run, new_worker(run), 1)
    async with (
        AsyncCoordinator(mortal_server.url, mortal_server.token) as client,
        client.run(run.id).update() as update,
    ):
        candidates = await update.candidates(groups=1)
        mortal_server.kill()
        reserving = asyncio.create_task(update.reserve(candidates, current_of(candidates)))
        submitting = asyncio.create_task(client.run(run.id).submit(rollouts))  # sent while nothing listens
        await asyncio.sleep(1.0)
        await asyncio.to_thread(mortal_server.start)
        assert {v.verdict for v in (await submitting).verdicts} == {"duplicate"}
        assert len((await reserving).admitted) == 2
        assert (await update.commit()).state == "committed"
    assert left_over() == set()


async def test_twenty_updates_at_once_from_one_event_loop(coordinator: Coordinator, client: AsyncCoordinator) -> None:
    """All open and renewed together; of one line, they commit one after the other."""
    run = prepared(coordinator, client, groups=20, update_lease_seconds=3)
    line = asyncio.Lock()
    all_inside = asyncio.Barrier(20)
    commits: list[int] = []

    async def step(number: int) -> list[str]:
        async with run.update(f"update-{number}") as update:
            candidates = await update.candidates(groups=1, wait_seconds=10)
            await all_inside.wait()
            await asyncio.sleep(4)  # longer than the lease
            async with line:
                after = commits[-1] if commits else 0
                await update.reserve(candidates, current_of(candidates), after_commit_no=after)
                committed = await update.commit()
                assert committed.commit_no is not None
                commits.append(committed.commit_no)
        return [trajectory.rollout_id for trajectory in candidates]

    taken = await asyncio.gather(*(step(number) for number in range(20)))
    assert commits == list(range(1, 21))
    assert len({rollout for rollouts in taken for rollout in rollouts}) == 40
    assert (await run.counts()).rollouts["consumed"] == 40
    assert left_over() == set()


async def test_waiting_calls_leave_room_for_a_renewal(coordinator: Coordinator, client: AsyncCoordinator) -> None:
    """More long polls than connections that httpx allows by itself."""
    run = prepared(coordinator, client, update_lease_seconds=2)
    now = (await run.watch()).event_no
    polls = [asyncio.create_task(run.watch(now + 1000, 15)) for _ in range(120)]
    try:
        async with run.update() as update:
            candidates = await update.candidates(groups=1)
            await update.reserve(candidates, current_of(candidates))
            await asyncio.sleep(4)
            assert not any(poll.done() for poll in polls)
            assert (await update.commit()).state == "committed"
    finally:
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)


class Row:
    """Log-probs that remember which thread read them."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.read_by: set[int] = set()

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        self.read_by.add(threading.get_ident())
        return self.values


async def test_columns_are_encoded_beside_the_event_loop(coordinator: Coordinator, client: AsyncCoordinator) -> None:
    run = prepared(coordinator, client)
    async with run.update() as update:
        candidates = await update.candidates(groups=1)
        rows = [Row(row) for row in current_of(candidates)]
        assert len((await update.reserve(candidates, rows)).admitted) == 2  # type: ignore[arg-type]
        await update.commit()
    assert all(row.read_by and threading.get_ident() not in row.read_by for row in rows)


async def test_a_cancelled_download_leaves_nothing(
    coordinator: Coordinator, client: AsyncCoordinator, tmp_path: Path
) -> None:
    run = client.run(new_run(coordinator).id)
    await run.publish(version=1, parent_version=0, folder=write_adapter(tmp_path / "a"), base_model=BASE)
    into = tmp_path / "cache" / "v1"
    counts: list[int] = []

    def cut_off(name: str, count: int, size: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        counts.append(count)
        downloading.cancel()

    downloading = asyncio.create_task(run.download(1, into, progress=cut_off))
    with pytest.raises(asyncio.CancelledError):
        await downloading
    assert counts
    assert list(into.parent.iterdir()) == []
    await run.download(1, into)
    assert (into / "adapter_config.json").read_text() == '{"r": 16}'


async def test_a_cancelled_publish_is_taken_up_again(
    coordinator: Coordinator, client: AsyncCoordinator, tmp_path: Path
) -> None:
    run = client.run(new_run(coordinator).id)
    folder = write_adapter(tmp_path / "a")
    publishing = asyncio.create_task(
        run.publish(
            version=1,
            parent_version=0,
            folder=folder,
            base_model=BASE,
            progress=lambda name, count, size: publishing.cancel() or None,
        )
    )
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert (await run.policy(1)).state == "prepared"
    again = await run.publish(version=1, parent_version=0, folder=folder, base_model=BASE)
    assert again.state == "committed"


async def test_a_refusal_is_raised_as_in_the_sync_client(client: AsyncCoordinator) -> None:
    with pytest.raises(Refused) as caught:
        async with client.run("no-such-run").update():
            raise AssertionError("it was never entered")
    assert caught.value.code == "run_unknown"
    assert left_over() == set()
