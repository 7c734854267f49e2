"""Rollouts on their way: on disk before they are sent, gone once the coordinator has answered for them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from coordinator.client import CoordinatorError, Refused, Run
from coordinator.wire.columns import encode_rollouts, rollout_columns
from coordinator.wire.rollouts import Rollout
from worker_agent.logs import event
from worker_agent.status.vitals import Vitals

# Statuses that blame the content: the same bytes would be refused again and again.
_UNFIT = frozenset({413, 415, 422})
_LONGEST_PAUSE_SECONDS = 10.0


class BatchUnreadable(Exception):
    """A file in the spool that is no batch, or no whole one."""


class Spool:
    """Batches in the order they were made, each an Arrow IPC stream as it will be sent. One sender at a
    time."""

    def __init__(self, folder: Path, vitals: Vitals) -> None:
        self._pending = folder / "spool"
        self._rejected = folder / "rejected"
        self._vitals = vitals
        for needed in (self._pending, self._rejected):
            needed.mkdir(parents=True, exist_ok=True)
        for left in self._pending.glob("*.part"):  # never acknowledged to anyone
            left.unlink()
        # Beyond what was put aside too, which keeps its batch's number.
        known = [*self.pending(), *self._rejected.glob("*.arrow")]
        self._number = max((int(path.stem.partition("-")[0]) for path in known), default=0)

    def add(self, rollouts: Sequence[Rollout]) -> Path:
        """Write a batch; it is on disk when this returns. Raises OSError where the disk does not take it."""
        self._number += 1
        path = self._pending / f"{self._number:016d}.arrow"
        _write(path, encode_rollouts(rollout_columns(rollouts)))
        self._vitals.spooled(len(rollouts))
        return path

    def groups(self) -> set[str]:
        """The groups of what waits. A batch that cannot be read has none: `send_first` puts it aside."""
        groups: set[str] = set()
        for path in self.pending():
            with contextlib.suppress(BatchUnreadable):
                groups.update(_read(path.read_bytes()).column("group_id").to_pylist())
        return groups

    def pending(self) -> list[Path]:
        """Batches that are not acknowledged yet, oldest first."""
        return sorted(self._pending.glob("*.arrow"))

    def send_first(self, run: Run) -> bool:
        """Send the oldest batch and remove it once every rollout of it was answered; False when there is
        none.

        What the coordinator rejects is put aside with the reason and not sent again. Raises
        `CoordinatorError` when there is no answer, or one that is not about the batch: it stays.
        """
        pending = self.pending()
        if not pending:
            return False
        batch = pending[0]
        try:
            table = _read(batch.read_bytes())
        except BatchUnreadable as error:
            event("spooled_batch_unreadable", level=logging.ERROR, batch=batch.name, error=str(error))
            batch.rename(self._rejected / batch.name)
            return True
        self._send(run, batch.stem, table)
        batch.unlink()
        return True

    def _send(self, run: Run, name: str, table: pa.Table) -> None:
        try:
            answer = run.submit_stream(_stream(table), retry_seconds=0.0)
        except Refused as refused:
            if refused.status not in _UNFIT:
                raise
            if table.num_rows == 1:
                self._vitals.delivered({"refused": 1})
                self._reject(name, table, {"verdict": "refused", "code": refused.code, "detail": str(refused)})
                return
            half = table.num_rows // 2
            self._send(run, f"{name}-a", table.slice(0, half))
            self._send(run, f"{name}-b", table.slice(half))
            return
        self._vitals.delivered(Counter(verdict.verdict for verdict in answer.verdicts))
        states: dict[str, int] = {}
        for row, verdict in enumerate(answer.verdicts):
            outcome = verdict.verdict if verdict.state is None else f"{verdict.verdict}:{verdict.state}"
            states[outcome] = states.get(outcome, 0) + 1
            if verdict.verdict in ("rejected", "conflict"):
                self._reject(f"{name}-{row}", table.slice(row, 1), verdict.model_dump(exclude_none=True))
            elif verdict.reason is not None:
                event(
                    "rollout_not_admitted",
                    rollout_id=verdict.rollout_id,
                    state=verdict.state,
                    reason=verdict.reason,
                )
        event("batch_sent", batch=name, rollouts=table.num_rows, answers=states)

    def _reject(self, name: str, row: pa.Table, verdict: dict[str, object]) -> None:
        rollout_id = row.column("rollout_id")[0].as_py()
        self._vitals.rejected()
        event("rollout_rejected", level=logging.ERROR, rollout_id=rollout_id, **_plain(verdict))
        _write(self._rejected / f"{name}.arrow", _stream(row))
        _write(
            self._rejected / f"{name}.json",
            json.dumps({"rollout_id": rollout_id} | verdict, indent=1).encode(),
        )


class Sender:
    """Sends what the spool holds from a thread of its own, in order, for as long as it takes."""

    def __init__(self, spool: Spool, run: Run) -> None:
        self._spool = spool
        self._run = run
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sender", daemon=True)

    def start(self) -> None:
        """Begin with what an earlier process left."""
        self._thread.start()

    def wake(self) -> None:
        """A batch was added."""
        self._work.set()

    def finish(self, wait_seconds: float) -> bool:
        """Send the rest, for at most `wait_seconds`, and stop; whether the spool is empty now."""
        until = time.monotonic() + wait_seconds
        while self._spool.pending() and time.monotonic() < until and self._thread.is_alive():
            self._work.set()
            time.sleep(0.05)
        self._stopping.set()
        self._work.set()
        self._thread.join()
        return not self._spool.pending()

    def _loop(self) -> None:
        pause = 0.2
        while not self._stopping.is_set():
            try:
                if not self._spool.send_first(self._run):
                    self._work.wait()
                    self._work.clear()
            except CoordinatorError as error:
                event("batch_waits", level=logging.WARNING, pending=len(self._spool.pending()), error=str(error))
            except OSError as error:  # a disk that is full, where something is put aside
                event("spool_fault", level=logging.ERROR, pending=len(self._spool.pending()), error=str(error))
            else:
                pause = 0.2
                continue
            self._stopping.wait(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 2)


def _plain(verdict: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in verdict.items() if name != "rollout_id"}


def _read(stream: bytes) -> pa.Table:
    try:
        with pa.ipc.open_stream(io.BytesIO(stream)) as reader:
            table = reader.read_all()
        table.validate(full=True)
        if missing := {"group_id", "rollout_id"} - set(table.column_names):
            raise BatchUnreadable(f"no column {', '.join(sorted(missing))}")
    except (pa.ArrowException, OSError) as error:  # pyarrow has OSError for a stream that ends too early
        raise BatchUnreadable(str(error)) from error
    return table


def _stream(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue()


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and wait until it is on disk."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)  # a disk that is full needs the room
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
