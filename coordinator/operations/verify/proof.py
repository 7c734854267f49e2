"""The proof: one snapshot, run by run, statement by statement."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.verify import (
    acknowledgement,
    consumption,
    limits,
    line,
    pointer,
    revisions,
    vouching,
)
from coordinator.operations.verify.entries import Numbering, play
from coordinator.operations.verify.findings import Acknowledged, Breach, Finding, Verdict
from coordinator.operations.verify.ledger import Ledger, read_ledgers
from coordinator.storage.database import Database

# Every join here is over a whole run. Where the planner takes a few rows for granted, as of the acks in the journal, a
# nested loop would never end; and it counts a forbidden one so dear that it would compile each statement.
_SETTINGS = (
    "statement_timeout = 0",
    "idle_in_transaction_session_timeout = 0",
    "enable_nestloop = off",
    "jit = off",
)


class RunUnknownError(LookupError):
    """The database has no run of that name."""


@dataclass
class Progress:
    """What is being done, for whoever waits for it."""

    doing: str = "connecting"


@contextlib.asynccontextmanager
async def snapshot(database: Database) -> AsyncIterator[AsyncConnection]:
    """A connection that sees one moment, writes nothing and takes no lock that anybody waits for.

    Its statements may take as long as they need, and it may wait for its reader.
    """
    async with database.engine.connect() as connection:
        await connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        async with connection.begin():
            for setting in _SETTINGS:
                await connection.execute(text(f"SET LOCAL {setting}"))
            yield connection


async def verify(
    connection: AsyncConnection,
    run_id: str | None = None,
    told: Mapping[str, Acknowledged] | None = None,
    progress: Progress | None = None,
) -> AsyncIterator[Breach | Verdict]:
    """Proves the statements of every run, or of the one that is named, in what this connection sees.

    Answers each breach as it is found, and after each statement of a run its verdict. `told` is what clients were
    told, by run_id. Raises RunUnknownError.
    """
    progress = progress or Progress()
    ledgers = await read_ledgers(connection, run_id)
    if run_id is not None and not ledgers:
        raise RunUnknownError(f"there is no run {run_id}")
    for acknowledged in sorted((told or {}).keys() - {ledger.run_id for ledger in ledgers}):
        yield Breach(4, acknowledged, "the run", "was acknowledged and is gone")
    for ledger in ledgers:
        async for finding in _verify_run(ledger, (told or {}).get(ledger.run_id), progress):
            yield finding


async def _verify_run(ledger: Ledger, told: Acknowledged | None, progress: Progress) -> AsyncIterator[Breach | Verdict]:
    progress.doing = f"run {ledger.run_id}: the journal"
    numbering, surviving, switches = Numbering(), line.Line(), pointer.Pointer()
    await play(ledger, numbering, (surviving, switches))
    progress.doing = f"run {ledger.run_id}: counting"
    numbers = await ledger.counted(revisions.CHECKED)
    kept = {name: numbers[name] for name in ("rollouts", "tombstones")}
    statements: tuple[tuple[int, AsyncIterator[Finding], Mapping[str, int]], ...] = (
        (1, revisions.check(ledger), numbers),
        (2, consumption.check(ledger, surviving), await ledger.counted(consumption.CHECKED)),
        (3, line.check(ledger, surviving), line.checked(surviving)),
        (4, acknowledgement.check(ledger, surviving, switches, told), kept | acknowledgement.checked(told)),
        (5, limits.check(ledger), await ledger.counted(limits.CHECKED)),
        (6, pointer.check(ledger, switches, numbering), pointer.checked(switches, numbering)),
        (7, vouching.check(ledger), await ledger.counted(vouching.CHECKED)),
    )
    for statement, findings, checked in statements:
        progress.doing = f"run {ledger.run_id}: statement {statement}"
        breaches = 0
        async for subject, what in findings:
            breaches += 1
            yield Breach(statement, ledger.run_id, subject, what)
        yield Verdict(statement, ledger.run_id, checked, breaches)
