"""The addresses of rollouts and rewards."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from coordinator.body import read_body
from coordinator.errors import refusals
from coordinator.operations.access import Anyone, ChangesHere, DatabaseHere, RewardCaller, WorkerCaller
from coordinator.rollouts import arrival, service
from coordinator.runs.service import get_run
from coordinator.wire.columns import ARROW_MEDIA_TYPE
from coordinator.wire.rollouts import (
    ArrivalAnswer,
    RewardAnswer,
    RewardBatch,
    RolloutBatch,
    RolloutEvidence,
    RolloutHistory,
    RolloutList,
    RolloutView,
    State,
)

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["rollouts"])

BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": RolloutBatch.model_json_schema(ref_template="#/components/schemas/{model}")},
            ARROW_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post(
    "/rollouts",
    responses=refusals("run_unknown", "too_large", "unsupported_media_type", "invalid_arrow"),
    openapi_extra=BODY,
)
async def submit_rollouts(
    run_id: str, request: Request, caller: WorkerCaller, database: DatabaseHere, changes: ChangesHere
) -> ArrivalAnswer:
    """Submit rollouts with their whole identity, as JSON or as an Arrow stream.

    Each is answered by itself: accepted (a gate may have quarantined it or set it aside: see `reason`), a
    duplicate, a conflict, or rejected. Sending a batch again is safe.
    """
    kind, body = await read_body(request, "application/json", ARROW_MEDIA_TYPE)
    decode = arrival.decode_arrow if kind == ARROW_MEDIA_TYPE else arrival.decode_json
    columns = await asyncio.to_thread(decode, body)
    run = await database.transaction(get_run, run_id)
    items, faults = await asyncio.to_thread(arrival.examine, columns, run, caller)
    answer = await database.transaction(arrival.take_in, run_id, items, faults, columns.ids, caller)
    changes.announce(run_id)
    return answer


@router.post("/rewards", responses=refusals("run_unknown"))
async def submit_rewards(
    run_id: str, body: RewardBatch, caller: RewardCaller, database: DatabaseHere, changes: ChangesHere
) -> RewardAnswer:
    """Submit rewards. A timeout or an error is recorded as a failure and leaves the rollout without a value."""
    answer = await database.transaction(service.take_rewards, run_id, body, caller)
    changes.announce(run_id)
    return answer


@router.get("/rollouts", responses=refusals("run_unknown"))
async def list_rollouts(
    run_id: str,
    caller: Anyone,
    database: DatabaseHere,
    state: State | None = None,
    group_id: Annotated[str | None, Query(max_length=200)] = None,
    after: Annotated[str, Query(max_length=200, description="continue after this rollout id")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> RolloutList:
    """List rollouts by id."""
    return await database.transaction(service.list_rollouts, run_id, state, group_id, after, limit)


@router.get("/rollouts/{rollout_id}/history", responses=refusals("run_unknown", "rollout_unknown"))
async def get_history(run_id: str, rollout_id: str, caller: Anyone, database: DatabaseHere) -> RolloutHistory:
    """Every change of a rollout's state, oldest first."""
    return await database.transaction(service.get_history, run_id, rollout_id)


@router.get("/rollouts/{rollout_id}/evidence", responses=refusals("run_unknown", "rollout_unknown"))
async def get_evidence(run_id: str, rollout_id: str, caller: Anyone, database: DatabaseHere) -> RolloutEvidence:
    """A rollout's tokens, mask and behaviour log-probs."""
    return await database.transaction(service.get_evidence, run_id, rollout_id)


@router.get("/rollouts/{rollout_id}", responses=refusals("run_unknown", "rollout_unknown"))
async def get_rollout(run_id: str, rollout_id: str, caller: Anyone, database: DatabaseHere) -> RolloutView:
    """Show a rollout without its tokens."""
    return await database.transaction(service.get_rollout, run_id, rollout_id)
