"""How one activation went, from the journal."""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.policies.reading import find_activation
from coordinator.runs.service import get_run
from coordinator.watching import queries
from coordinator.wire.timelines import ActivationTimeline, TimelineStep, WorkerTimeline


def _step(row: Any, detail: dict[str, Any], opened_at: datetime) -> TimelineStep:
    step: str = row.event.partition(".")[2]
    told = detail.get("reason")
    match row.event:
        case "worker.stage":
            step = detail["stage"]
        case "worker.acked":
            step, told = "acked" if detail["matching"] else "mismatched", detail["detail"]
        case "worker.failed":
            told = f"{detail['stage']}: {detail['message']}"
    seconds = (row.at - opened_at).total_seconds()
    return TimelineStep(step=step, event_no=row.event_no, at=row.at, seconds=seconds, detail=told)


async def get_timeline(connection: AsyncConnection, run_id: str, activation_id: str) -> ActivationTimeline:
    """Every step of an activation, its version and the workers that it required."""
    run = await get_run(connection, run_id)
    activation = await find_activation(connection, run, activation_id)
    keys = {"run_no": run.run_no}
    rows = (
        await connection.execute(
            queries.ACTIVATION_STEPS, keys | {"activation_id": activation_id, "version": str(activation.version)}
        )
    ).all()
    details = {row.event_no: json.loads(row.detail) for row in rows}
    opening = next((row for row in rows if row.event == "activation.opened"), None)
    workers: defaultdict[str, list[tuple[Any, dict[str, Any]]]] = defaultdict(list)
    if opening is not None:
        ended = [row.event_no for row in rows if row.event_no > opening.event_no and _ends(row)]
        required: list[str] = details[opening.event_no]["required_workers"]
        found = await connection.execute(
            queries.WORKER_STEPS,
            keys
            | {
                "worker_ids": required,
                "after": opening.event_no,
                "before": min(ended, default=run.event_no + 1),
                "version": activation.version,
            },
        )
        workers.update({worker_id: [] for worker_id in required})
        for row in found:
            workers[row.subject].append((row, json.loads(row.detail)))
    steps = []
    opened_at = activation.asked_at if opening is None else opening.at
    for row in rows:
        detail = details[row.event_no]
        if row.event == "activation.dropped":
            workers[detail["worker_id"]].append((row, detail))
        else:
            steps.append(_step(row, detail, opened_at))
    return ActivationTimeline(
        activation_id=activation_id,
        version=activation.version,
        artifact_hash=activation.artifact_hash,
        state=activation.state,
        reason=activation.reason,
        steps=tuple(steps),
        workers=tuple(
            WorkerTimeline(
                worker_id=worker_id,
                steps=tuple(
                    _step(row, detail, opened_at) for row, detail in sorted(told, key=lambda each: each[0].event_no)
                ),
            )
            for worker_id, told in sorted(workers.items())
        ),
    )


def _ends(row: Any) -> bool:
    """Whether the activation is over with this entry."""
    event: str = row.event
    return event == "policy.activated" or (event.startswith("activation.") and event != "activation.dropped")
