"""Candidates: whole groups that an update could reserve, held for it while it looks at them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.rollouts.queries import for_run
from coordinator.runs.service import get_run
from coordinator.updates import queries
from coordinator.updates.service import lock_update, require_open
from coordinator.wire.columns import CandidateColumns, Ragged
from coordinator.wire.updates import CandidatesRequest, EmptyReason


async def hold(
    connection: AsyncConnection, run_id: str, update_id: str, body: CandidatesRequest
) -> tuple[list[Any], list[str], EmptyReason | None]:
    """Holds up to the asked number of groups. Answers their rewarded members' rows, the groups, or why none."""
    run = await get_run(connection, run_id)
    row = await lock_update(connection, run, update_id, body.owner)
    require_open(row)
    settings = run.settings
    parameters = {
        "run_no": run.run_no,
        "update_id": update_id,
        "lag_clock": row.lag_clock,
        "gate_lag": settings.lag_gate == "enforce",
        "max_lag": settings.max_lag,
        "usable_needed": settings.usable_needed,
        "groups": body.groups,
        "hold_seconds": settings.hold_seconds,
    }
    held = (await connection.execute(for_run(queries.HOLD_GROUPS, run.group_column), parameters)).all()
    if not held:
        return (
            [],
            [],
            await _why_empty(connection, parameters | {"lost_after_seconds": settings.lost_after_seconds}),
        )
    oldest_first = sorted(held, key=lambda g: (g.oldest_clock, g.first_arrival_at, g.group_id))
    group_ids = [g.group_id for g in oldest_first]
    rows = await connection.execute(
        for_run(queries.CANDIDATES, run.group_column),
        {"run_no": run.run_no, "lag_clock": row.lag_clock, "group_ids": group_ids},
    )
    return list(rows), group_ids, None


async def _why_empty(connection: AsyncConnection, parameters: dict[str, Any]) -> EmptyReason:
    keys = ("run_no", "lost_after_seconds", "lag_clock", "max_lag", "update_id")
    facts = (await connection.execute(queries.EMPTY, {key: parameters[key] for key in keys})).one()
    since: datetime | None
    if facts.rewarded_groups:
        if facts.stale == facts.rewarded_groups:
            return EmptyReason(reason="all_stale", since=facts.first_arrival_at)
        if facts.held:
            return EmptyReason(reason="held_by_others", since=facts.held_until)
        return EmptyReason(reason="groups_incomplete", since=facts.first_arrival_at)
    if not facts.producing:
        return EmptyReason(reason="no_live_producers", since=facts.last_heartbeat)
    since = await connection.scalar(queries.LAST_BOUND, {"run_no": parameters["run_no"]})
    return EmptyReason(reason="nothing_rewarded", since=since)


def columns(rows: list[Any], group_ids: list[str], empty: EmptyReason | None) -> CandidateColumns:
    """The answer as columns. Blocks a little: run it in a thread."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row.action_mask) for row in rows], out=offsets[1:])
    return CandidateColumns(
        rollout_id=[row.rollout_id for row in rows],
        revision=[row.revision for row in rows],
        group_id=[row.group_id for row in rows],
        task_id=[row.task_id for row in rows],
        sample_index=[row.sample_index for row in rows],
        policy_version=[row.policy_version for row in rows],
        lag=[row.lag for row in rows],
        reward=[row.reward for row in rows],
        token_ids=Ragged(np.frombuffer(b"".join(row.token_ids for row in rows), "<i4"), offsets),
        action_mask=Ragged(np.frombuffer(b"".join(row.action_mask for row in rows), np.bool_), offsets),
        behavior_log_probs=Ragged(np.frombuffer(b"".join(row.behavior_log_probs for row in rows), "<f4"), offsets),
        groups=group_ids,
        empty=empty,
    )
