"""The addresses of updates."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response, status
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from coordinator.addresses import AfterUpdate, HashFilter, IdFilter, Limit, NewestFirst, RunId, UpdateId, VersionFilter
from coordinator.body import read_body
from coordinator.errors import Refusal, refusals
from coordinator.media import AGAIN, arrow_answer, json_or_arrow
from coordinator.operations.access import Anyone, ChangesHere, DatabaseHere, GuardedRoute, Trainer
from coordinator.operations.numbers import NumbersHere
from coordinator.runs.service import get_run
from coordinator.storage.database import Database
from coordinator.updates import candidates, lineage, reservation, service
from coordinator.wire.columns import (
    ARROW_MEDIA_TYPE,
    CANDIDATE_SCHEMA,
    RESERVE_SCHEMA,
    ReserveColumns,
    decode_reserve,
    reserve_columns,
    validation_fault,
)
from coordinator.wire.updates import (
    AbortUpdate,
    CandidateRollout,
    Candidates,
    CandidatesRequest,
    CommitUpdate,
    Lineage,
    LineageUses,
    OpenUpdate,
    Renew,
    ReserveAnswer,
    ReserveItem,
    ReserveRequest,
    UpdateList,
    UpdateState,
    UpdateView,
)

router = APIRouter(prefix="/v1/runs/{run_id}/updates", tags=["updates"], route_class=GuardedRoute)
line = APIRouter(prefix="/v1/runs/{run_id}", tags=["updates"], route_class=GuardedRoute)

OWNED = ("run_unknown", "update_unknown", "update_owned")
OPEN = (*OWNED, "update_fenced", "lease_expired")
CANDIDATES = arrow_answer(
    CANDIDATE_SCHEMA,
    CandidateRollout,
    metadata={
        "groups": "the ids of the groups",
        "empty": "why there is none and since when, an EmptyReason, or null",
        "contract_hash": "the hash of the one generation contract that all of them share, or null",
        "reserved": "with reserve: one ReserveVerdict for each, in order; else null",
    },
)
BODY = json_or_arrow(
    ReserveRequest,
    RESERVE_SCHEMA,
    ReserveItem,
    types={"current_log_probs": "list<float64>"},
    metadata={"request": "an object with owner, after_commit_no and confirm_drift, as in the JSON body"},
)


async def _tidy(database: Database, run_id: str) -> None:
    """What an ended lease held must be free at once, whether or not the sweeper has come by."""
    if await database.read(service.has_due, run_id):
        await database.transaction(service.expire_due, run_id)


@router.get("", responses=refusals("run_unknown", "update_unknown"))
async def list_updates(
    run_id: RunId,
    caller: Anyone,
    database: DatabaseHere,
    state: Annotated[UpdateState | None, Query(description="in this state", examples=["open"])] = None,
    newest_first: NewestFirst = False,
    after: AfterUpdate = None,
    limit: Limit = 1000,
) -> UpdateList:
    """List the run's updates in the order of their opening, oldest or newest first.

    With their state, lease and `commit_no`; a rewind names one of these numbers.
    """
    return await database.transaction(
        service.list_updates, run_id, after, limit, state=state, newest_first=newest_first
    )


@router.put(
    "/{update_id}",
    status_code=status.HTTP_201_CREATED,
    responses=refusals(
        "run_unknown",
        "policy_version_unknown",
        "policy_identity_conflict",
        "policy_withdrawn",
        "update_owned",
        "update_conflict",
        "update_fenced",
        "lease_expired",
    )
    | {200: {"model": UpdateView, "description": AGAIN}},
)
async def open_update(
    run_id: RunId,
    update_id: UpdateId,
    body: OpenUpdate,
    caller: Trainer,
    database: DatabaseHere,
    changes: ChangesHere,
    response: Response,
) -> UpdateView:
    """Open an update for weights that come from this policy version, with a lease to be renewed.

    The begin of a training step, under an id that the trainer chooses (the step's number, say). Without a policy it is
    opened on the active version.

    Sent again: by the same owner 200, also after a restart; one with a policy may restate it until the update's first
    reservation, one without leaves it as it is. By another owner 409 `update_owned`.
    """
    view, new = await database.transaction(service.open_update, run_id, update_id, body, caller)
    response.status_code = status.HTTP_201_CREATED if new else status.HTTP_200_OK
    changes.announce(run_id)
    return view


@line.get("/lineage", responses=refusals("run_unknown"))
async def get_uses(
    run_id: RunId,
    caller: Anyone,
    database: DatabaseHere,
    version: VersionFilter = None,
    ruleset_id: IdFilter = None,
    ruleset_hash: HashFilter = None,
) -> LineageUses:
    """List the updates that used rollouts of this policy version, or of this ruleset, oldest first.

    For the question what a bad version or a wrong ruleset has spoiled.
    """
    return await database.transaction(lineage.uses, run_id, version, ruleset_id, ruleset_hash)


@router.get("/{update_id}", responses=refusals("run_unknown", "update_unknown"))
async def get_update(run_id: RunId, update_id: UpdateId, caller: Anyone, database: DatabaseHere) -> UpdateView:
    """Show an update: its state, its lease, and its commit_no once it is committed.

    After a restart this tells a trainer whether its last step counted.
    """
    return await database.transaction(service.get_update, run_id, update_id)


@router.get("/{update_id}/lineage", responses=refusals("run_unknown", "update_unknown"))
async def get_lineage(run_id: RunId, update_id: UpdateId, caller: Anyone, database: DatabaseHere) -> Lineage:
    """Show what an update was made from: rollouts, policies and artifacts, rulesets, and what was refused.

    With lag and drift of each member as they were measured at its reservation, and the versions that name the update.
    """
    return await database.transaction(lineage.of_update, run_id, update_id)


@router.post(
    "/{update_id}/candidates",
    response_model=Candidates,
    responses=refusals(*OPEN, "line_conflict", "ruleset_conflict") | CANDIDATES,
)
async def get_candidates(
    run_id: RunId,
    update_id: UpdateId,
    body: CandidatesRequest,
    request: Request,
    caller: Trainer,
    database: DatabaseHere,
    changes: ChangesHere,
    numbers: NumbersHere,
) -> Response:
    """Ask for whole groups, the oldest admissible first, with their evidence; they are held for this update.

    With `wait_seconds` the call waits until that many are there. An empty answer says why and since when. With
    `reserve`, for runs whose drift_gate is off, they are bound in the same call. All share one contract.
    Accept: application/vnd.apache.arrow.stream answers in columns.

    Sent again: what is held for this update comes first, and with `reserve` what it has bound.
    """
    run = await database.read(get_run, run_id)
    loop = asyncio.get_running_loop()
    end = loop.time() + min(body.wait_seconds, run.settings.longest_wait_seconds)
    with changes.follow(run_id) as follower:
        while True:
            await _tidy(database, run_id)
            left = 0.0 if changes.ended else end - loop.time()
            offer = await database.transaction(candidates.hold, run_id, update_id, body, caller, left <= 0)
            if offer is not None:
                break
            await follower.next(left)
    numbers.reserved(run_id, offer.reserved or [])
    if ARROW_MEDIA_TYPE in request.headers.get("accept", ""):
        return Response(await asyncio.to_thread(candidates.to_arrow, offer), media_type=ARROW_MEDIA_TYPE)
    return JSONResponse(await asyncio.to_thread(candidates.to_json, offer))


def _decode(kind: str, body: bytes) -> ReserveColumns:
    try:
        if kind == ARROW_MEDIA_TYPE:
            return decode_reserve(body)
        return reserve_columns(ReserveRequest.model_validate_json(body))
    except ValidationError as error:
        fault = validation_fault(error, "body")
        raise Refusal("invalid_request", fault.detail, field=fault.field) from error


@router.post(
    "/{update_id}/reserve",
    responses=refusals(
        *OWNED,
        "line_conflict",
        "drift_suspect",
        "ruleset_conflict",
        "partial_group",
        "invalid_log_probs",
        "invalid_arrow",
        "too_large",
        "unsupported_media_type",
    ),
    openapi_extra=BODY,
)
async def reserve_rollouts(
    run_id: RunId,
    update_id: UpdateId,
    request: Request,
    caller: Trainer,
    database: DatabaseHere,
    changes: ChangesHere,
    numbers: NumbersHere,
) -> ReserveAnswer:
    """Bind rollouts to this update: each only if it is rewarded, at the revision seen, within lag and drift.

    Send the current policy's log-probs, from before the update's first optimizer step. Each rollout gets the
    first reason that holds, or `reserved`.

    Sent again: what this update holds is answered `idempotent_retry`, and what it was refused the same refusal; nothing
    moves twice.
    """
    kind, body = await read_body(request, "application/json", ARROW_MEDIA_TYPE)
    columns = await asyncio.to_thread(_decode, kind, body)
    await _tidy(database, run_id)
    run, evidence = await database.read(reservation.read_evidence, run_id, columns)
    drift = await asyncio.to_thread(reservation.measure, run, columns, evidence)
    answer = await database.transaction(reservation.reserve, run_id, update_id, columns, drift, caller)
    numbers.reserved(run_id, answer.verdicts)
    changes.announce(run_id)
    return answer


@router.post("/{update_id}/renew", responses=refusals(*OPEN))
async def renew_update(
    run_id: RunId, update_id: UpdateId, body: Renew, caller: Trainer, database: DatabaseHere
) -> UpdateView:
    """Extend the update's lease by the run's lease time, from now.

    Every third of `lease_seconds` is a good pace. When it answers 409 the update has ended: discard the step.

    Sent again: the lease counts from the later call.
    """
    return await database.transaction(service.renew, run_id, update_id, body, caller)


@router.post("/{update_id}/commit", responses=refusals(*OPEN, "line_conflict", "policy_withdrawn"))
async def commit_update(
    run_id: RunId,
    update_id: UpdateId,
    body: CommitUpdate,
    caller: Trainer,
    database: DatabaseHere,
    changes: ChangesHere,
) -> UpdateView:
    """Consume everything that the update holds, once, and get its commit_no.

    An update that holds nothing is committed too and takes a number: a step without rollouts is a place in the line
    like any other, which a checkpoint may name and a rewind may go back to.

    Sent again: the update with the same commit_no, whatever has happened since; after a rewind its state is `rewound`.
    """
    view = await database.transaction(service.commit, run_id, update_id, body, caller)
    changes.announce(run_id)
    return view


@router.post("/{update_id}/abort", responses=refusals(*OPEN))
async def abort_update(
    run_id: RunId,
    update_id: UpdateId,
    body: AbortUpdate,
    caller: Trainer,
    database: DatabaseHere,
    changes: ChangesHere,
) -> UpdateView:
    """End the update without consuming anything: what it holds goes back, or into quarantine.

    For a step that failed before its first optimizer step, or that is undone. The reason is recorded as a failure.

    Sent again: the update as it stands. One that ended otherwise is 409 `update_fenced` or `lease_expired`.
    """
    view = await database.transaction(service.abort, run_id, update_id, body, caller)
    changes.announce(run_id)
    return view
