"""Tidies up after clocks that ran out. What matters is decided by the database's clock where it matters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import is_connection_fault
from coordinator.policies import fleet, removal
from coordinator.policies import queries as policy_queries
from coordinator.policies.verification import Verifier
from coordinator.rollouts import retention
from coordinator.runs import queries as run_queries
from coordinator.storage.artifacts import ArtifactStore
from coordinator.storage.changes import Changes
from coordinator.storage.database import Database
from coordinator.storage.outage import Outage
from coordinator.updates import queries as update_queries
from coordinator.updates import service as updates
from coordinator.workers import queries as worker_queries

log = logging.getLogger("coordinator.clocks")

EVERY_SECONDS = 1.0
RETIRE_SECONDS = 30.0
ONE_SWEEPER = 7_242_002


class Sweeps:
    """When this process last looked for clocks that ran out, in seconds since 1970; also when another one swept."""

    swept_at: float | None = None


async def _due(connection: AsyncConnection) -> tuple[list[str], list[str]]:
    """Runs with ended leases and runs with an activation to tend; none while another replica sweeps."""
    if not await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": ONE_SWEEPER}):
        return [], []
    await connection.execute(worker_queries.DROP_ENDED_TICKETS)
    await connection.execute(run_queries.FOLD_COUNTS)
    leases = (await connection.scalars(update_queries.RUNS_WITH_DUE_UPDATES)).all()
    activations = (await connection.scalars(policy_queries.TO_TEND)).all()
    return list(leases), list(activations)


async def sweep(database: Database, changes: Changes) -> None:
    """Once: aborts updates whose lease ended, drops workers from activations, fails those past their deadline."""
    leases, activations = await database.transaction(_due)
    for run_id in leases:
        count = await database.transaction(updates.expire_due, run_id)
        log.info("run %s: %d leases ended", run_id, count)
        changes.announce(run_id)
    for run_id in activations:
        if await database.transaction(fleet.tend, run_id):
            log.info("run %s: an activation lost workers or passed its deadline", run_id)
            changes.announce(run_id)


async def _sweep(sweeps: Sweeps, database: Database, changes: Changes) -> None:
    await sweep(database, changes)
    sweeps.swept_at = time.time()


async def retire(store: ArtifactStore, database: Database, changes: Changes) -> None:
    """Once: drops what the runs keep no longer, and uploads that were given up."""
    for run_id, count in (await retention.sweep(database)).items():
        log.info("run %s: %d rollouts lost their tokens or their row to retention", run_id, count)
    removed = await removal.sweep(database, store)
    for run_id, versions in removed.versions.items():
        log.info("run %s: %d policy versions lost their files to retention", run_id, len(versions))
        changes.announce(run_id)
    if given_up := await store.on_disk(store.tidy):
        log.info("%d uploads were given up an hour ago, and are removed", given_up)


async def verify(verifier: Verifier, database: Database, changes: Changes) -> None:
    """Once: takes up commits that wait for their files to be read."""
    await verifier.take_up()


async def _repeat(
    work: Callable[[Database, Changes], Awaitable[None]],
    every_seconds: float,
    outage: Outage,
    database: Database,
    changes: Changes,
) -> None:
    """A fault is logged, an absent database once, and the next round tries again."""
    while True:
        try:
            await work(database, changes)
        except Exception as error:  # whatever broke one round must not end all later ones
            if is_connection_fault(error):
                outage.begins(error)
            else:
                log.exception("a sweep failed; the next one follows in %g s", every_seconds)
        else:
            outage.ends()
        await asyncio.sleep(every_seconds)


async def run(database: Database, changes: Changes, store: ArtifactStore, verifier: Verifier, sweeps: Sweeps) -> None:
    """Sweeps until it is cancelled, and says in `sweeps` when it last did."""
    outage = Outage(log, "and leases and deadlines that end meanwhile are tidied up later")
    await asyncio.gather(
        _repeat(partial(_sweep, sweeps), EVERY_SECONDS, outage, database, changes),
        _repeat(partial(retire, store), RETIRE_SECONDS, outage, database, changes),
        _repeat(partial(verify, verifier), EVERY_SECONDS, outage, database, changes),
    )
