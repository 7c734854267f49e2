"""Withdrawal: a version that must not be used any more, with all that was made from it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.journal import record_event
from coordinator.policies import activation
from coordinator.runs.service import Run

# Versions that these updates made, and every descendant of theirs: its weights contain the same steps. One that
# restores an older artifact has that one as its parent, so it is not among them.
MADE_BY = text("""
    WITH RECURSIVE made AS (
        SELECT version FROM policy_versions
        WHERE run_no = :run_no AND updates && CAST(:update_ids AS text[])
        UNION
        SELECT v.version FROM policy_versions v JOIN made m ON v.parent_version = m.version
        WHERE v.run_no = :run_no
    )
    SELECT v.version FROM policy_versions v JOIN made USING (version)
    WHERE v.run_no = :run_no AND v.state NOT IN ('withdrawn', 'abandoned')
    ORDER BY v.version FOR UPDATE OF v
""")

WITHDRAW = text("""
    UPDATE policy_versions SET state = 'withdrawn', ended_at = clock_timestamp()
    WHERE run_no = :run_no AND version = ANY(CAST(:versions AS int[]))
""")


async def withdraw_made_by(
    connection: AsyncConnection, run: Run, update_ids: Sequence[str], reason: str, actor: str
) -> list[int]:
    """Withdraws the versions that these updates led to. An open activation of one of them fails.

    The run's lock and `CHANGE_VERSIONS` are held. The pointer stays where it is until a restoring version is activated.
    """
    keys = {"run_no": run.run_no, "update_ids": list(update_ids)}
    versions = list((await connection.scalars(MADE_BY, keys)).all())
    if not versions:
        return []
    await activation.fail_of_versions(connection, run, versions, f"policy_withdrawn: {reason}", actor)
    await connection.execute(WITHDRAW, {"run_no": run.run_no, "versions": versions})
    for version in versions:
        await record_event(connection, run.run_no, "policy.withdrawn", str(version), actor, reason=reason)
    return versions
