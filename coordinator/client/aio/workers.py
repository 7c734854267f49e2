"""What a worker process says to the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from coordinator.client.aio.connection import AsyncConnection
from coordinator.wire.policies import Watch
from coordinator.wire.workers import (
    Ack,
    AckVerdict,
    Heartbeat,
    Incarnation,
    RegisterWorker,
    TicketAnswer,
    TicketRequest,
    WeightDigest,
    WorkerFailure,
    WorkerStage,
    WorkerView,
)


class AsyncWorker:
    """One incarnation of a worker in a run. Made by `AsyncRun.worker`.

    Each call raises `Refused` with code `incarnation_superseded` once another incarnation has registered.
    """

    def __init__(self, connection: AsyncConnection, run_id: str, worker_id: str, incarnation: str) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self._connection = connection
        self._path = ("runs", run_id, "workers", worker_id)

    async def register(self, engine: str, engine_version: str) -> WorkerView:
        """Begin this incarnation; the acks of the one before are void."""
        body = RegisterWorker(incarnation=self.incarnation, engine=engine, engine_version=engine_version)
        return await self._connection.call("PUT", self._path, WorkerView, body=body)

    async def heartbeat(self, *, asleep_seconds: float | None = None, retry_seconds: float | None = None) -> Watch:
        """Say that this incarnation lives, and hear which version is active and which is to follow.

        `asleep_seconds`: the engine gives its GPU away for so long; until then silence is no loss.
        """
        body = Heartbeat(incarnation=self.incarnation, asleep_seconds=asleep_seconds)
        return await self._connection.call(
            "POST", (*self._path, "heartbeat"), Watch, body=body, retry_seconds=retry_seconds
        )

    async def ack(
        self, version: int, artifact_hash: str, *, digest: WeightDigest | None = None, caches_reset: Sequence[str] = ()
    ) -> AckVerdict:
        """Confirm that the engine serves this version. To be said after the files were verified and loaded.

        `digest` is of the weights in the engine's memory, where the engine can give one. It must be the one that the
        learner stated for its layout, if it did, equal to that of every engine of the same layout, and another than
        that of another artifact; else the ack is a mismatch.
        """
        body = Ack(
            incarnation=self.incarnation,
            version=version,
            artifact_hash=artifact_hash,
            digest=digest,
            caches_reset=tuple(caches_reset),
        )
        return await self._connection.call("POST", (*self._path, "acks"), AckVerdict, body=body)

    async def stage(
        self,
        version: int,
        stage: Literal["downloading", "verifying", "loading"],
        *,
        retry_seconds: float | None = None,
    ) -> WorkerView:
        """Say how far this worker has come with a version, for those who watch."""
        body = WorkerStage(incarnation=self.incarnation, version=version, stage=stage)
        return await self._connection.call(
            "POST", (*self._path, "stage"), WorkerView, body=body, retry_seconds=retry_seconds
        )

    async def fail(self, version: int, stage: Literal["download", "verify", "load"], message: str) -> WorkerView:
        """Report that a version could not be taken up. The worker is fenced until it acks one it loaded
        whole."""
        body = WorkerFailure(incarnation=self.incarnation, version=version, stage=stage, message=message[:2000])
        return await self._connection.call("POST", (*self._path, "failures"), WorkerView, body=body)

    async def tickets(self, group_ids: Sequence[str]) -> TicketAnswer:
        """Ask which of these groups (1 to 1000) may be generated now."""
        body = TicketRequest(incarnation=self.incarnation, group_ids=tuple(group_ids))
        return await self._connection.call("POST", (*self._path, "tickets"), TicketAnswer, body=body)

    async def drain(self) -> WorkerView:
        """Leave the set of workers that activations wait for; rollouts are still taken."""
        return await self._connection.call("POST", (*self._path, "drain"), WorkerView, body=self._life())

    async def deregister(self) -> WorkerView:
        """End this incarnation."""
        return await self._connection.call("POST", (*self._path, "deregister"), WorkerView, body=self._life())

    def _life(self) -> Incarnation:
        return Incarnation(incarnation=self.incarnation)
