"""When an engine may be used: not closed, not released, and for some things idle."""

from collections.abc import Sized

from worker_agent.engines.engine import EngineError


class Availability:
    """The state that every engine has, and its refusals. `_in_flight` holds the requests in flight."""

    _closed = False
    _released = False
    _in_flight: Sized

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this engine was closed: start another")
        if self._released:
            raise EngineError("this engine gave its memory away: resume it first")

    def _check_idle(self) -> None:
        self._check_open()
        if count := len(self._in_flight):
            raise EngineError(f"{count} requests are in flight: let them finish, or interrupt them first")
