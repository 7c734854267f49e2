"""The addresses of rollouts and rewards."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from coordinator.addresses import (
    AfterText,
    Before,
    From,
    IdFilter,
    Limit,
    NameFilter,
    RolloutId,
    RunId,
    TextFilter,
    VersionFilter,
)
from coordinator.body import read_body
from coordinator.errors import refusals
from coordinator.media import arrow_answer, json_or_arrow
from coordinator.operations.access import (
    Admin,
    Anyone,
    ChangesHere,
    DatabaseHere,
    GuardedRoute,
    RewardCaller,
    WorkerCaller,
)
from coordinator.operations.numbers import NumbersHere
from coordinator.rollouts import arrival, audit, differences, failures, quarantine, reading, rewards
from coordinator.runs.service import get_run
from coordinator.wire.columns import (
    ARROW_MEDIA_TYPE,
    EVIDENCE_SCHEMA,
    MAY_BE_LEFT_OUT,
    ROLLOUT_SCHEMA,
    encode_evidence,
)
from coordinator.wire.rollouts import (
    ArrivalAnswer,
    Audit,
    EvidenceAnswer,
    EvidenceRequest,
    GenerationFailureBatch,
    Quarantine,
    Release,
    ReleaseAnswer,
    Rescore,
    RescoreAnswer,
    RewardAnswer,
    RewardBatch,
    Rollout,
    RolloutBatch,
    RolloutDifferences,
    RolloutEvidence,
    RolloutHistory,
    RolloutList,
    RolloutView,
    State,
)

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["rollouts"], route_class=GuardedRoute)

EVIDENCE = arrow_answer(
    EVIDENCE_SCHEMA, RolloutEvidence, metadata={"missing": "the ids that have no tokens here, or no more"}
)
BODY = json_or_arrow(RolloutBatch, ROLLOUT_SCHEMA, Rollout, left_out=MAY_BE_LEFT_OUT)


@router.post(
    "/rollouts",
    responses=refusals("run_unknown", "too_large", "unsupported_media_type", "invalid_arrow", "storage_full"),
    openapi_extra=BODY,
)
async def submit_rollouts(
    run_id: RunId,
    request: Request,
    caller: WorkerCaller,
    database: DatabaseHere,
    changes: ChangesHere,
    numbers: NumbersHere,
) -> ArrivalAnswer:
    """Submit rollouts with their whole identity, as JSON or as an Arrow stream.

    Each is answered by itself: accepted (a gate may have quarantined it or set it aside: see `reason`), a
    duplicate, a conflict, or rejected.

    Sent again: what is here with the same content is answered `duplicate` and changes nothing, what has other content
    `conflict`. It stays so after retention removed the tokens.
    """
    kind, body = await read_body(request, "application/json", ARROW_MEDIA_TYPE)
    decode = arrival.decode_arrow if kind == ARROW_MEDIA_TYPE else arrival.decode_json
    run = await database.read(get_run, run_id)
    arrived = await asyncio.to_thread(arrival.arrive, decode, body, run, caller)
    answer = await database.transaction(arrival.take_in, run, arrived, caller)
    numbers.arrived(run_id, answer)
    changes.announce(run_id)
    return answer


@router.post("/rewards", responses=refusals("run_unknown"))
async def submit_rewards(
    run_id: RunId,
    body: RewardBatch,
    caller: RewardCaller,
    database: DatabaseHere,
    changes: ChangesHere,
    numbers: NumbersHere,
) -> RewardAnswer:
    """Submit rewards. A timeout or an error is recorded as a failure and leaves the rollout without a value.

    A group's first good reward pins its ruleset. A reward for a rollout that is quarantined or offline is stored and
    moves nothing.

    Sent again: answered `duplicate`; another value for a rollout that has one is a `conflict`, and replaced only by
    `rewards/rescore`.
    """
    answer = await database.transaction(rewards.take_rewards, run_id, body, caller)
    numbers.rewarded(run_id, answer)
    changes.announce(run_id)
    return answer


@router.post(
    "/rewards/rescore",
    responses=refusals("run_unknown", "group_unknown", "group_held", "partial_group"),
)
async def rescore_group(
    run_id: RunId, body: Rescore, caller: RewardCaller, database: DatabaseHere, changes: ChangesHere
) -> RescoreAnswer:
    """Replace the rewards of a whole group that no update holds, under another ruleset or the same one.

    After a fault in the scoring code, say. It names every member that has a good reward; the old rewards are kept.

    Sent again: `duplicate` for every member, and nothing changes.
    """
    answer = await database.transaction(rewards.rescore, run_id, body, caller)
    changes.announce(run_id)
    return answer


@router.post("/rollouts/failures", responses=refusals("run_unknown"))
async def report_generation_failures(
    run_id: RunId,
    body: GenerationFailureBatch,
    caller: WorkerCaller,
    database: DatabaseHere,
    changes: ChangesHere,
    numbers: NumbersHere,
) -> ArrivalAnswer:
    """Report attempts that gave no tokens. Each stands as a rollout of its own, `generation_failed`.

    At a member's last attempt (`max_attempts` of the run) this settles it, so that its group need not wait for its
    deadline.

    Sent again: answered `duplicate`, however the message is worded.
    """
    answer = await database.transaction(failures.take_failures, run_id, body, caller)
    numbers.arrived(run_id, answer)
    changes.announce(run_id)
    return answer


@router.get("/quarantine", responses=refusals("run_unknown"))
async def list_quarantine(run_id: RunId, caller: Anyone, database: DatabaseHere, limit: Limit = 100) -> Quarantine:
    """Count what is in quarantine, by reason and by the update that put it there, the latest first.

    Each row is what one call of `release_rollouts` takes back: look here before it.
    """
    return await database.transaction(quarantine.list_quarantine, run_id, limit)


@router.post("/rollouts/release", responses=refusals("run_unknown", "update_unknown"))
async def release_rollouts(
    run_id: RunId, body: Release, caller: Admin, database: DatabaseHere, changes: ChangesHere
) -> ReleaseAnswer:
    """Release rollouts from quarantine, by id or all that one update quarantined for one reason.

    The arrival checks are repeated: what they still refuse stays. Members that fell with their group come back
    with the one that is released.

    Sent again: what was released is answered `not_releasable`, by id, or is not named, by update and reason; nothing
    changes.
    """
    answer = await database.transaction(quarantine.release, run_id, body, caller)
    changes.announce(run_id)
    return answer


@router.post("/rollouts/evidence", responses=refusals("run_unknown") | EVIDENCE, response_model=EvidenceAnswer)
async def read_evidence(
    run_id: RunId, body: EvidenceRequest, request: Request, caller: Anyone, database: DatabaseHere
) -> Response:
    """Read the tokens of many rollouts. Accept: application/vnd.apache.arrow.stream answers in columns.

    For a dashboard or an export; a trainer gets them with its candidates. Ids without tokens are listed in `missing`.

    Sent again: it only reads.
    """
    rows, missing = await database.transaction(reading.evidence_rows, run_id, body.rollout_ids)
    columns = await asyncio.to_thread(reading.evidence_columns, rows, missing)
    if ARROW_MEDIA_TYPE in request.headers.get("accept", ""):
        return Response(await asyncio.to_thread(encode_evidence, columns), media_type=ARROW_MEDIA_TYPE)
    return JSONResponse((await asyncio.to_thread(columns.to_model)).model_dump(mode="json"))


@router.get("/rollouts", responses=refusals("run_unknown"))
async def list_rollouts(
    run_id: RunId,
    caller: Anyone,
    database: DatabaseHere,
    state: Annotated[State | None, Query(description="in this state")] = None,
    group_id: IdFilter = None,
    version: VersionFilter = None,
    task_source: IdFilter = None,
    worker_id: NameFilter = None,
    reason: TextFilter = None,
    arrived_from: From = None,
    arrived_before: Before = None,
    after: AfterText = "",
    limit: Limit = 100,
) -> RolloutList:
    """List rollouts by id, those that meet every filter.

    Send `next_after` as `after` to go on; the order never changes. A reward service asks for `state=generated`.
    """
    return await database.transaction(
        reading.list_rollouts,
        run_id,
        after,
        limit,
        state=state,
        group_id=group_id,
        version=version,
        task_source=task_source,
        worker_id=worker_id,
        reason=reason,
        arrived_from=arrived_from,
        arrived_before=arrived_before,
    )


@router.get("/audit", responses=refusals("run_unknown", "update_unknown"))
async def get_audit(
    run_id: RunId,
    caller: Anyone,
    database: DatabaseHere,
    rollout_id: IdFilter = None,
    update_id: IdFilter = None,
    at_from: From = None,
    at_before: Before = None,
    after: AfterText = "",
    limit: Annotated[int, Query(ge=1, le=10_000, description="how many at most")] = 1000,
) -> Audit:
    """Read every change of rollouts in the order of time, all or those of one rollout or update.

    Send `next_after` as `after` to go on, also after an answer without entries: changes of the last moments come once
    their order is settled.
    """
    return await database.transaction(
        audit.list_audit,
        run_id,
        after,
        limit,
        rollout_id=rollout_id,
        update_id=update_id,
        at_from=at_from,
        at_before=at_before,
    )


@router.get("/rollouts/{rollout_id}/history", responses=refusals("run_unknown", "rollout_unknown"))
async def get_history(run_id: RunId, rollout_id: RolloutId, caller: Anyone, database: DatabaseHere) -> RolloutHistory:
    """Read every change of a rollout's state, oldest first.

    With who made it, for which update and reason, and, where a gate decided, lag and drift with the limits in force.
    """
    return await database.transaction(reading.get_history, run_id, rollout_id)


@router.get("/rollouts/{rollout_id}/evidence", responses=refusals("run_unknown", "rollout_unknown"))
async def get_evidence(run_id: RunId, rollout_id: RolloutId, caller: Anyone, database: DatabaseHere) -> RolloutEvidence:
    """Read a rollout's tokens, mask and behaviour log-probs.

    As they are stored: log-probs are float32. For many rollouts at once use `rollouts/evidence`.
    """
    return await database.transaction(reading.get_evidence, run_id, rollout_id)


@router.get("/rollouts/{rollout_id}/differences", responses=refusals("run_unknown", "rollout_unknown"))
async def get_differences(
    run_id: RunId, rollout_id: RolloutId, caller: Anyone, database: DatabaseHere
) -> RolloutDifferences:
    """Read by how much the log-prob of each token differed, for every update that measured the rollout.

    The list is empty while no update has measured it: none has asked for it, or the run's `drift_gate` is off. They
    go with the tokens: after retention it is 404 `rollout_unknown`.
    """
    return await database.transaction(differences.get_differences, run_id, rollout_id)


@router.get("/rollouts/{rollout_id}", responses=refusals("run_unknown", "rollout_unknown"))
async def get_rollout(run_id: RunId, rollout_id: RolloutId, caller: Anyone, database: DatabaseHere) -> RolloutView:
    """Show a rollout without its tokens.

    Its state with the reason, the spans that say which version made which tokens, and its reward.
    """
    return await database.transaction(reading.get_rollout, run_id, rollout_id)
