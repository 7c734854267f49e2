"""Heartbeats and the watch, on threads of their own, so that a busy engine never looks like a lost worker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from coordinator.client import CoordinatorError, Refused, Run, Worker
from coordinator.wire.policies import Watch
from worker_agent.logs import event
from worker_agent.passing import is_foreign
from worker_agent.status.vitals import Vitals

_POLL_SECONDS = 10.0
_PAUSE_SECONDS = 1.0
_LONGEST_SLEEP_SECONDS = 86_400.0
# This process may not go on: replaced by another incarnation, its token revoked, its run gone.
_FINAL = frozenset({401, 403, 404, 409})


class Listener:
    """Keeps the newest word of the coordinator on which version is active and which is to follow."""

    def __init__(self, run: Run, worker: Worker, vitals: Vitals) -> None:
        self._run = run
        self._worker = worker
        self._vitals = vitals
        self._poll_seconds = _POLL_SECONDS
        self._newest: Watch | None = None
        self._final: Refused | None = None
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._beat_due = threading.Event()

    def start(self, heartbeat_seconds: float, longest_wait_seconds: float) -> None:
        """Begin to send heartbeats and to watch."""
        self._poll_seconds = min(_POLL_SECONDS, longest_wait_seconds)
        for name, once, pause, due in (
            ("heartbeat", self._beat, heartbeat_seconds, self._beat_due),
            ("watch", self._poll, 0.0, threading.Event()),
        ):
            threading.Thread(target=self._loop, args=(name, once, pause, due), name=name, daemon=True).start()

    def stop(self) -> None:
        """End both threads at their next turn; a poll that waits is left to itself."""
        self._stopping.set()
        self._beat_due.set()
        self.wake()

    def asleep(self, seconds: float) -> None:
        """The heartbeats say for so long that the engine gives its GPU away, the first of them at once.

        Raises ValueError for what is not above 0 and at most a day.
        """
        if not 0 < seconds <= _LONGEST_SLEEP_SECONDS:
            raise ValueError(
                f"an engine sleeps for more than 0 and at most {_LONGEST_SLEEP_SECONDS:g} s, not {seconds}"
            )
        self._vitals.asleep_until = time.monotonic() + seconds
        self._beat_due.set()

    def awake(self) -> None:
        """The engine is back, before its time or at it; the next heartbeat says so, at once."""
        self._vitals.asleep_until = 0.0
        self._beat_due.set()
        self.wake()

    def asleep_seconds(self) -> float | None:
        """How long the engine still sleeps, None when it is awake."""
        return self._vitals.asleep_seconds() or None

    def newest(self) -> Watch | None:
        """The newest word, None before the first. Raises `Refused` once this process may not go on."""
        with self._changed:
            if self._final is not None:
                raise self._final
            return self._newest

    def wait(self, after: int, timeout_seconds: float) -> None:
        """Return when there is a word newer than event number `after`, when woken, or after the timeout."""
        with self._changed:
            if self._final is None and (self._newest is None or self._newest.event_no <= after):
                self._changed.wait(timeout_seconds)

    def wake(self) -> None:
        """Make `wait` return. Takes no lock of its own thread's, so a signal handler's thread may call it."""
        with self._changed:
            self._changed.notify_all()

    def _beat(self) -> Watch:
        watch = self._worker.heartbeat(asleep_seconds=self.asleep_seconds(), retry_seconds=0.0)
        self._vitals.heard()
        return watch

    def _poll(self) -> Watch:
        after = -1 if self._newest is None else self._newest.event_no
        return self._run.watch(max(0, after), self._poll_seconds if after >= 0 else 0.0, retry_seconds=0.0)

    def _loop(self, name: str, once: Callable[[], Watch], pause: float, due: threading.Event) -> None:
        while not self._stopping.is_set():
            due.clear()
            try:
                self._hear(once())
            except CoordinatorError as error:
                if self._stopping.is_set():
                    return
                if isinstance(error, Refused) and error.status in _FINAL and not is_foreign(error):
                    event(f"{name}_refused", level=logging.ERROR, error=str(error))
                    with self._changed:
                        self._final = error
                        self._changed.notify_all()
                    return
                event(f"{name}_failed", level=logging.WARNING, error=str(error))
                self._stopping.wait(min(_PAUSE_SECONDS, pause or _PAUSE_SECONDS))
            else:
                due.wait(pause)

    def _hear(self, watch: Watch) -> None:
        with self._changed:
            if self._newest is None or watch.event_no > self._newest.event_no:
                self._newest = watch
                self._changed.notify_all()
