"""Withdrawal: a version that must not be used any more, with all that was made from it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.journal import record_event
from coordinator.policies import activation
from coordinator.runs.service import Run


def _descended(seed: str) -> TextClause:
    """Of the versions that this condition picks, these and every descendant: its weights contain the same steps. One
    that restores an older artifact has that one as its parent, so it is not among them."""
    return text(f"""
        WITH RECURSIVE made AS (
            SELECT version FROM policy_versions WHERE run_no = :run_no AND {seed}
            UNION
            SELECT v.version FROM policy_versions v JOIN made m ON v.parent_version = m.version
            WHERE v.run_no = :run_no
        )
        SELECT v.version FROM policy_versions v JOIN made USING (version)
        WHERE v.run_no = :run_no AND v.state NOT IN ('withdrawn', 'abandoned')
        ORDER BY v.version FOR UPDATE OF v
    """)


MADE_BY = _descended("updates && CAST(:update_ids AS text[])")

DESCENDANTS = _descended("version = :version")

# Versions that are neither an ancestor of this one nor it itself.
NOT_ANCESTORS = text("""
    WITH RECURSIVE line AS (
        SELECT version, parent_version FROM policy_versions WHERE run_no = :run_no AND version = :version
        UNION ALL
        SELECT v.version, v.parent_version FROM policy_versions v JOIN line l ON v.version = l.parent_version
        WHERE v.run_no = :run_no
    )
    SELECT v.version FROM policy_versions v
    WHERE v.run_no = :run_no AND v.version NOT IN (SELECT version FROM line)
      AND v.state NOT IN ('withdrawn', 'abandoned')
    ORDER BY v.version FOR UPDATE OF v
""")

WITHDRAW = text("""
    UPDATE policy_versions SET state = 'withdrawn', ended_at = clock_timestamp()
    WHERE run_no = :run_no AND version = ANY(CAST(:versions AS int[]))
""")


async def made_by(connection: AsyncConnection, run: Run, update_ids: Sequence[str]) -> list[int]:
    """The versions that these updates led to, locked."""
    return await _found(connection, MADE_BY, run, update_ids=list(update_ids))


async def not_ancestors(connection: AsyncConnection, run: Run, version: int) -> list[int]:
    """The versions that are not an ancestor of this one, locked."""
    return await _found(connection, NOT_ANCESTORS, run, version=version)


async def descendants(connection: AsyncConnection, run: Run, version: int) -> list[int]:
    """This version and those that were made from it, locked."""
    return await _found(connection, DESCENDANTS, run, version=version)


async def _found(connection: AsyncConnection, statement: TextClause, run: Run, **keys: object) -> list[int]:
    return list((await connection.scalars(statement, {"run_no": run.run_no} | keys)).all())


async def withdraw(connection: AsyncConnection, run: Run, versions: Sequence[int], reason: str, actor: str) -> None:
    """Withdraws these versions. An activation of one of them fails.

    The run's lock and `CHANGE_VERSIONS` are held. The pointer stays where it is until a restoring version is activated.
    """
    if not versions:
        return
    await activation.fail_of_versions(connection, run, versions, f"policy_withdrawn: {reason}", actor)
    await connection.execute(WITHDRAW, {"run_no": run.run_no, "versions": list(versions)})
    for version in versions:
        await record_event(connection, run.run_no, "policy.withdrawn", str(version), actor, reason=reason)
