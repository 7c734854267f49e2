"""What a thread does in its own way: pausing, blocking work, and a renewal in the background.

`coordinator.client.aio.pace` has the same names for tasks of an event loop; all else is generated from one source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import sleep
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["Renewal", "run_blocking", "sleep", "to_the_end"]


def run_blocking(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work that takes the CPU or the disk: done here and now."""
    return work(*args, **kwargs)


def to_the_end(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """A call that is not to be cut off: a thread is not cancelled, so simply the call."""
    return call(*args, **kwargs)


class Renewal:
    """Calls `renew` on a thread of its own each time `every_seconds` have passed, until it answers False."""

    def __init__(self, renew: Callable[[], bool], every_seconds: float, name: str) -> None:
        self._renew = renew
        self._every_seconds = every_seconds
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def stop(self) -> None:
        """No call begins afterwards. One that is under way is not waited for."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_seconds):
            if not self._renew():
                return
