"""The addresses of the ways back: rewinds, rollbacks, and the withdrawal of a version."""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter, Response, status

from coordinator.addresses import RewindId, RollbackId, RunId, VersionNumber
from coordinator.errors import Refusal, refusals
from coordinator.media import AGAIN
from coordinator.operations.access import Admin, Anyone, Caller, ChangesHere, DatabaseHere, GuardedRoute, Trainer
from coordinator.policies.endpoints import LocationsHere
from coordinator.policies.file_endpoints import Store
from coordinator.policies.files import commit as commit_version
from coordinator.rewinds import rewind, rollback
from coordinator.storage.artifacts import ArtifactStore
from coordinator.storage.database import Database
from coordinator.storage.locations import Locations
from coordinator.wire.policies import PolicyView
from coordinator.wire.rewinds import (
    Rewind,
    RewindList,
    RewindView,
    Rollback,
    RollbackList,
    RollbackView,
    WithdrawPolicy,
    WithdrawView,
)

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["rewinds"], route_class=GuardedRoute)

View = TypeVar("View", RewindView, RollbackView, WithdrawView)


async def _with_committed(
    view: View, database: Database, artifacts: ArtifactStore, locations: Locations, run_id: str, caller: Caller
) -> View:
    """The answer after the restoring version was committed, or begun to be: its files lie in the store already."""
    restoring: PolicyView | None = view.restoring
    if restoring is None or restoring.state != "prepared":
        return view
    try:
        restored = await commit_version(database, artifacts, locations, run_id, restoring.version, caller)
    except Refusal as refusal:
        # The way back is made; what its files lack is in the failures, and a commit of the version is tried again.
        if refusal.problem.code != "artifact_incomplete":
            raise
        return view
    return view.model_copy(update={"restoring": restored})


@router.put(
    "/rewinds/{rewind_id}",
    status_code=status.HTTP_201_CREATED,
    responses=refusals(
        "run_unknown",
        "rewind_conflict",
        "commit_unknown",
        "commit_rewound",
        "beyond_retention",
        "non_monotonic_version",
    )
    | {200: {"model": RewindView, "description": AGAIN}},
)
async def rewind_line(
    run_id: RunId,
    rewind_id: RewindId,
    body: Rewind,
    caller: Trainer,
    database: DatabaseHere,
    artifacts: Store,
    locations: LocationsHere,
    changes: ChangesHere,
    response: Response,
) -> RewindView:
    """Go back to the commit that a restored checkpoint contains; everything after it is undone, once.

    Every open update is fenced, later commits are marked rewound, what they consumed is released (or stays spent,
    as the call says), and the versions that they led to are withdrawn. Where that took the active version, a
    restoring one is prepared and committed (a large one as soon as its files were read): open its activation.

    Sent again: 200 with the first answer; the id with another commit or another treatment is 409 `rewind_conflict`.
    """
    view, new = await database.transaction(rewind.rewind, run_id, rewind_id, body, caller)
    view = await _with_committed(view, database, artifacts, locations, run_id, caller)
    response.status_code = status.HTTP_201_CREATED if new else status.HTTP_200_OK
    changes.announce(run_id)
    return view


@router.get("/rewinds", responses=refusals("run_unknown"))
async def list_rewinds(run_id: RunId, caller: Anyone, database: DatabaseHere) -> RewindList:
    """List the run's rewinds, oldest first.

    Each with what it undid and the version that it prepared.
    """
    return await database.transaction(rewind.list_rewinds, run_id)


@router.put(
    "/rollbacks/{rollback_id}",
    status_code=status.HTTP_201_CREATED,
    responses=refusals(
        "run_unknown",
        "policy_version_unknown",
        "policy_not_durable",
        "policy_state",
        "rollback_conflict",
        "non_monotonic_version",
        "activation_conflict",
        "no_required_workers",
    )
    | {200: {"model": RollbackView, "description": AGAIN}},
)
async def roll_back(
    run_id: RunId,
    rollback_id: RollbackId,
    body: Rollback,
    caller: Admin,
    database: DatabaseHere,
    artifacts: Store,
    locations: LocationsHere,
    changes: ChangesHere,
    response: Response,
) -> RollbackView:
    """Bring an earlier artifact back under a new version number, and withdraw what is not its ancestor.

    Open updates that stand on a withdrawn version are fenced, and rollouts made with one are quarantined. The new
    version is committed; with `activation_id` its activation opens at once.

    Sent again: 200 with the first answer; the id with another target is 409 `rollback_conflict`.
    """
    view, new = await database.transaction(rollback.roll_back, run_id, rollback_id, body, caller, artifacts)
    view = await _with_committed(view, database, artifacts, locations, run_id, caller)
    response.status_code = status.HTTP_201_CREATED if new else status.HTTP_200_OK
    changes.announce(run_id)
    return view


@router.get("/rollbacks", responses=refusals("run_unknown"))
async def list_rollbacks(run_id: RunId, caller: Anyone, database: DatabaseHere) -> RollbackList:
    """List the run's rollbacks, oldest first.

    Each with the versions that it withdrew and the one that it prepared.
    """
    return await database.transaction(rollback.list_rollbacks, run_id)


@router.post(
    "/policies/{version}/withdraw",
    responses=refusals("run_unknown", "policy_version_unknown", "policy_state", "non_monotonic_version"),
)
async def withdraw_policy(
    run_id: RunId,
    version: VersionNumber,
    body: WithdrawPolicy,
    caller: Admin,
    database: DatabaseHere,
    artifacts: Store,
    locations: LocationsHere,
    changes: ChangesHere,
) -> WithdrawView:
    """Withdraw a version, and those made from it: an activation of one fails, and nothing made with one is used.

    Where that takes the active version, a restoring one is prepared and committed (a large one as soon as its files
    were read): open its activation. The pointer stays until then.

    Sent again: the first answer, and nothing changes.
    """
    view = await database.transaction(rollback.withdraw, run_id, version, body, caller)
    view = await _with_committed(view, database, artifacts, locations, run_id, caller)
    changes.announce(run_id)
    return view
