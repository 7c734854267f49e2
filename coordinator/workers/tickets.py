"""Capacity tickets: how much a run can still use is told before it is generated."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.runs.service import lock_run
from coordinator.wire.workers import TicketAnswer, TicketRequest
from coordinator.workers import queries
from coordinator.workers.service import find_live


async def grant_tickets(connection: AsyncConnection, run_id: str, worker_id: str, body: TicketRequest) -> TicketAnswer:
    """Grants tickets while the run can still use more groups: holding back is cheaper than refusing afterwards.

    Capacity is (max_lag + 1) x groups_per_update, less groups that are unconsumed and admissible, less those
    that are ticketed. A worker that is fenced, draining or asleep gets none.
    """
    run = await lock_run(connection, run_id)
    worker = await find_live(connection, run, worker_id, body.incarnation)
    asked = list(dict.fromkeys(body.group_ids))
    keys = {"run_no": run.run_no, "group_ids": asked}
    tickets = (await connection.execute(queries.TICKETS_OF, keys)).all()
    arrived = set((await connection.scalars(queries.ARRIVED_GROUPS, keys)).all())
    # What an earlier life of this worker held is its own: that one generates no more.
    own = {t.group_id for t in tickets if t.worker_id == worker_id}
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
