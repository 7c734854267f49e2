"""How one activation went, step by step."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from coordinator.wire.base import Sha256, WireModel


class TimelineStep(WireModel):
    """One step, as the journal has it."""

    step: str = Field(
        description="of the version or activation: prepared, committed, waiting, opened, activated, failed, given_up, "
        "superseded; of a worker: registered, downloading, verifying, loading, acked, mismatched, failed, fenced, "
        "dropped"
    )
    event_no: int = Field(description="the number of its entry in the journal")
    at: datetime
    seconds: float = Field(
        description="since the activation was opened, or asked for if it still waits; below 0: before"
    )
    detail: str | None = Field(description="the reason or the message of what went wrong")


class WorkerTimeline(WireModel):
    """What one worker that the activation required did between its opening and its end."""

    worker_id: str
    steps: tuple[TimelineStep, ...] = Field(description="in their order")


class ActivationTimeline(WireModel):
    """An activation from the preparation of its version to the switch, or to how it ended."""

    activation_id: str
    version: int
    artifact_hash: Sha256
    state: Literal["waiting", "open", "succeeded", "failed", "given_up", "superseded"]
    reason: str | None
    steps: tuple[TimelineStep, ...] = Field(description="of the version and of the activation, in their order")
    workers: tuple[WorkerTimeline, ...] = Field(description="each that was required at the opening, by id")

    def __str__(self) -> str:
        """A table for people: every step in its order, with seconds since the opening."""
        rows = [(step, "") for step in self.steps]
        rows += [(step, worker.worker_id) for worker in self.workers for step in worker.steps]
        who = max((len(worker.worker_id) for worker in self.workers), default=0)
        lines = [f"activation {self.activation_id} of version {self.version}: {self.state}"]
        if self.reason:
            lines[0] += f", {self.reason}"
        for step, worker_id in sorted(rows, key=lambda row: row[0].event_no):
            line = f"{step.seconds:>10.3f} s  {worker_id:<{who}}  {step.step}"
            lines.append(f"{line}: {step.detail}" if step.detail else line)
        silent = [worker.worker_id for worker in self.workers if not worker.steps]
        return "\n".join([*lines, *(f"{'':>10}    {worker_id:<{who}}  nothing yet" for worker_id in silent)])
