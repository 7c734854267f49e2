"""The addresses of runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response, status

from coordinator.addresses import AfterNumber, Limit, NewestFirst, RunId
from coordinator.errors import refusals
from coordinator.media import AGAIN
from coordinator.operations.access import Admin, Anyone, DatabaseHere, GuardedRoute
from coordinator.runs import service
from coordinator.wire.runs import CreateRun, FailureList, Journal, RunCounts, RunList, RunView, Stage

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=GuardedRoute)


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    responses=refusals("run_conflict") | {200: {"model": RunView, "description": AGAIN}},
)
async def create_run(body: CreateRun, caller: Admin, database: DatabaseHere, response: Response) -> RunView:
    """Create a run with its admission rule, generation contract and first policy version.

    What admits a rollout (lag, drift, groups) and every clock is set here and stays; an experiment with another rule is
    another run.

    Sent again: the same content answers 200 and changes nothing, other content 409 `run_conflict`.
    """
    view, new = await database.transaction(service.create_run, body, caller)
    response.status_code = status.HTTP_201_CREATED if new else status.HTTP_200_OK
    return view


@router.get("", responses=refusals())
async def list_runs(caller: Anyone, database: DatabaseHere) -> RunList:
    """List the runs that the token may see.

    All of them in the order of their creation; for a token that is bound to a run, that run alone.
    """
    return await database.transaction(service.list_runs, caller)


@router.get("/{run_id}", responses=refusals("run_unknown"))
async def get_run(run_id: RunId, caller: Anyone, database: DatabaseHere) -> RunView:
    """Show a run: its settings, its contract, the active policy version and the last commit.

    A trainer reads `active` and `last_commit_no` before a step, a worker the contract that its rollouts must carry.
    """
    return (await database.transaction(service.get_run, run_id)).view()


@router.get("/{run_id}/counts", responses=refusals("run_unknown"))
async def count_rollouts(run_id: RunId, caller: Anyone, database: DatabaseHere) -> RunCounts:
    """Count the run's rollouts by state.

    From counters that are kept up to date, so it may be asked every second; a list with a filter shows which they are.
    """
    return await database.transaction(service.count_rollouts, run_id)


@router.get("/{run_id}/journal", responses=refusals("run_unknown"))
async def get_journal(
    run_id: RunId, caller: Anyone, database: DatabaseHere, after: AfterNumber = 0, limit: Limit = 500
) -> Journal:
    """Read the run's journal: policies, workers, activations and updates, numbered without holes.

    Oldest first, after the entry `after`; send `next_after` as `after` to go on. To be told of entries as they come,
    follow `events/stream`. What happened to rollouts is in `audit`.
    """
    return await database.transaction(service.get_journal, run_id, after, limit)


@router.get("/{run_id}/failures", responses=refusals("run_unknown"))
async def get_failures(
    run_id: RunId,
    caller: Anyone,
    database: DatabaseHere,
    after: AfterNumber = 0,
    limit: Limit = 500,
    stage: Annotated[Stage | None, Query(description="of this stage", examples=["reward"])] = None,
    newest_first: NewestFirst = False,
) -> FailureList:
    """Read the failures recorded for the run, all or those of one stage.

    In the order of their numbers, or against it; send `next_after` as `after` to go on. Attempts add up here, none
    overwrites another.
    """
    return await database.transaction(service.get_failures, run_id, after, limit, stage, newest_first)
