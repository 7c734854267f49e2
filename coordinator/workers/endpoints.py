"""The addresses of workers."""

from __future__ import annotations

from fastapi import APIRouter

from coordinator.addresses import RunId, WorkerId
from coordinator.errors import refusals
from coordinator.operations.access import Admin, Anyone, ChangesHere, DatabaseHere, GuardedRoute, WorkerCaller
from coordinator.wire.policies import Watch
from coordinator.wire.workers import (
    Ack,
    AckVerdict,
    FenceWorker,
    Heartbeat,
    Incarnation,
    RegisterWorker,
    TicketAnswer,
    TicketRequest,
    WorkerFailure,
    WorkerList,
    WorkerStage,
    WorkerView,
)
from coordinator.workers import acks, service, tickets

router = APIRouter(prefix="/v1/runs/{run_id}/workers", tags=["workers"], route_class=GuardedRoute)

LIVE = ("run_unknown", "worker_unknown", "incarnation_superseded", "incarnation_unknown")


@router.get("", responses=refusals("run_unknown"))
async def list_workers(run_id: RunId, caller: Anyone, database: DatabaseHere) -> WorkerList:
    """List the run's workers with their heartbeats.

    Every worker that ever registered, by id, with its state, whether it is fenced or suspect, and why.
    """
    return await database.transaction(service.list_workers, run_id)


@router.put("/{worker_id}", responses=refusals(*LIVE))
async def register_worker(
    run_id: RunId,
    worker_id: WorkerId,
    body: RegisterWorker,
    caller: WorkerCaller,
    database: DatabaseHere,
    changes: ChangesHere,
) -> WorkerView:
    """Register one life of a worker process. The acks of the life before count no longer.

    The first call of a process, under an incarnation that no other process ever had: a random one will do. A rollout
    counts only from an incarnation that registered and acked the version that made it.

    Sent again: the worker as it stands. An incarnation that was superseded cannot come back: 409
    `incarnation_superseded`.
    """
    view = await database.transaction(service.register, run_id, worker_id, body, caller)
    changes.announce(run_id)
    return view


@router.post("/{worker_id}/heartbeat", responses=refusals(*LIVE))
async def heartbeat(
    run_id: RunId, worker_id: WorkerId, body: Heartbeat, caller: WorkerCaller, database: DatabaseHere
) -> Watch:
    """Say that this incarnation lives; the answer is that of watch.

    Every `heartbeat_seconds` of the run; after `lost_after_seconds` of silence the worker counts as lost. An engine
    that gives its GPU away says so with `asleep_seconds`.

    Sent again: one more sign of life.
    """
    return await database.transaction(service.beat, run_id, worker_id, body)


@router.post("/{worker_id}/drain", responses=refusals(*LIVE))
async def drain_worker(
    run_id: RunId,
    worker_id: WorkerId,
    body: Incarnation,
    caller: WorkerCaller,
    database: DatabaseHere,
    changes: ChangesHere,
) -> WorkerView:
    """Leave the open activation and those to come, and finish what was begun.

    The worker takes no more tickets and is dropped from an open activation; its rollouts still arrive. Deregister when
    they have.

    Sent again: the worker as it stands; once it is deregistered, 409 `incarnation_unknown`.
    """
    view = await database.transaction(service.drain, run_id, worker_id, body, caller)
    changes.announce(run_id)
    return view


@router.post("/{worker_id}/deregister", responses=refusals(*LIVE))
async def deregister_worker(
    run_id: RunId,
    worker_id: WorkerId,
    body: Incarnation,
    caller: WorkerCaller,
    database: DatabaseHere,
    changes: ChangesHere,
) -> WorkerView:
    """End this life of the worker.

    What it generated stays vouched for. The process comes back by registering as a new incarnation.

    Sent again: the worker as it stands.
    """
    view = await database.transaction(service.deregister, run_id, worker_id, body, caller)
    changes.announce(run_id)
    return view


@router.post("/{worker_id}/fence", responses=refusals("run_unknown", "worker_unknown"))
async def fence_worker(
    run_id: RunId,
    worker_id: WorkerId,
    body: FenceWorker,
    caller: Admin,
    database: DatabaseHere,
    changes: ChangesHere,
) -> WorkerView:
    """Take a worker out until it acks a version that it loaded whole.

    For a worker that seems to serve wrong weights: what it confirmed counts for no activation, it takes no tickets, and
    an activation that opens does not require it. Rollouts that it hands in are judged as before, since it had confirmed
    the versions that they name; to refuse those as well, revoke its token.

    Sent again: it is fenced anew, for the reason that is given last; an ack that came between the two counts for no
    activation.
    """
    view = await database.transaction(service.fence, run_id, worker_id, body, caller)
    changes.announce(run_id)
    return view


@router.post("/{worker_id}/acks", responses=refusals(*LIVE, "policy_version_unknown"))
async def ack_policy(
    run_id: RunId,
    worker_id: WorkerId,
    body: Ack,
    caller: WorkerCaller,
    database: DatabaseHere,
    changes: ChangesHere,
) -> AckVerdict:
    """Confirm that the files were verified and that the engine serves this version and hash.

    A wrong hash is stored, counts for nothing and fences the worker until the right ack replaces it. The last
    ack that an open activation waits for makes the switch.

    Sent again: judged anew and answered the same; the newest ack of an incarnation for a version replaces the one
    before.
    """
    verdict = await database.transaction(acks.take_ack, run_id, worker_id, body, caller)
    changes.announce(run_id)
    return verdict


@router.post("/{worker_id}/stage", responses=refusals(*LIVE, "policy_version_unknown"))
async def note_stage(
    run_id: RunId,
    worker_id: WorkerId,
    body: WorkerStage,
    caller: WorkerCaller,
    database: DatabaseHere,
    changes: ChangesHere,
) -> WorkerView:
    """Say how far this worker has come with a version: an event for those who watch; only an ack counts.

    It is what the timeline of an activation is drawn from.

    Sent again: one more entry in the journal, which decides nothing.
    """
    view = await database.transaction(service.note_stage, run_id, worker_id, body, caller)
    changes.announce(run_id)
    return view


@router.post("/{worker_id}/failures", responses=refusals(*LIVE, "policy_version_unknown"))
async def report_failure(
    run_id: RunId,
    worker_id: WorkerId,
    body: WorkerFailure,
    caller: WorkerCaller,
    database: DatabaseHere,
    changes: ChangesHere,
) -> WorkerView:
    """Report that a version could not be downloaded, verified or loaded.

    The worker is fenced until it acks a version that it loaded whole; an activation that waits for it goes on waiting,
    to its deadline.

    Sent again: one more failure is recorded, and the fence stays.
    """
    view = await database.transaction(service.report_failure, run_id, worker_id, body, caller)
    changes.announce(run_id)
    return view


@router.post("/{worker_id}/tickets", responses=refusals(*LIVE))
async def ask_tickets(
    run_id: RunId, worker_id: WorkerId, body: TicketRequest, caller: WorkerCaller, database: DatabaseHere
) -> TicketAnswer:
    """Ask which groups may be generated now. Arrival never needs a ticket.

    The run's `groups_per_update` and `max_lag` say how many groups are worth generating: what goes beyond would be
    stale before a trainer could take it. A ticket ends with its group's first arrival, or after `ticket_seconds`.

    Sent again: groups that the worker has a ticket for are granted again, and count once.
    """
    return await database.transaction(tickets.grant_tickets, run_id, worker_id, body)
