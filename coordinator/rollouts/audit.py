"""The audit of all rollouts in the order of time, read page by page.

There is no index that keeps this order: it would cost every arrival. The audit lies on disk in the order of its times,
so that a stretch of time is found by its block ranges and sorted by itself; a page is gathered from stretches that grow
until it is full.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.runs.service import get_run
from coordinator.storage.settled import settled_before
from coordinator.wire.rollouts import Audit, AuditEntry

CHANGE = "revision, event, from_state, to_state, reason, actor, update_id, lag, drift, max_lag, max_drift, at"

FIRST_STRETCH = timedelta(seconds=1)

STRETCH = """
    SELECT rollout_id, {change} FROM rollout_audit
    WHERE run_no = :run_no AND at >= :begin AND at < :end {conditions}
    ORDER BY at, rollout_id, revision LIMIT :limit
"""

# An update's changes lie between its opening and its end, within the time that a statement may take.
UPDATE_SPAN = text("""
    SELECT opened_at, ended_at + interval '2 minutes' AS over_at FROM updates
    WHERE run_no = :run_no AND update_id = :update_id
""")


def _cursor(entry: AuditEntry) -> str:
    return f"{entry.at.isoformat()}|{entry.rollout_id}|{entry.revision}"


def _position(after: str) -> tuple[datetime, str, int]:
    try:
        at, rollout_id, revision = after.split("|")
        position = datetime.fromisoformat(at), rollout_id, int(revision)
    except ValueError:
        position = None
    if position is None or position[0].tzinfo is None or not -1 < position[2] < 2**31:
        raise Refusal("invalid_request", "after is no cursor: send next_after of an earlier answer", field="after")
    return position


async def list_audit(
    connection: AsyncConnection,
    run_id: str,
    after: str,
    limit: int,
    *,
    rollout_id: str | None = None,
    update_id: str | None = None,
    at_from: datetime | None = None,
    at_before: datetime | None = None,
) -> Audit:
    """Changes of rollouts in the order of their time, those after the cursor `after`.

    Only what no transaction under way can still add to is shown, so that no change is ever passed over.
    """
    run = await get_run(connection, run_id)
    conditions = ""
    parameters: dict[str, Any] = {"run_no": run.run_no}
    begins, ends = [run.created_at], [await settled_before(connection)]
    if after:
        at, named, revision = _position(after)
        conditions += " AND (at, rollout_id, revision) > (:after_at, :after_id, :after_revision)"
        parameters |= {"after_at": at, "after_id": named, "after_revision": revision}
        begins.append(at)
    if rollout_id is not None:
        conditions += " AND rollout_id = :rollout_id"
        parameters["rollout_id"] = rollout_id
    if update_id is not None:
        keys = {"run_no": run.run_no, "update_id": update_id}
        span = (await connection.execute(UPDATE_SPAN, keys)).one_or_none()
        if span is None:
            raise Refusal("update_unknown", f"run {run_id} has no update {update_id}")
        conditions += " AND update_id = :update_id"
        parameters["update_id"] = update_id
        begins.append(span.opened_at)
        ends += [] if span.over_at is None else [span.over_at]
    begins += [] if at_from is None else [at_from]
    ends += [] if at_before is None else [at_before]
    begin, end = max(begins), min(ends)
    statement = text(STRETCH.format(change=CHANGE, conditions=conditions))
    entries: list[AuditEntry] = []
    # One rollout's changes are found by their key, whatever the time.
    stretch = end - begin if rollout_id is not None else FIRST_STRETCH
    while begin < end and len(entries) < limit:
        until = min(begin + stretch, end)
        stretch *= 2
        rows = await connection.execute(
            statement, parameters | {"begin": begin, "end": until, "limit": limit - len(entries)}
        )
        entries += [AuditEntry.model_validate(dict(row._mapping)) for row in rows]
        begin = until
    return Audit(entries=entries, next_after=_cursor(entries[-1]) if entries else after)
