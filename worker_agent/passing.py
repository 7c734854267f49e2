"""Which faults of a call to the coordinator go by: the same call may be answered later, with nothing changed here."""

from __future__ import annotations

from coordinator.client import CoordinatorError, Refused, UnexpectedAnswer, Unreachable


def away(error: CoordinatorError) -> bool:
    """Nobody answers, something broke in what does, or it has no room now."""
    if isinstance(error, Refused):
        return error.status == 429 or error.status >= 500
    return isinstance(error, Unreachable)


def passes(error: CoordinatorError) -> bool:
    """Beside `away`: what is no answer of the coordinator's, where it has answered before. A proxy's, then."""
    return away(error) or is_foreign(error)


def is_foreign(error: CoordinatorError) -> bool:
    """Somebody else answered: a proxy on the way, or another server at this address."""
    return isinstance(error, UnexpectedAnswer) or (isinstance(error, Refused) and error.code == "foreign_answer")
