"""Artifact retention: the files of versions that ended long ago go, unless something still needs them.

First a version is marked, under its run's lock: from then on nobody gets its files or brings it back. Then they leave
the store, but for bytes that a version which is not marked has too, in this run or in another. Who names files in a new
version holds that off until it has committed, so that what it finds in the store afterwards stays there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.journal import record_event
from coordinator.rollouts.queries import for_run
from coordinator.runs.service import Run, get_run, lock_run
from coordinator.storage.artifacts import ArtifactStore
from coordinator.storage.database import Database
from coordinator.storage.lost import LOST

REMOVING = 7_242_003
"""Advisory lock: shared by whoever names files, alone by whoever removes some. The last one in the order of locks."""

BATCH = 200

RUNS_WITH_RETENTION = text("""
    SELECT run_id FROM runs WHERE settings ->> 'artifact_retention_seconds' IS NOT NULL ORDER BY run_no
""")

# Versions that ended long ago (one that was overtaken before it became active: that was committed) and are not active,
# loading, served by a live worker, named as the rollback version of one that may be active, or the nearest version that
# a rewind or a rollback could bring back.
_OVER = f"""
    v.run_no = :run_no AND v.kind NOT IN ('base', 'stream') AND v.uri IS NULL AND v.files_removed_at IS NULL
    AND v.state IN ('committed', 'retired', 'abandoned', 'withdrawn')
    AND COALESCE(v.ended_at, v.committed_at) < clock_timestamp() - make_interval(secs => :seconds)
    AND v.version <> (SELECT active_version FROM runs WHERE run_no = :run_no)
    AND (v.state <> 'committed' OR v.version < (SELECT active_version FROM runs WHERE run_no = :run_no))
    AND NOT EXISTS (
        SELECT FROM policy_versions o
        WHERE o.run_no = :run_no AND o.rollback_version = v.version AND o.state IN ('prepared', 'committed', 'active'))
    AND NOT EXISTS (
        SELECT FROM activations a
        WHERE a.run_no = :run_no AND a.version = v.version AND a.state IN ('waiting', 'open'))
    AND NOT EXISTS (
        SELECT FROM workers w JOIN LATERAL (
            SELECT k.version FROM acks k
            WHERE k.run_no = :run_no AND k.worker_id = w.worker_id AND k.incarnation = w.incarnation AND k.matching
            ORDER BY k.acked_at DESC LIMIT 1
        ) AS served ON served.version = v.version
        WHERE w.run_no = :run_no AND w.deregistered_at IS NULL AND NOT {LOST})
    AND v.version IS DISTINCT FROM (
        WITH RECURSIVE ancestor AS (
            SELECT p.version, p.parent_version, 0 AS distance FROM policy_versions p
            WHERE p.run_no = :run_no AND p.version = (SELECT active_version FROM runs WHERE run_no = :run_no)
            UNION ALL
            SELECT p.version, p.parent_version, a.distance + 1 FROM policy_versions p
            JOIN ancestor a ON p.version = a.parent_version
            WHERE p.run_no = :run_no
        )
        SELECT p.version FROM policy_versions p JOIN ancestor a USING (version)
        WHERE p.run_no = :run_no AND a.distance > 0 AND p.kind <> 'stream' AND p.committed_at IS NOT NULL
          AND p.state NOT IN ('withdrawn', 'abandoned') AND p.files_removed_at IS NULL
        ORDER BY a.distance LIMIT 1)
"""

LOCK_OVER = text(f"""
    SELECT v.version FROM policy_versions v WHERE {_OVER} ORDER BY v.version LIMIT CAST(:batch AS int) FOR UPDATE
""")

# Asked with the versions locked, for which arrivals wait: what they judged before is visible. Live rollouts are members
# of open groups.
REFERRED_TO = """
    SELECT DISTINCT x.version FROM groups g
    JOIN LATERAL (
        SELECT versions FROM rollouts r
        WHERE r.run_no = :run_no AND r.{group} = g.group_id
          AND r.state IN ('generated', 'rewarded', 'reserved', 'reward_failed')
        OFFSET 0
    ) AS live ON true
    CROSS JOIN LATERAL unnest(live.versions) AS x (version)
    WHERE g.run_no = :run_no AND g.state = 'open' AND x.version = ANY(CAST(:versions AS int[]))
"""

FILE_BYTES = text("""
    SELECT v.version, CAST(COALESCE(sum(f.size), 0) AS bigint) AS bytes
    FROM policy_versions v LEFT JOIN LATERAL jsonb_to_recordset(v.files) AS f (size bigint) ON true
    WHERE v.run_no = :run_no AND v.version = ANY(CAST(:versions AS int[]))
    GROUP BY v.version
""")

MARK = text(f"""
    UPDATE policy_versions v SET files_removed_at = clock_timestamp()
    WHERE v.version = ANY(CAST(:versions AS int[])) AND {_OVER}
    RETURNING v.version, v.artifact_hash
""")

# Under `REMOVING`: no version can come to these files now that is not seen here.
GOING = text("""
    SELECT v.run_no, v.version,
        ARRAY(
            SELECT f.sha256 FROM jsonb_to_recordset(v.files) AS f (sha256 text)
            WHERE NOT EXISTS (
                SELECT FROM policy_versions o
                WHERE o.files @> jsonb_build_array(jsonb_build_object('sha256', f.sha256))
                  AND o.files_removed_at IS NULL AND o.uri IS NULL)
        ) AS hashes
    FROM policy_versions v
    WHERE v.files_removed_at IS NOT NULL AND NOT v.files_gone
    ORDER BY v.run_no, v.version LIMIT :batch
""")

GONE = text("UPDATE policy_versions SET files_gone = true WHERE run_no = :run_no AND version = :version")


@dataclass(frozen=True)
class Removed:
    """What one round did: versions marked, by run, and files that left the store."""

    versions: dict[str, list[int]]
    files: int


async def hold_off_removal(connection: AsyncConnection) -> None:
    """Until this transaction ends nothing leaves the store. Called before files are named in a new version."""
    await connection.execute(text("SELECT pg_advisory_xact_lock_shared(:key)"), {"key": REMOVING})


async def _runs(connection: AsyncConnection) -> list[str]:
    return list((await connection.scalars(RUNS_WITH_RETENTION)).all())


async def _over(connection: AsyncConnection, run: Run, limits: dict[str, Any]) -> list[int]:
    """Versions of a locked run that nothing needs, one batch, locked too."""
    over = list((await connection.scalars(LOCK_OVER, limits)).all())
    if not over:
        return []
    needed = set(
        await connection.scalars(for_run(REFERRED_TO, run.group_column), {"run_no": run.run_no, "versions": over})
    )
    return [version for version in over if version not in needed]


def _limits(run: Run, seconds: float, batch: int | None) -> dict[str, Any]:
    lost_after = run.settings.lost_after_seconds
    return {"run_no": run.run_no, "seconds": seconds, "lost_after_seconds": lost_after, "batch": batch}


async def find_over(connection: AsyncConnection, run_id: str, seconds: float) -> dict[int, int]:
    """The versions that `mark` would mark of what ended so long ago, each with the bytes of its files."""
    run = await lock_run(connection, run_id)
    over = await _over(connection, run, _limits(run, seconds, None))
    rows = await connection.execute(FILE_BYTES, {"run_no": run.run_no, "versions": over})
    return {row.version: row.bytes for row in rows}


async def mark(connection: AsyncConnection, run_id: str, seconds: float | None = None) -> list[int]:
    """Marks versions of one run that nothing needs and that ended so long ago, left out: as the run says, one batch of
    them. Answers the versions."""
    if seconds is None:
        seconds = (await get_run(connection, run_id)).settings.artifact_retention_seconds
    if seconds is None:
        return []
    run = await lock_run(connection, run_id)
    limits = _limits(run, seconds, BATCH)
    over = await _over(connection, run, limits)
    if not over:
        return []
    rows = await connection.execute(MARK, limits | {"versions": over})
    marked = sorted((row.version, row.artifact_hash) for row in rows)
    for version, artifact_hash in marked:
        await record_event(
            connection, run.run_no, "policy.files_removed", str(version), "clock", artifact_hash=artifact_hash
        )
    return [version for version, _ in marked]


async def remove(connection: AsyncConnection, store: ArtifactStore) -> tuple[int, int]:
    """Takes the files of marked versions out of the store, one batch. Answers how many versions and files.

    Done again after a rollback or a crash, it finds the same: nothing that it removed belongs to anybody.
    """
    await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": REMOVING})
    rows = (await connection.execute(GOING, {"batch": BATCH})).all()
    files = 0
    for row in rows:
        for sha256 in sorted(set(row.hashes)):
            await store.on_disk(store.remove, sha256)
            files += 1
        await connection.execute(GONE, {"run_no": row.run_no, "version": row.version})
    return len(rows), files


async def sweep(database: Database, store: ArtifactStore) -> Removed:
    """Marks and removes everything that is over, in batches."""
    marked: dict[str, list[int]] = {}
    files = 0
    for run_id in await database.transaction(_runs):
        while versions := await database.transaction(mark, run_id):
            marked.setdefault(run_id, []).extend(versions)
    while True:
        versions_gone, files_gone = await database.transaction(remove, store)
        files += files_gone
        if not versions_gone:
            return Removed(marked, files)
