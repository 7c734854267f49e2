"""Restoring: an earlier durable artifact comes back under a new version number."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event
from coordinator.policies import queries
from coordinator.policies.service import find_version
from coordinator.runs.service import Run
from coordinator.wire.policies import PolicyView

# The nearest ancestor of the active version that was committed, leaves files behind, and is not withdrawn.
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

# The active version is out of use, and no other is on its way that is not.
NOTHING_USABLE = text("""
    SELECT NOT EXISTS (
        SELECT FROM policy_versions v
        WHERE v.run_no = :run_no AND (v.version = r.active_version AND v.state = 'active'
            OR v.version > r.active_version AND v.state IN ('prepared', 'committed')))
    FROM runs r WHERE r.run_no = :run_no
""")


async def nearest_before(connection: AsyncConnection, run: Run) -> int | None:
    """The nearest durable ancestor of the active version; None: there is none."""
    active = await find_version(connection, run.run_no, run.active.version)
    keys = {"run_no": run.run_no, "version": active.parent_version}
    found: int | None = await connection.scalar(RESTORABLE, {**keys, "bad_hashes": []})
    return found


async def find(connection: AsyncConnection, run: Run, version: int) -> PolicyView:
    """A version as it stands now."""
    return await find_version(connection, run.run_no, version)


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
    restored = await prepare_restoring(connection, run, number, caller, bad_hashes=bad_hashes)
    return restored, restored is None


async def prepare_restoring(
    connection: AsyncConnection,
    run: Run,
    number: int | None,
    caller: Caller,
    *,
    of: int | None = None,
    bad_hashes: Sequence[str] = (),
) -> PolicyView | None:
    """Prepares a version with the artifact and the lag clock of the version `of`, or of the nearest restorable ancestor
    of the active one; None: there is none.

    Its files lie in the artifact store already. The run's lock is held.
    """
    keys = {"run_no": run.run_no}
    asked = {"version": run.active.version if of is None else of, "bad_hashes": list(bad_hashes)}
    ancestor = await connection.scalar(RESTORABLE, keys | asked)
    if ancestor is None or of not in (None, ancestor):
        return None
    restored = await find_version(connection, run.run_no, ancestor)
    newest: int = (await connection.execute(queries.NEWEST_VERSION, keys)).scalar_one()
    if number is not None and number <= newest:
        raise Refusal("non_monotonic_version", f"the newest version is {newest}; {number} is not greater")
    version = newest + 1 if number is None else number
    await connection.execute(
        queries.INSERT_VERSION,
        keys
        | {
            "version": version,
            "artifact_hash": restored.artifact_hash,
            "kind": restored.kind,
            "parent_version": ancestor,
            "rollback_version": None,
            "lag_clock": restored.lag_clock,
            "base_model": json.dumps(restored.base_model.model_dump()),
            "files": json.dumps([file.model_dump() for file in restored.files]),
            "updates": [],
            "digests": json.dumps(restored.digests),
            "uri": restored.uri,
        },
    )
    await record_event(
        connection,
        run.run_no,
        "policy.prepared",
        str(version),
        caller.actor,
        artifact_hash=restored.artifact_hash,
        parent_version=ancestor,
        updates=[],
        restores=ancestor,
    )
    return await find_version(connection, run.run_no, version)
