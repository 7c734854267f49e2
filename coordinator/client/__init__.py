"""The Python client of the coordinator: httpx, pyarrow, numpy and pydantic, no server code and no torch.

A trainer's loop, with a `learner` that scores, steps and exports::

    with Coordinator() as coordinator:
        run = coordinator.run("sums")
        for version in range(1, 101):
            with run.update() as update:
                candidates = update.candidates(groups=8, wait_seconds=300)
                current = learner.log_probs(candidates.token_ids, candidates.action_masks)
                reserved = update.reserve(candidates, current)
                learner.step(reserved.admitted)
                update.commit()
            run.publish(version=version, parent_version=version - 1, updates=[update.id],
                        folder=learner.export(), base_model=learner.base_model)
            run.activate(version)

The lease is renewed in the background, an exception aborts the update with its reason, and every call is sent
again on connection faults. What can go wrong is in `coordinator.client.errors`.

`AsyncCoordinator` is the same for asyncio, each call awaited and each `with` and `for` an `async` one. Its code is the
source of both: see `coordinator.client.aio`.
"""

from coordinator.client.aio.coordinator import AsyncCoordinator
from coordinator.client.aio.run import AsyncRun
from coordinator.client.aio.updates import AsyncUpdate
from coordinator.client.aio.workers import AsyncWorker
from coordinator.client.coordinator import Coordinator
from coordinator.client.errors import (
    ArtifactCorrupt,
    CoordinatorError,
    DriftSuspect,
    LeaseExpired,
    LineConflict,
    NotActivated,
    NotConfigured,
    Refused,
    UnexpectedAnswer,
    Unreachable,
    UpdateFenced,
)
from coordinator.client.rollouts import Candidates, Reserved, Trajectory
from coordinator.client.run import Run
from coordinator.client.updates import Update
from coordinator.client.workers import Worker

__all__ = [
    "ArtifactCorrupt",
    "AsyncCoordinator",
    "AsyncRun",
    "AsyncUpdate",
    "AsyncWorker",
    "Candidates",
    "Coordinator",
    "CoordinatorError",
    "DriftSuspect",
    "LeaseExpired",
    "LineConflict",
    "NotActivated",
    "NotConfigured",
    "Refused",
    "Reserved",
    "Run",
    "Trajectory",
    "UnexpectedAnswer",
    "Unreachable",
    "Update",
    "UpdateFenced",
    "Worker",
]
