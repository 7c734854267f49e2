"""What `coordinator verify` prints: each breach as it is found, each verdict, and now and then what it is doing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from coordinator.operations.verify.findings import Breach, Verdict
from coordinator.operations.verify.proof import Progress, snapshot, verify
from coordinator.storage.database import connect
from coordinator.storage.migrations import check_schema

PROGRESS_SECONDS = 2.0

Say = Callable[[str], None]


def breach_line(breach: Breach) -> str:
    """One breach, on a line of its own."""
    return f"run {breach.run_id} statement {breach.statement} BREACH {breach.subject}: {breach.what}"


def verdict_line(verdict: Verdict) -> str:
    """One statement of one run, with how much was looked at."""
    outcome = "holds" if not verdict.breaches else f"BROKEN, breaches {verdict.breaches}"
    checked = ", ".join(f"{name} {number}" for name, number in verdict.checked.items())
    return f"run {verdict.run_id} statement {verdict.statement} {outcome}; {checked}"


@contextlib.asynccontextmanager
async def _shown(progress: Progress, say: Say) -> AsyncIterator[None]:
    began = time.monotonic()

    async def show() -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            say(f"{progress.doing}, after {time.monotonic() - began:.0f} s")

    task = asyncio.create_task(show())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def report(url: str, run_id: str | None, tell: Say, say: Say) -> int:
    """Proves the statements in the database at `url`; `tell` gets what was found, `say` the progress.

    Answers the number of breaches. Raises RunUnknownError, DatabaseError, OSError and SQLAlchemyError where nothing
    could be proved.
    """
    progress = Progress()
    breaches, runs = 0, set[str]()
    database = connect(url, pool_size=1)
    try:
        await check_schema(database)
        async with snapshot(database) as connection, _shown(progress, say):
            async for finding in verify(connection, run_id, progress=progress):
                if isinstance(finding, Breach):
                    breaches += 1
                    tell(breach_line(finding))
                else:
                    runs.add(finding.run_id)
                    tell(verdict_line(finding))
    finally:
        await database.close()
    tell(f"runs {len(runs)}, breaches {breaches}")
    return breaches
