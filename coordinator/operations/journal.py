"""The journal: every change of a run that is not a rollout's, numbered without holes, and its failures.

Numbers are given under the run's lock, since a sequence's numbers become visible out of order.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.wire.runs import Stage

RECORD_EVENT = text("""
    WITH numbered AS (
        UPDATE runs SET event_no = event_no + 1 WHERE run_no = :run_no RETURNING run_no, event_no
    )
    INSERT INTO journal (run_no, event_no, event, subject, actor, detail, at)
    SELECT run_no, event_no, :event, :subject, :actor, CAST(:detail AS jsonb), clock_timestamp() FROM numbered
""")

RECORD_FAILURE = text("""
    INSERT INTO failures (run_no, stage, kind, message, actor, rollout_id, update_id, version, worker_id)
    VALUES (:run_no, :stage, :kind, :message, :actor, :rollout_id, :update_id, :version, :worker_id)
""")


async def record_event(
    connection: AsyncConnection, run_no: int, event: str, subject: str, actor: str, **detail: Any
) -> None:
    """Adds one entry. Takes the run's lock: call it only where that lock is already held, or comes first."""
    await connection.execute(
        RECORD_EVENT,
        {"run_no": run_no, "event": event, "subject": subject, "actor": actor, "detail": json.dumps(detail)},
    )


async def record_failure(
    connection: AsyncConnection,
    run_no: int,
    stage: Stage,
    kind: str,
    message: str,
    actor: str,
    *,
    rollout_id: str | None = None,
    update_id: str | None = None,
    version: int | None = None,
    worker_id: str | None = None,
) -> None:
    """Adds one failure; earlier ones of the same thing stay."""
    await connection.execute(
        RECORD_FAILURE,
        {
            "run_no": run_no,
            "stage": stage,
            "kind": kind,
            "message": message,
            "actor": actor,
            "rollout_id": rollout_id,
            "update_id": update_id,
            "version": version,
            "worker_id": worker_id,
        },
    )
