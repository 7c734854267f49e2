"""Heartbeats and the watch, on threads of their own, so that a busy engine never looks like a lost worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from coordinator.client import CoordinatorError, Refused, Run, Worker
from coordinator.wire.policies import Watch
from worker_agent.logs import event

_POLL_SECONDS = 10.0
_PAUSE_SECONDS = 1.0
# This process may not go on: replaced by another incarnation, its token revoked, its run gone.
_FINAL = frozenset({401, 403, 404, 409})


class Listener:
    """Keeps the newest word of the coordinator on which version is active and which is to follow."""

    def __init__(self, run: Run, worker: Worker, heartbeat_seconds: float, longest_wait_seconds: float) -> None:
        self._run = run
        self._worker = worker
        self._heartbeat_seconds = heartbeat_seconds
        self._poll_seconds = min(_POLL_SECONDS, longest_wait_seconds)
        self._newest: Watch | None = None
        self._final: Refused | None = None
        self._changed = threading.Condition()
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begin to send heartbeats and to watch."""
        for name, once, pause in (
            ("heartbeat", lambda: self._worker.heartbeat(retry_seconds=0.0), self._heartbeat_seconds),
            ("watch", self._poll, 0.0),
        ):
            threading.Thread(target=self._loop, args=(name, once, pause), name=name, daemon=True).start()

    def stop(self) -> None:
        """End both threads at their next turn; a poll that waits is left to itself."""
        self._stopping.set()
        self.wake()

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

    def _poll(self) -> Watch:
        after = -1 if self._newest is None else self._newest.event_no
        return self._run.watch(max(0, after), self._poll_seconds if after >= 0 else 0.0, retry_seconds=0.0)

    def _loop(self, name: str, once: Callable[[], Watch], pause: float) -> None:
        while not self._stopping.is_set():
            try:
                self._hear(once())
            except CoordinatorError as error:
                if self._stopping.is_set():
                    return
                if isinstance(error, Refused) and error.status in _FINAL:
                    event(f"{name}_refused", level=logging.ERROR, error=str(error))
                    with self._changed:
                        self._final = error
                        self._changed.notify_all()
                    return
                event(f"{name}_failed", level=logging.WARNING, error=str(error))
                self._stopping.wait(min(_PAUSE_SECONDS, pause or _PAUSE_SECONDS))
            else:
                self._stopping.wait(pause)

    def _hear(self, watch: Watch) -> None:
        with self._changed:
            if self._newest is None or watch.event_no > self._newest.event_no:
                self._newest = watch
                self._changed.notify_all()
