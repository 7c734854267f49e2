"""What workers tell the coordinator, and what it holds them to."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event, record_failure
from coordinator.policies import fleet, reading
from coordinator.policies import queries as policy_queries
from coordinator.policies.service import find_version
from coordinator.runs.service import Run, get_run, lock_run
from coordinator.wire.policies import Watch
from coordinator.wire.workers import (
    FenceWorker,
    Heartbeat,
    Incarnation,
    RegisterWorker,
    WorkerFailure,
    WorkerList,
    WorkerStage,
    WorkerView,
)
from coordinator.workers import queries


def _view(row: Any, run: Run) -> WorkerView:
    state = (
        "deregistered"
        if row.deregistered_at is not None
        else "lost"
        if row.lost
        else "draining"
        if row.draining
        else "asleep"
        if row.asleep
        else "live"
    )
    return WorkerView.model_validate(
        {
            "worker_id": row.worker_id,
            "incarnation": row.incarnation,
            "state": state,
            "asleep_until": row.asleep_until if row.asleep else None,
            "fenced": row.fenced_reason is not None,
            "fenced_reason": row.fenced_reason,
            "suspect_reason": row.suspect_reason,
            "version": row.version,
            "drift": row.drift,
            "drift_rollouts": row.drift_rollouts or 0,
            "engine": row.engine,
            "engine_version": row.engine_version,
            "registered_at": row.registered_at,
            "heartbeat_at": row.heartbeat_at,
            "heartbeat_seconds": run.settings.heartbeat_seconds,
        }
    )


async def find_worker(connection: AsyncConnection, run: Run, worker_id: str) -> WorkerView:
    """The worker, or a refusal."""
    row = (
        await connection.execute(
            queries.GET_WORKER,
            {
                "run_no": run.run_no,
                "worker_id": worker_id,
                "lost_after_seconds": run.settings.lost_after_seconds,
            },
        )
    ).one_or_none()
    if row is None:
        raise Refusal("worker_unknown", f"run {run.run_id} has no worker {worker_id}")
    return _view(row, run)


async def find_live(connection: AsyncConnection, run: Run, worker_id: str, incarnation: str) -> WorkerView:
    """The worker, held to the incarnation that registered last."""
    worker = await find_worker(connection, run, worker_id)
    if worker.incarnation != incarnation:
        raise Refusal(
            "incarnation_superseded",
            f"worker {worker_id} is registered as incarnation {worker.incarnation}, not {incarnation}",
        )
    if worker.state == "deregistered":
        raise Refusal("incarnation_unknown", f"worker {worker_id} was deregistered")
    return worker


async def list_workers(connection: AsyncConnection, run_id: str) -> WorkerList:
    """Every worker that ever registered."""
    run = await get_run(connection, run_id)
    rows = await connection.execute(
        queries.LIST_WORKERS,
        {"run_no": run.run_no, "lost_after_seconds": run.settings.lost_after_seconds},
    )
    return WorkerList(workers=[_view(row, run) for row in rows])


async def register(
    connection: AsyncConnection, run_id: str, worker_id: str, body: RegisterWorker, caller: Caller
) -> WorkerView:
    """Registers one life of a worker. An incarnation that was superseded cannot come back."""
    run = await lock_run(connection, run_id)
    keys = {"run_no": run.run_no, "worker_id": worker_id, "incarnation": body.incarnation}
    new = await connection.scalar(queries.REMEMBER_INCARNATION, keys)
    if new is None:
        return await find_live(connection, run, worker_id, body.incarnation)
    await connection.execute(queries.REGISTER, keys | {"engine": body.engine, "engine_version": body.engine_version})
    await record_event(
        connection,
        run.run_no,
        "worker.registered",
        worker_id,
        caller.actor,
        incarnation=body.incarnation,
        engine=body.engine,
        engine_version=body.engine_version,
    )
    return await find_worker(connection, run, worker_id)


async def beat(connection: AsyncConnection, run_id: str, worker_id: str, body: Heartbeat) -> Watch:
    """Notes that the incarnation lives, and answers what it needs to know."""
    run = await get_run(connection, run_id)
    heard = await connection.scalar(
        queries.BEAT,
        {
            "run_no": run.run_no,
            "worker_id": worker_id,
            "incarnation": body.incarnation,
            "asleep_seconds": body.asleep_seconds,
        },
    )
    if heard is None:
        await find_live(connection, run, worker_id, body.incarnation)
    return await reading.watch(connection, run_id)


async def drain(
    connection: AsyncConnection, run_id: str, worker_id: str, body: Incarnation, caller: Caller
) -> WorkerView:
    """Takes the worker out of activations to come; it may finish what it has begun."""
    run = await lock_run(connection, run_id)
    await find_live(connection, run, worker_id, body.incarnation)
    keys = {"run_no": run.run_no, "worker_id": worker_id}
    if await connection.scalar(queries.SET_DRAINING, keys) is not None:
        await record_event(connection, run.run_no, "worker.draining", worker_id, caller.actor)
        await fleet.leave(connection, run, worker_id, "draining", caller.actor)
    return await find_worker(connection, run, worker_id)


async def deregister(
    connection: AsyncConnection, run_id: str, worker_id: str, body: Incarnation, caller: Caller
) -> WorkerView:
    """Ends this life of the worker. What it had generated stays vouched for."""
    run = await lock_run(connection, run_id)
    worker = await find_worker(connection, run, worker_id)
    if worker.state == "deregistered" and worker.incarnation == body.incarnation:
        return worker
    await find_live(connection, run, worker_id, body.incarnation)
    await connection.execute(queries.SET_DEREGISTERED, {"run_no": run.run_no, "worker_id": worker_id})
    await record_event(connection, run.run_no, "worker.deregistered", worker_id, caller.actor)
    await fleet.leave(connection, run, worker_id, "deregistered", caller.actor)
    return await find_worker(connection, run, worker_id)


async def set_fence(connection: AsyncConnection, run: Run, worker_id: str, reason: str | None, actor: str) -> None:
    """Fences the worker, or lifts that where there is no reason. What it confirmed until now counts no more."""
    await connection.execute(queries.SET_FENCED, {"run_no": run.run_no, "worker_id": worker_id, "reason": reason})
    if reason is not None:
        await connection.execute(queries.VOID_ACKS, {"run_no": run.run_no, "worker_id": worker_id})
    event = "worker.fenced" if reason is not None else "worker.unfenced"
    await record_event(connection, run.run_no, event, worker_id, actor, reason=reason)


async def fence(
    connection: AsyncConnection, run_id: str, worker_id: str, body: FenceWorker, caller: Caller
) -> WorkerView:
    """Takes a worker out until it acks a version that it loaded whole."""
    run = await lock_run(connection, run_id)
    await find_worker(connection, run, worker_id)
    await set_fence(connection, run, worker_id, body.reason, caller.actor)
    return await find_worker(connection, run, worker_id)


async def note_stage(
    connection: AsyncConnection, run_id: str, worker_id: str, body: WorkerStage, caller: Caller
) -> WorkerView:
    """Tells those who watch how far the worker has come with a version. It decides nothing."""
    run = await lock_run(connection, run_id)
    worker = await find_live(connection, run, worker_id, body.incarnation)
    await find_version(connection, run.run_no, body.version)
    opened = (await connection.execute(policy_queries.OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    await record_event(
        connection,
        run.run_no,
        "worker.stage",
        worker_id,
        caller.actor,
        incarnation=body.incarnation,
        version=body.version,
        stage=body.stage,
        activation_id=opened.activation_id if opened is not None and opened.version == body.version else None,
    )
    return worker


async def report_failure(
    connection: AsyncConnection, run_id: str, worker_id: str, body: WorkerFailure, caller: Caller
) -> WorkerView:
    """Records that a worker could not take a version over. It is fenced until it loads one whole."""
    run = await lock_run(connection, run_id)
    await find_live(connection, run, worker_id, body.incarnation)
    await find_version(connection, run.run_no, body.version)
    await record_failure(
        connection,
        run.run_no,
        "distribution",
        body.stage,
        body.message,
        caller.actor,
        version=body.version,
        worker_id=worker_id,
    )
    await record_event(
        connection,
        run.run_no,
        "worker.failed",
        worker_id,
        caller.actor,
        version=body.version,
        stage=body.stage,
        message=body.message,
    )
    await set_fence(connection, run, worker_id, f"{body.stage} of version {body.version} failed", caller.actor)
    return await find_worker(connection, run, worker_id)
