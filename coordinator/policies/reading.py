"""Activations as they stand, and what a worker needs to know of them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.policies import queries
from coordinator.runs.service import Run, get_run
from coordinator.wire.policies import (
    ActivationList,
    ActivationView,
    Candidate,
    DroppedWorker,
    RequiredWorker,
    Watch,
)


async def required_workers(
    connection: AsyncConnection, run: Run, activation_id: str | None
) -> dict[str, list[RequiredWorker]]:
    """The required workers of one activation, or of all, with what they said."""
    rows = await connection.execute(queries.REQUIRED_WORKERS, {"run_no": run.run_no, "activation_id": activation_id})
    required: defaultdict[str, list[RequiredWorker]] = defaultdict(list)
    for row in rows:
        if row.ended_as is not None:
            required[row.activation_id].append(RequiredWorker.model_validate_json(row.ended_as))
            continue
        ack = "missing" if row.matching is None else "matching" if row.matching else "mismatched"
        required[row.activation_id].append(
            RequiredWorker.model_validate(
                {
                    "worker_id": row.worker_id,
                    "incarnation": row.incarnation,
                    "ack": ack,
                    "acked_at": row.acked_at,
                    "detail": row.detail,
                }
            )
        )
    return required


async def keep_what_was_said(connection: AsyncConnection, run: Run, activation_id: str) -> None:
    """As an activation ends: what its required workers said stays with it, whatever they say later."""
    required = (await required_workers(connection, run, activation_id))[activation_id]
    await connection.execute(
        queries.KEEP_WHAT_WAS_SAID,
        {
            "run_no": run.run_no,
            "activation_id": activation_id,
            "worker_ids": [worker.worker_id for worker in required],
            "said": [worker.model_dump_json() for worker in required],
        },
    )


async def _dropped(connection: AsyncConnection, run: Run, activation_id: str | None) -> dict[str, list[DroppedWorker]]:
    rows = await connection.execute(queries.DROPPED_WORKERS, {"run_no": run.run_no, "activation_id": activation_id})
    dropped: defaultdict[str, list[DroppedWorker]] = defaultdict(list)
    for row in rows:
        dropped[row.activation_id].append(
            DroppedWorker(worker_id=row.worker_id, dropped_at=row.dropped_at, reason=row.dropped_reason)
        )
    return dropped


def _view(row: Any, required: list[RequiredWorker], dropped: list[DroppedWorker]) -> ActivationView:
    fields = {name: getattr(row, name) for name in ActivationView.model_fields.keys() - {"required", "dropped"}}
    return ActivationView(required=tuple(required), dropped=tuple(dropped), **fields)


async def find_activation(connection: AsyncConnection, run: Run, activation_id: str) -> ActivationView:
    """The activation, or a refusal."""
    row = (
        await connection.execute(queries.GET_ACTIVATION, {"run_no": run.run_no, "activation_id": activation_id})
    ).one_or_none()
    if row is None:
        raise Refusal("activation_unknown", f"there is no activation {activation_id}")
    required = (await required_workers(connection, run, activation_id))[activation_id]
    return _view(row, required, (await _dropped(connection, run, activation_id))[activation_id])


async def get_activation(connection: AsyncConnection, run_id: str, activation_id: str) -> ActivationView:
    """One activation."""
    return await find_activation(connection, await get_run(connection, run_id), activation_id)


async def list_activations(connection: AsyncConnection, run_id: str) -> ActivationList:
    """Every activation, oldest first."""
    run = await get_run(connection, run_id)
    required = await required_workers(connection, run, None)
    dropped = await _dropped(connection, run, None)
    rows = await connection.execute(queries.LIST_ACTIVATIONS, {"run_no": run.run_no})
    return ActivationList(
        activations=[_view(row, required[row.activation_id], dropped[row.activation_id]) for row in rows]
    )


async def watch(connection: AsyncConnection, run_id: str) -> Watch:
    """The active version and the candidate that is to follow it."""
    run = await get_run(connection, run_id)
    row = (await connection.execute(queries.OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    candidate = None
    if row is not None:
        names = Candidate.model_fields.keys()
        candidate = Candidate.model_validate({name: getattr(row, name) for name in names})
    return Watch(event_no=run.event_no, active=run.active, candidate=candidate)
