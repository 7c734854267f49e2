"""Groups: locked before their members, counted anew after a member changed, refused when hopeless."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.rollouts import queries
from coordinator.runs.service import Run


async def claim(connection: AsyncConnection, run: Run, wanted: Mapping[str, int | None]) -> dict[str, int | None]:
    """Makes sure that these groups exist, and locks them: group id -> contract number, as wanted and as it is.

    A group takes the contract of its first rollout; None wants no contract (a failed generation has none).
    """
    ids = sorted(wanted)
    parameters = {"run_no": run.run_no, "group_ids": ids, "contract_nos": [wanted[i] for i in ids]}
    await connection.execute(
        queries.CLAIM_GROUPS, parameters | {"deadline_seconds": run.settings.group_deadline_seconds}
    )
    found = await lock(connection, run, ids)
    if any(found[i] is None and wanted[i] is not None for i in ids):
        await connection.execute(queries.PIN_CONTRACTS, parameters)
        found = {i: wanted[i] if number is None else number for i, number in found.items()}
    return found


async def lock(connection: AsyncConnection, run: Run, group_ids: Sequence[str]) -> dict[str, int | None]:
    """Locks these groups until the transaction ends; what a later statement reads of their members is current.

    Answers the contract number of each.
    """
    rows = await connection.execute(queries.LOCK_GROUPS, {"run_no": run.run_no, "group_ids": list(group_ids)})
    return {row.group_id: row.contract_no for row in rows}


async def members(connection: AsyncConnection, run: Run, rollout_ids: Sequence[str]) -> dict[str, Any]:
    """The rows of these rollouts, as they are now: group_id, state, revision, reason, content_hash."""
    rows = await connection.execute(queries.FIND_ROLLOUTS, {"run_no": run.run_no, "rollout_ids": list(rollout_ids)})
    return {row.rollout_id: row for row in rows}


async def lock_of_rollouts(connection: AsyncConnection, run: Run, rollout_ids: Sequence[str]) -> list[str]:
    """Locks the groups of these rollouts, and answers their ids, sorted."""
    found = await members(connection, run, rollout_ids)
    group_ids = sorted({getattr(row, run.group_column) for row in found.values()})
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
