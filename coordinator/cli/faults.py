"""How a command ends: its exit codes, and what a person is told about a fault.

Nothing of the server is imported here before something of the server has failed: commands that only call the API stay
quick, and need no more than the client.
"""

from __future__ import annotations

import re

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from coordinator.client.errors import CoordinatorError, NotActivated, Refused, Unreachable

OK, FAILED, USAGE, NO_ANSWER, BLOCKED, NOT_YET, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 4, 5, 130, 141

EXIT_CODES = {
    OK: "done; of `doctor`: no fault; of `diagnose`: nothing blocks; of `verify`: every statement holds",
    FAILED: "refused or failed: the code of the problem and what to do are on standard error; of `doctor`: there is a "
    "fault; of `verify`: there are breaches; of `activate`: the activation failed, was given up or superseded",
    USAGE: "an option, an argument, a variable or a file of yours is not possible; of `verify`: it could not be found "
    "out",
    NO_ANSWER: "the coordinator gave no answer; what it has done is not known, and every command may be given again",
    BLOCKED: "of `diagnose`: something blocks the run",
    NOT_YET: "of `activate`: the activation goes on after `--wait-seconds`",
    INTERRUPTED: "ended by Ctrl-C; an activation goes on",
    PIPE_CLOSED: "whoever read the output left, as `head` does",
}


class Failure(Exception):
    """A command fails. `what` is told to people, and `next_step` what to do."""

    def __init__(self, what: str, next_step: str | None = None, code: int = FAILED) -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step
        self.code = code


def explained(error: Exception) -> Failure | None:
    """What is to be told of an error; none: it is a defect, whose trace is the better message."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, Refused):
        where = "".join(f" [{name} {value}]" for name, value in (("field", error.field), ("item", error.item)) if value)
        return Failure(f"{error.code}{where}: {error.detail}", error.next_step)
    if isinstance(error, Unreachable):
        next_step = "Look whether it runs ('coordinator doctor'), and at the address; the command may be given again."
        return Failure(str(error), next_step, NO_ANSWER)
    if isinstance(error, NotActivated):
        return Failure(str(error), code=NOT_YET if error.activation.state in ("waiting", "open") else FAILED)
    if isinstance(error, CoordinatorError):
        return Failure(str(error))
    if isinstance(error, ValidationError):
        return Failure("; ".join(faults_of(error)), code=USAGE)
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] != "coordinator":
        return Failure(f"{error.name} is not installed: pip install 'rollout-coordinator[server]'")
    return _of_the_server(error)


def _of_the_server(error: Exception) -> Failure | None:
    try:
        from sqlalchemy.exc import ArgumentError, DBAPIError

        from coordinator.errors import Refusal, is_connection_fault, is_refused_entry
        from coordinator.server import ServerError
        from coordinator.storage.database import DatabaseError
        from coordinator.storage.postgres import EmbeddedPostgresError
    except ModuleNotFoundError:
        return None  # only the client is installed, and this is none of its errors
    if isinstance(error, Refusal):
        return Failure(str(error), error.problem.next_step)
    if isinstance(error, ServerError | DatabaseError | EmbeddedPostgresError):
        return Failure(str(error))
    if isinstance(error, ArgumentError):
        next_step = "Write it as postgresql://user:password@host/database."
        return Failure("DATABASE_URL is no address of a database", next_step, USAGE)
    if isinstance(error, OSError):
        return Failure(f"cannot reach the database or a file: {error}")
    if isinstance(error, DBAPIError) and (is_connection_fault(error) or is_refused_entry(error)):
        return Failure(f"the database takes no connection: {error.orig}")
    return None


_PATTERNS = {
    r"^[0-9a-f]{64}$": "is not a sha256 as 64 lower-case hexadecimal digits",
    r"^[^\x00]*$": "holds a NUL",
}
_ID = "is no id: letters, digits and . _ - (in most ids : @ + = too), the first a letter or a digit"


def faults_of(error: ValidationError) -> list[str]:
    """What is wrong with values that were given, in words: of each its place, itself where that helps, and the matter
    with it."""
    return [line(fault) for fault in error.errors(include_url=False)]


def line(fault: ErrorDetails) -> str:
    """What is wrong with one value."""
    place = ".".join(map(str, fault["loc"]))
    given = fault["input"]
    tellable = isinstance(given, str | int | float) and fault["type"] != "missing" and len(repr(given)) <= 80
    return " ".join([*([f"{place}:"] if place else []), *([repr(given)] if tellable else []), matter(fault)])


def matter(fault: ErrorDetails) -> str:
    """What is the matter with one value."""
    match fault["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return "is not known"
        case "value_error":
            return fault["msg"].removeprefix("Value error, ")
        case "string_pattern_mismatch":
            return _PATTERNS.get(fault["ctx"]["pattern"], _ID)
    return re.sub(r"^[A-Z]\w* should", "should", fault["msg"].partition(", unable to")[0])
