"""Restoring: an earlier durable artifact comes back under a new version number."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event
from coordinator.policies import queries
from coordinator.policies.service import find_version, insert_version
from coordinator.runs.service import Run
from coordinator.wire.policies import PolicyView

# The version, or its nearest ancestor, that was committed, leaves files behind, and is not withdrawn.
RESTORABLE = text("""
    WITH RECURSIVE ancestor AS (
        SELECT v.version, v.parent_version, 0 AS distance FROM policy_versions v
        WHERE v.run_no = :run_no AND v.version = :version
        UNION ALL
        SELECT v.version, v.parent_version, a.distance + 1 FROM policy_versions v
        JOIN ancestor a ON v.version = a.parent_version
        WHERE v.run_no = :run_no
    )
    SELECT v.version FROM policy_versions v JOIN ancestor a USING (version)
    WHERE v.run_no = :run_no AND v.kind <> 'stream' AND v.committed_at IS NOT NULL
      AND v.state NOT IN ('withdrawn', 'abandoned') AND v.files_removed_at IS NULL
      AND v.artifact_hash <> ALL(CAST(:bad_hashes AS text[]))
    ORDER BY a.distance LIMIT 1
""")

RESTORED = {"artifact_hash", "kind", "lag_clock", "base_model", "files", "digests", "uri"}
"""What a restoring version has of the one that it brings back."""

LAST_NUMBER = 2**31 - 1
"""The greatest number that a version may have: an int of the database."""

# The active version is out of use, and no other is on its way that is not.
NOTHING_USABLE = text("""
    SELECT NOT EXISTS (
        SELECT FROM policy_versions v
        WHERE v.run_no = :run_no AND (v.version = r.active_version AND v.state = 'active'
            OR v.version > r.active_version AND v.state IN ('prepared', 'committed')))
    FROM runs r WHERE r.run_no = :run_no
""")


async def nearest_durable(
    connection: AsyncConnection, run: Run, version: int | None, bad_hashes: Sequence[str] = ()
) -> PolicyView | None:
    """This version, or the nearest of its ancestors, that can come back; artifacts of `bad_hashes` cannot. None: there
    is none."""
    keys = {"run_no": run.run_no, "version": version, "bad_hashes": list(bad_hashes)}
    found = await connection.scalar(RESTORABLE, keys)
    return None if found is None else await find_version(connection, run.run_no, found)


async def restore_after(
    connection: AsyncConnection,
    run: Run,
    withdrawn: Sequence[int],
    number: int | None,
    caller: Caller,
    bad_hashes: Sequence[str] = (),
) -> tuple[PolicyView | None, bool]:
    """After these versions were withdrawn: the version that restores, if one is needed, and whether one is needed and
    none of its ancestors can come back. Artifacts of `bad_hashes` do not."""
    needed = run.active.version in withdrawn or await connection.scalar(NOTHING_USABLE, {"run_no": run.run_no})
    if not needed:
        return None, False
    durable = await nearest_durable(connection, run, run.active.version, bad_hashes)
    if durable is None or (number is None and await _newest(connection, run) == LAST_NUMBER):
        return None, True
    return await prepare_restoring(connection, run, durable, number, caller), False


async def prepare_restoring(
    connection: AsyncConnection, run: Run, restored: PolicyView, number: int | None, caller: Caller
) -> PolicyView:
    """Prepares a version with the artifact and the lag clock of this one, under this number or the next.

    Its files lie in the artifact store already. The run's lock is held.
    """
    newest = await _newest(connection, run)
    if number is not None and number <= newest:
        raise Refusal("non_monotonic_version", f"the newest version is {newest}; {number} is not greater")
    if newest == LAST_NUMBER:
        raise Refusal("non_monotonic_version", f"version {newest} is taken, the last there can be: begin another run")
    made = restored.model_dump(include=RESTORED) | {
        "version": newest + 1 if number is None else number,
        "parent_version": restored.version,
        "rollback_version": None,
        "updates": [],
    }
    view = await insert_version(connection, run, made)
    await record_event(
        connection,
        run.run_no,
        "policy.prepared",
        str(view.version),
        caller.actor,
        artifact_hash=view.artifact_hash,
        parent_version=view.parent_version,
        updates=list(view.updates),
        restores=restored.version,
    )
    return view


async def _newest(connection: AsyncConnection, run: Run) -> int:
    number: int = (await connection.execute(queries.NEWEST_VERSION, {"run_no": run.run_no})).scalar_one()
    return number
