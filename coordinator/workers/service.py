"""What workers tell the coordinator, and what it holds them to."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event, record_failure
from coordinator.policies import activation, fleet, reading
from coordinator.policies import queries as policy_queries
from coordinator.policies.service import find_version
from coordinator.runs.service import Run, get_run, lock_run
from coordinator.wire.policies import PolicyView, Watch
from coordinator.wire.workers import (
    Ack,
    AckVerdict,
    FenceWorker,
    Heartbeat,
    Incarnation,
    RegisterWorker,
    TicketAnswer,
    TicketRequest,
    WeightDigest,
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


async def _live(connection: AsyncConnection, run: Run, worker_id: str, incarnation: str) -> WorkerView:
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
        return await _live(connection, run, worker_id, body.incarnation)
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
        await _live(connection, run, worker_id, body.incarnation)
    return await reading.watch(connection, run_id)


async def drain(
    connection: AsyncConnection, run_id: str, worker_id: str, body: Incarnation, caller: Caller
) -> WorkerView:
    """Takes the worker out of activations to come; it may finish what it has begun."""
    run = await lock_run(connection, run_id)
    await _live(connection, run, worker_id, body.incarnation)
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
    await _live(connection, run, worker_id, body.incarnation)
    await connection.execute(queries.SET_DEREGISTERED, {"run_no": run.run_no, "worker_id": worker_id})
    await record_event(connection, run.run_no, "worker.deregistered", worker_id, caller.actor)
    await fleet.leave(connection, run, worker_id, "deregistered", caller.actor)
    return await find_worker(connection, run, worker_id)


async def _fence(connection: AsyncConnection, run: Run, worker_id: str, reason: str | None, actor: str) -> None:
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
    await _fence(connection, run, worker_id, body.reason, caller.actor)
    return await find_worker(connection, run, worker_id)


async def take_ack(connection: AsyncConnection, run_id: str, worker_id: str, body: Ack, caller: Caller) -> AckVerdict:
    """Stores what a worker says it serves. A mismatch vouches for nothing and fences; the right ack lifts that.

    A worker that was dropped from an activation stays fenced until it acks the active version.
    Who serves a withdrawn version rightly, as workers do until the restoring one is active, is not fenced for it.
    """
    run = await lock_run(connection, run_id)
    worker = await _live(connection, run, worker_id, body.incarnation)
    policy = await find_version(connection, run.run_no, body.version)
    reason, detail = "ok", None
    left = sorted(set(run.settings.required_caches) - set(body.caches_reset))
    if body.artifact_hash != policy.artifact_hash:
        reason = "worker_mismatch"
        detail = f"serves {body.artifact_hash}, version {body.version} is {policy.artifact_hash}"
    elif policy.state == "withdrawn":
        reason = "policy_withdrawn"
        detail = f"version {body.version} was withdrawn: what is made with it is quarantined"
    elif policy.state == "abandoned":
        reason, detail = "worker_mismatch", f"version {body.version} is abandoned"
    elif left:
        reason, detail = "caches_not_reset", f"not reset: {', '.join(left)}"
    elif body.digest is not None:
        detail = await _contradiction(connection, run, worker_id, policy, body, body.digest)
        reason = "ok" if detail is None else "worker_mismatch"
    opened = (await connection.execute(policy_queries.OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    activation_id = opened.activation_id if opened is not None and opened.version == body.version else None
    parameters = {
        "run_no": run.run_no,
        "worker_id": worker_id,
        "incarnation": body.incarnation,
        "version": body.version,
        "artifact_hash": body.artifact_hash,
        **_digest_columns(body.digest),
        "caches_reset": sorted(set(body.caches_reset)),
        "activation_id": activation_id,
        "matching": reason == "ok",
        "detail": detail,
    }
    repeated = (await connection.execute(queries.SAME_ACK, parameters)).one_or_none() is not None
    if not repeated:
        await connection.execute(queries.STORE_ACK, parameters)
        await record_event(
            connection,
            run.run_no,
            "worker.acked",
            worker_id,
            caller.actor,
            incarnation=body.incarnation,
            version=body.version,
            artifact_hash=body.artifact_hash,
            matching=reason == "ok",
            detail=detail,
            digest=None if body.digest is None else body.digest.model_dump(),
            caches_reset=parameters["caches_reset"],
            activation_id=activation_id,
        )
    keys = {"run_no": run.run_no, "worker_id": worker_id}
    if reason not in ("ok", "policy_withdrawn") and not worker.fenced:
        await _fence(connection, run, worker_id, reason, caller.actor)
    elif reason not in ("ok", "policy_withdrawn"):
        await connection.execute(queries.VOID_ACKS, keys)
    lifted = (
        reason == "ok"
        and worker.fenced
        and (body.version == run.active.version or not await connection.scalar(queries.MUST_ACK_ACTIVE, keys))
    )
    if lifted:
        await _fence(connection, run, worker_id, None, caller.actor)
    verdict = await activation.switch_if_ready(connection, run, body.version, caller.actor)
    if lifted and opened is not None and opened.version != body.version:
        # A dropped worker may have confirmed the candidate before the active version: that counts from now on.
        await activation.switch_if_ready(connection, run, opened.version, caller.actor)
    return AckVerdict.model_validate(
        {"matching": reason == "ok", "reason": reason, "detail": detail, "activation": verdict}
    )


def _digest_columns(digest: WeightDigest | None) -> dict[str, str | None]:
    if digest is None:
        return {"digest_layout": None, "digest_registered": None, "digest_active": None}
    return {
        "digest_layout": digest.layout,
        "digest_registered": digest.registered,
        "digest_active": digest.active,
    }


async def _contradiction(
    connection: AsyncConnection, run: Run, worker_id: str, policy: PolicyView, ack: Ack, digest: WeightDigest
) -> str | None:
    """Why the weights in the engine's memory cannot be those of the version, or None.

    A label is set without touching a weight; so what the learner stated decides, then what other engines of the same
    layout hold, then whether anything changed since this engine served another artifact.
    """
    stated = policy.digests.get(digest.layout)
    if stated is not None and digest.registered != stated:
        return f"the engine holds {digest.registered}; for {digest.layout} version {policy.version} must be {stated}"
    keys = {
        "run_no": run.run_no,
        "worker_id": worker_id,
        "incarnation": ack.incarnation,
        "artifact_hash": ack.artifact_hash,
        **_digest_columns(digest),
    }
    other = (await connection.execute(queries.SAME_LAYOUT, keys)).one_or_none()
    if other is not None:
        which = "registered" if other.digest_registered != digest.registered else "active"
        mine, theirs = getattr(digest, which), getattr(other, f"digest_{which}")
        return (
            f"the engine's {which} weights have digest {mine}; worker {other.worker_id} of the same layout has {theirs}"
        )
    if stated is None:
        before = await connection.scalar(queries.UNCHANGED, keys)
        if before is not None:
            return f"the engine's weights are still those of version {before}: the digest did not change"
    return None


async def note_stage(
    connection: AsyncConnection, run_id: str, worker_id: str, body: WorkerStage, caller: Caller
) -> WorkerView:
    """Tells those who watch how far the worker has come with a version. It decides nothing."""
    run = await lock_run(connection, run_id)
    worker = await _live(connection, run, worker_id, body.incarnation)
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
    await _live(connection, run, worker_id, body.incarnation)
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
    await _fence(connection, run, worker_id, f"{body.stage} of version {body.version} failed", caller.actor)
    return await find_worker(connection, run, worker_id)


async def grant_tickets(connection: AsyncConnection, run_id: str, worker_id: str, body: TicketRequest) -> TicketAnswer:
    """Grants tickets while the run can still use more groups: holding back is cheaper than refusing afterwards.

    Capacity is (max_lag + 1) x groups_per_update, less groups that are unconsumed and admissible, less those
    that are ticketed. A worker that is fenced, draining or asleep gets none.
    """
    run = await lock_run(connection, run_id)
    worker = await _live(connection, run, worker_id, body.incarnation)
    asked = list(dict.fromkeys(body.group_ids))
    keys = {"run_no": run.run_no, "group_ids": asked}
    tickets = (await connection.execute(queries.OWN_TICKETS, keys)).all()
    arrived = set((await connection.scalars(queries.ARRIVED_GROUPS, keys)).all())
    own = {t.group_id for t in tickets if (t.worker_id, t.incarnation) == (worker_id, body.incarnation)}
    taken = {t.group_id for t in tickets} - own
    capacity: int | None = None
    if worker.fenced or worker.state in ("draining", "asleep"):
        return TicketAnswer(granted=(), capacity=0, expires_at=None)
    wanted = [g for g in asked if g not in own | taken | arrived]
    if run.settings.groups_per_update is not None:
        row = (
            await connection.execute(
                queries.GROUPS_IN_FLIGHT,
                {
                    "run_no": run.run_no,
                    "active_clock": run.active_clock,
                    "max_lag": run.settings.max_lag,
                },
            )
        ).one()
        room = (run.settings.max_lag + 1) * run.settings.groups_per_update - row.unconsumed - row.ticketed
        wanted = wanted[: max(0, room)]
        capacity = max(0, room - len(wanted))
    granted = {*own, *wanted}
    rows = (
        await connection.execute(
            queries.GRANT,
            {
                "run_no": run.run_no,
                "worker_id": worker_id,
                "incarnation": body.incarnation,
                "ticket_seconds": run.settings.ticket_seconds,
                "group_ids": sorted(granted),
            },
        )
    ).all()
    return TicketAnswer(
        granted=tuple(g for g in asked if g in granted),
        capacity=capacity,
        expires_at=min((row.expires_at for row in rows), default=None),
    )
