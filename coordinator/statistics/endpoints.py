"""The address of a run's statistics."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Query, Request

from coordinator.addresses import RunId
from coordinator.errors import refusals
from coordinator.operations.access import Anyone, GuardedRoute
from coordinator.statistics.service import Recent
from coordinator.wire.statistics import Statistics

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["runs"], route_class=GuardedRoute)


async def recent_of(request: Request) -> Recent:
    """The answers that this app made last."""
    return cast(Recent, request.app.state.statistics)


@router.get("/statistics", responses=refusals("run_unknown"))
async def get_statistics(
    run_id: RunId,
    caller: Anyone,
    recent: Annotated[Recent, Depends(recent_of)],
    window_seconds: Annotated[int, Query(ge=60, le=86400, description="how far back", examples=[900])] = 900,
    buckets: Annotated[
        int, Query(ge=1, le=240, description="into how many stretches the window is cut", examples=[60])
    ] = 60,
) -> Statistics:
    """Show how the run moves: flow by time, refusals by reason, ages, and lag and drift by version to their limits.

    The answer may be a second old. A window that holds too much to be read in time is refused with 503 `unavailable`.
    """
    return await recent.get(run_id, window_seconds, buckets)
