"""Groups: locked before their members, counted anew after a member changed, refused when hopeless."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.rollouts import queries
from coordinator.runs.service import Run


async def claim(connection: AsyncConnection, run: Run, group_ids: Sequence[str]) -> None:
    """Makes sure that these groups exist, and locks them."""
    await connection.execute(
        queries.CLAIM_GROUPS,
        {
            "run_no": run.run_no,
            "group_ids": list(group_ids),
            "deadline_seconds": run.settings.group_deadline_seconds,
        },
    )
    await lock(connection, run, group_ids)


async def lock(connection: AsyncConnection, run: Run, group_ids: Sequence[str]) -> None:
    """Locks these groups until the transaction ends; what a later statement reads of their members is current."""
    await connection.execute(queries.LOCK_GROUPS, {"run_no": run.run_no, "group_ids": list(group_ids)})


async def lock_of_rollouts(connection: AsyncConnection, run: Run, rollout_ids: Sequence[str]) -> list[str]:
    """Locks the groups of these rollouts, and answers their ids, sorted."""
    rows = await connection.execute(queries.FIND_ROLLOUTS, {"run_no": run.run_no, "rollout_ids": list(rollout_ids)})
    group_ids = sorted({getattr(row, run.group_column) for row in rows})
    await lock(connection, run, group_ids)
    return group_ids


async def refresh(
    connection: AsyncConnection, run: Run, group_ids: Sequence[str], actor: str, update_id: str | None = None
) -> dict[str, int]:
    """Counts the members anew. Answers the rollouts that fell with a refused group, with their new revision."""
    rows = await connection.execute(
        queries.for_run(queries.REFRESH_GROUPS, run.group_column),
        {
            "run_no": run.run_no,
            "group_ids": list(group_ids),
            "group_size": run.settings.group_size or 1,
            "usable_needed": run.settings.usable_needed,
            "max_attempts": run.settings.max_attempts,
            "actor": actor,
            "update_id": update_id,
        },
    )
    return {row.rollout_id: row.revision for row in rows}
