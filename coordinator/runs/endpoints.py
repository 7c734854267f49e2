"""The addresses of runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response, status

from coordinator.addresses import AfterNumber, Limit, RunId
from coordinator.errors import refusals
from coordinator.media import AGAIN
from coordinator.operations.access import Admin, Anyone, DatabaseHere
from coordinator.runs import service
from coordinator.wire.base import Order
from coordinator.wire.runs import CreateRun, FailureList, Journal, RunCounts, RunList, RunView, Stage

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    responses=refusals("run_conflict") | {200: {"model": RunView, "description": AGAIN}},
)
async def create_run(body: CreateRun, caller: Admin, database: DatabaseHere, response: Response) -> RunView:
    """Create a run with its admission rule, generation contract and first policy version.

    The same call again answers 200 and changes nothing.
    """
    view, new = await database.transaction(service.create_run, body, caller)
    response.status_code = status.HTTP_201_CREATED if new else status.HTTP_200_OK
    return view


@router.get("", responses=refusals())
async def list_runs(caller: Anyone, database: DatabaseHere) -> RunList:
    """List the runs that the token may see."""
    return await database.transaction(service.list_runs, caller)


@router.get("/{run_id}", responses=refusals("run_unknown"))
async def get_run(run_id: RunId, caller: Anyone, database: DatabaseHere) -> RunView:
    """Show a run: its settings, its contract, the active policy version and the last commit."""
    return (await database.transaction(service.get_run, run_id)).view()


@router.get("/{run_id}/counts", responses=refusals("run_unknown"))
async def count_rollouts(run_id: RunId, caller: Anyone, database: DatabaseHere) -> RunCounts:
    """Count the run's rollouts by state."""
    return await database.transaction(service.count_rollouts, run_id)


@router.get("/{run_id}/journal", responses=refusals("run_unknown"))
async def get_journal(
    run_id: RunId, caller: Anyone, database: DatabaseHere, after: AfterNumber = 0, limit: Limit = 500
) -> Journal:
    """Read the run's journal: policies, workers, activations and updates, numbered without holes."""
    return await database.transaction(service.get_journal, run_id, after, limit)


@router.get("/{run_id}/failures", responses=refusals("run_unknown"))
async def get_failures(
    run_id: RunId,
    caller: Anyone,
    database: DatabaseHere,
    after: AfterNumber = 0,
    limit: Limit = 500,
    stage: Annotated[Stage | None, Query(description="of this stage")] = None,
    order: Annotated[Order, Query(description="of their numbers; `after` continues in it")] = "oldest_first",
) -> FailureList:
    """Read the failures recorded for the run, all or those of one stage, oldest or newest first."""
    return await database.transaction(service.get_failures, run_id, after, limit, stage, order)
