"""The required workers of an open activation while it lasts: they leave, are lost, and the deadline passes."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.journal import record_event
from coordinator.policies import activation, queries
from coordinator.policies.reading import required_workers
from coordinator.runs.service import Run, lock_run
from coordinator.wire.policies import ActivationVerdict


async def leave(connection: AsyncConnection, run: Run, worker_id: str, reason: str, actor: str) -> None:
    """Takes a worker that drains or deregisters out of the open activation, with a record."""
    opened = (await connection.execute(queries.OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    if opened is None or not await _drop(connection, run, opened.activation_id, worker_id, reason, actor):
        return
    if await _remaining(connection, run, opened.activation_id):
        await activation.switch_if_ready(connection, run, opened.version, actor)
    else:
        await activation.fail(connection, run, opened, "no_required_workers: the last one left", actor)


async def _drop(
    connection: AsyncConnection, run: Run, activation_id: str, worker_id: str, reason: str, actor: str
) -> bool:
    keys = {"run_no": run.run_no, "activation_id": activation_id, "worker_id": worker_id}
    if await connection.scalar(queries.DROP_WORKER, keys | {"reason": reason}) is None:
        return False
    await record_event(
        connection, run.run_no, "activation.dropped", activation_id, actor, worker_id=worker_id, reason=reason
    )
    return True


async def _drop_and_fence(
    connection: AsyncConnection, run: Run, activation_id: str, worker_id: str, reason: str
) -> None:
    """The activation goes on without this worker, which may then serve anything: only the active version counts."""
    await _drop(connection, run, activation_id, worker_id, reason, "clock")
    fenced = f"dropped from activation {activation_id}: {reason}"
    await connection.execute(queries.FENCE_DROPPED, {"run_no": run.run_no, "worker_id": worker_id, "reason": fenced})
    await record_event(connection, run.run_no, "worker.fenced", worker_id, "clock", reason=fenced)


async def tend(connection: AsyncConnection, run_id: str) -> bool:
    """What the clock does to a run's open activation: drops workers where the run says so, and ends it at its
    deadline. Whether anything changed."""
    run = await lock_run(connection, run_id)
    opened = (await connection.execute(queries.OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    if opened is None:
        return False
    dropped = run.settings.on_lost == "drop" and await _drop_absent(connection, run, opened)
    if dropped and await _switched(connection, run, opened.version):
        return True
    keys = {"run_no": run.run_no, "activation_id": opened.activation_id}
    if not await connection.scalar(queries.IS_OVERDUE, keys):
        return dropped
    await _end_overdue(connection, run, opened)
    return True


async def _drop_absent(connection: AsyncConnection, run: Run, opened: Any) -> bool:
    """Drops those that are lost or fenced, as long as enough remain. Whether there were any."""
    keys = {"run_no": run.run_no, "activation_id": opened.activation_id}
    rows = await connection.execute(
        queries.ABSENT_WORKERS, keys | {"lost_after_seconds": run.settings.lost_after_seconds}
    )
    absent = rows.all()
    spare = (await _remaining(connection, run, opened.activation_id)) - run.settings.min_workers
    leaving = absent[: max(0, spare)]
    for row in leaving:
        await _drop_and_fence(connection, run, opened.activation_id, row.worker_id, row.why)
    return bool(leaving)


async def _end_overdue(connection: AsyncConnection, run: Run, opened: Any) -> None:
    """At the deadline: goes on without those that did not confirm, where the run says so and enough did; else fails."""
    verdict = await activation.judge(connection, run, opened)
    silent = [*verdict.missing_workers, *verdict.mismatched_workers]
    dropping = run.settings.on_lost == "drop" and run.settings.activation == "last_ack"
    if silent and dropping and verdict.reason != "artifact_not_committed":
        acked = (await _remaining(connection, run, opened.activation_id)) - len(silent)
        if acked >= run.settings.min_workers:
            for worker_id in silent:
                await _drop_and_fence(connection, run, opened.activation_id, worker_id, "no matching ack in time")
            # All that remain have confirmed, and the artifact is committed: nothing stands in the way any more.
            await activation.switch_if_ready(connection, run, opened.version, "clock")
            return
    await activation.fail(connection, run, opened, _overdue(verdict, silent), "clock")


def _overdue(verdict: ActivationVerdict, silent: list[str]) -> str:
    if verdict.activated:
        return "deadline: it was ready, and nobody activated it by hand"
    return f"deadline: {verdict.reason}" + (f" ({', '.join(silent)})" if silent else "")


async def _remaining(connection: AsyncConnection, run: Run, activation_id: str) -> int:
    return len((await required_workers(connection, run, activation_id))[activation_id])


async def _switched(connection: AsyncConnection, run: Run, version: int) -> bool:
    verdict = await activation.switch_if_ready(connection, run, version, "clock")
    return verdict is not None and verdict.activated
