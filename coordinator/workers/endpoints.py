"""The addresses of workers."""

from __future__ import annotations

from fastapi import APIRouter

from coordinator.addresses import RunId, WorkerId
from coordinator.errors import refusals
from coordinator.operations.access import Admin, Anyone, ChangesHere, DatabaseHere, WorkerCaller
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

router = APIRouter(prefix="/v1/runs/{run_id}/workers", tags=["workers"])

LIVE = ("run_unknown", "worker_unknown", "incarnation_superseded", "incarnation_unknown")


@router.get("", responses=refusals("run_unknown"))
async def list_workers(run_id: RunId, caller: Anyone, database: DatabaseHere) -> WorkerList:
    """List the run's workers with their heartbeats."""
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
    """Register one life of a worker process. The acks of the life before count no longer."""
    view = await database.transaction(service.register, run_id, worker_id, body, caller)
    changes.announce(run_id)
    return view


@router.post("/{worker_id}/heartbeat", responses=refusals(*LIVE))
async def heartbeat(
    run_id: RunId, worker_id: WorkerId, body: Heartbeat, caller: WorkerCaller, database: DatabaseHere
) -> Watch:
    """Say that this incarnation lives; the answer is what `watch` answers."""
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
    """Leave the activations to come out, and finish what was begun."""
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
    """End this life of the worker."""
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
    """Take a worker out until it acks a version that it loaded whole."""
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
    """Say how far this worker has come with a version: an event for those who watch; only an ack counts."""
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
    """Report that a version could not be downloaded, verified or loaded."""
    view = await database.transaction(service.report_failure, run_id, worker_id, body, caller)
    changes.announce(run_id)
    return view


@router.post("/{worker_id}/tickets", responses=refusals(*LIVE))
async def ask_tickets(
    run_id: RunId, worker_id: WorkerId, body: TicketRequest, caller: WorkerCaller, database: DatabaseHere
) -> TicketAnswer:
    """Ask which groups may be generated now. Arrival never needs a ticket."""
    return await database.transaction(tickets.grant_tickets, run_id, worker_id, body)
