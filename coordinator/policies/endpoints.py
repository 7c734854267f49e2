"""The addresses of policy versions and activations; those of their files are in `file_endpoints`."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Query, Request, Response, status

from coordinator.addresses import ActivationId, RunId, VersionNumber
from coordinator.errors import refusals
from coordinator.media import AGAIN
from coordinator.operations.access import Anyone, ChangesHere, DatabaseHere, GuardedRoute, Trainer
from coordinator.policies import activation, reading, service
from coordinator.runs.service import get_run
from coordinator.storage.locations import Locations
from coordinator.storage.watchers import Watchers
from coordinator.wire.policies import (
    ActivationList,
    ActivationVerdict,
    ActivationView,
    GiveUp,
    OpenActivation,
    PolicyList,
    PolicyView,
    PreparePolicy,
    Watch,
)

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["policies"], route_class=GuardedRoute)


async def locations_of(request: Request) -> Locations:
    """Where artifacts may lie beside the app's own store."""
    return cast(Locations, request.app.state.locations)


async def watchers_of(request: Request) -> Watchers[Watch]:
    """Those who watch the runs of this app."""
    return cast(Watchers[Watch], request.app.state.watchers)


LocationsHere = Annotated[Locations, Depends(locations_of)]
WatchersHere = Annotated[Watchers[Watch], Depends(watchers_of)]


@router.post(
    "/policies",
    status_code=status.HTTP_201_CREATED,
    responses=refusals(
        "run_unknown",
        "policy_version_unknown",
        "policy_conflict",
        "non_monotonic_version",
        "policy_withdrawn",
        "policy_not_durable",
        "policy_state",
        "update_not_committed",
        "invalid_file_name",
        "artifact_uri_not_allowed",
    )
    | {200: {"model": PolicyView, "description": AGAIN}},
)
async def prepare_policy(
    run_id: RunId,
    body: PreparePolicy,
    caller: Trainer,
    database: DatabaseHere,
    changes: ChangesHere,
    locations: LocationsHere,
    response: Response,
) -> PolicyView:
    """Prepare a policy version: its number, its parent, the updates that made it, and the manifest of its files.

    The first step of publishing: then upload the files, commit the version, and open its activation. Its artifact hash
    is in the answer, computed from the manifest.

    Sent again: 200 and nothing changes; the same version with another content is 409 `policy_conflict`.
    """
    view, new = await database.transaction(service.prepare, run_id, body, caller, locations)
    response.status_code = status.HTTP_201_CREATED if new else status.HTTP_200_OK
    changes.announce(run_id)
    return view


@router.get("/policies", responses=refusals("run_unknown"))
async def list_policies(run_id: RunId, caller: Anyone, database: DatabaseHere) -> PolicyList:
    """List the run's policy versions.

    Lowest number first, each with its state, its parent and its manifest.
    """
    return await database.transaction(service.list_policies, run_id)


@router.get("/policies/{version}", responses=refusals("run_unknown", "policy_version_unknown"))
async def get_policy(run_id: RunId, version: VersionNumber, caller: Anyone, database: DatabaseHere) -> PolicyView:
    """Show a policy version with the manifest of its artifact.

    A worker reads from it what to download; after a commit that answered 202, `verification` says how far it is.
    """
    return await database.transaction(service.get_policy, run_id, version)


@router.post(
    "/policies/{version}/activations",
    status_code=status.HTTP_201_CREATED,
    responses=refusals(
        "run_unknown",
        "policy_version_unknown",
        "worker_unknown",
        "activation_conflict",
        "activation_open",
        "policy_state",
        "non_monotonic_version",
        "no_required_workers",
    )
    | {200: {"model": ActivationView, "description": AGAIN}},
)
async def open_activation(
    run_id: RunId,
    version: VersionNumber,
    body: OpenActivation,
    caller: Trainer,
    database: DatabaseHere,
    changes: ChangesHere,
    response: Response,
) -> ActivationView:
    """Open an activation: from now on these workers must load the version and confirm it.

    While another one is open, the newest version that was asked for waits, and opens when that one ends; an older one
    that waits is superseded. With `supersede` the open one ends at once, and its version is abandoned.

    Sent again: 200 with the activation as it stands; the id with another version or other workers is 409
    `activation_conflict`.
    """
    view, new = await database.transaction(activation.open_activation, run_id, version, body, caller)
    response.status_code = status.HTTP_201_CREATED if new else status.HTTP_200_OK
    changes.announce(run_id)
    return view


@router.post(
    "/policies/{version}/activate",
    responses=refusals("run_unknown", "activation_unknown", "activation_open", "activation_ended"),
)
async def activate_policy(
    run_id: RunId, version: VersionNumber, caller: Trainer, database: DatabaseHere, changes: ChangesHere
) -> ActivationVerdict:
    """Switch to the version if its artifact is committed and every required worker confirmed it.

    The answer is a verdict: the first reason that stands in the way, and the workers it is about. A run whose
    `activation` is `last_ack` switches by itself; this then tells what it waits for.

    Sent again: judged anew; once the switch was made, `activated`.
    """
    verdict = await database.transaction(activation.activate, run_id, version, caller)
    changes.announce(run_id)
    return verdict


@router.get("/activations", responses=refusals("run_unknown"))
async def list_activations(run_id: RunId, caller: Anyone, database: DatabaseHere) -> ActivationList:
    """List the run's activations with each required worker's ack.

    Oldest first, those that failed and were given up included.
    """
    return await database.transaction(reading.list_activations, run_id)


@router.get("/activations/{activation_id}", responses=refusals("run_unknown", "activation_unknown"))
async def get_activation(
    run_id: RunId, activation_id: ActivationId, caller: Anyone, database: DatabaseHere
) -> ActivationView:
    """Show an activation with each required worker's ack.

    Whom it waits for, who was dropped and why, and until when it may stay open.
    """
    return await database.transaction(reading.get_activation, run_id, activation_id)


@router.post(
    "/activations/{activation_id}/give-up",
    responses=refusals("run_unknown", "activation_unknown", "activation_ended"),
)
async def give_up_activation(
    run_id: RunId,
    activation_id: ActivationId,
    body: GiveUp,
    caller: Trainer,
    database: DatabaseHere,
    changes: ChangesHere,
) -> ActivationView:
    """Give up an activation that is open or waits. The active version stays; the candidate is abandoned.

    What workers made with the candidate is quarantined, and the activation that waits opens.

    Sent again: the activation as it stands. One that ended otherwise is 409 `activation_ended`.
    """
    view = await database.transaction(activation.give_up, run_id, activation_id, body, caller)
    changes.announce(run_id)
    return view


@router.get("/watch", responses=refusals("run_unknown"))
async def watch(
    run_id: RunId,
    caller: Anyone,
    database: DatabaseHere,
    watchers: WatchersHere,
    after: Annotated[int, Query(ge=-1, le=2**53, description="the event_no seen last; -1: answer at once")] = -1,
    wait_seconds: Annotated[float, Query(ge=0, le=3600, description="at most the run's longest_wait_seconds")] = 0,
) -> Watch:
    """Read the active version and the candidate, or wait until the run has an event newer than a given one.

    The long poll of a worker: `wait_seconds` with the `event_no` of the last answer. It holds no database connection
    while it waits, and answers at once when the server ends.
    """
    run = await database.transaction(get_run, run_id)
    seconds = min(wait_seconds, run.settings.longest_wait_seconds)
    return await watchers.answer(run_id, lambda view: view.event_no > after, seconds)
