"""Undoing: versions are withdrawn, open updates fenced, and what they had taken out of the buffer comes back.

What rewind, rollback and withdrawal have in common. The run's lock and `CHANGE_VERSIONS` are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.access import Caller
from coordinator.policies import withdrawal
from coordinator.rollouts import groups
from coordinator.rollouts.quarantine import quarantine_of_versions
from coordinator.rollouts.queries import STATE_BY_REWARD, for_run, states
from coordinator.runs.service import Run
from coordinator.updates import service

# Open updates that were opened for one of these versions, or hold tokens of one.
LOCK_UPDATES_OF = text("""
    SELECT u.update_id FROM updates u
    WHERE u.run_no = :run_no AND u.state = 'open' AND (
        u.policy_version = ANY(CAST(:versions AS int[])) OR EXISTS (
            SELECT FROM update_members m JOIN rollouts r USING (run_no, rollout_id)
            WHERE m.run_no = u.run_no AND m.update_id = u.update_id AND m.verdict = 'reserved'
              AND r.state = 'reserved' AND r.update_id = u.update_id AND r.versions && CAST(:versions AS int[])))
    ORDER BY u.update_id FOR UPDATE OF u
""")

# What comes back, by the change that put each rollout where it is now (its last one): consumed by a rewound update,
# or put offline or into quarantine by an undone update or by a gate that judged against a withdrawn version. One
# that was quarantined before its group was spent comes back only if that quarantine does too. Members of groups that
# are open again come along: those that fell with the group, and latecomers to a spent one.
_CAUSE = f"""
    WITH change AS (
        SELECT r.rollout_id, r.{{group}} AS group_id, r.state, r.reason, a.event, a.from_state, a.update_id,
            a.judged_version, r.revision
        FROM rollout_audit a
        JOIN rollouts r ON r.run_no = a.run_no AND r.rollout_id = a.rollout_id AND r.revision = a.revision
        WHERE a.run_no = :run_no AND a.at >= :since AND r.state IN {states("rewind")}
          AND r.reason IS DISTINCT FROM 'policy_withdrawn'
    ), undone AS (
        SELECT * FROM change WHERE
            (state = 'consumed' AND :consumed = 'release' AND update_id = ANY(CAST(:rewound AS text[])))
            OR (state <> 'consumed' AND (update_id = ANY(CAST(:undone AS text[]))
                                         OR judged_version = ANY(CAST(:withdrawn AS int[]))))
    ), coming AS (
        SELECT u.rollout_id, u.group_id, u.state, u.revision FROM undone u
        WHERE u.event <> 'set_aside' OR u.from_state <> 'quarantined' OR EXISTS (
            SELECT FROM rollout_audit b
            WHERE b.run_no = :run_no AND b.rollout_id = u.rollout_id AND b.revision = u.revision - 1
              AND (b.update_id = ANY(CAST(:undone AS text[])) OR b.judged_version = ANY(CAST(:withdrawn AS int[]))))
    ), reopened AS (
        SELECT DISTINCT group_id FROM coming t
        WHERE NOT EXISTS (
            SELECT FROM rollouts c
            WHERE c.run_no = :run_no AND c.{{group}} = t.group_id AND c.state = 'consumed'
              AND c.rollout_id NOT IN (SELECT rollout_id FROM coming))
    ), back AS (
        SELECT t.rollout_id, t.group_id, t.state, t.revision FROM coming t JOIN reopened USING (group_id)
        UNION
        SELECT s.rollout_id, g.group_id, s.state, s.revision
        FROM reopened g JOIN rollouts s ON s.run_no = :run_no AND s.{{group}} = g.group_id
        WHERE s.state = 'offline' AND (s.reason = 'group_refused' OR (s.reason = 'group_spent' AND EXISTS (
            SELECT FROM rollout_audit b
            WHERE b.run_no = :run_no AND b.rollout_id = s.rollout_id AND b.revision = s.revision
              AND b.from_state <> 'quarantined')))
    )
"""

FIND_RETURNING = _CAUSE + "SELECT DISTINCT group_id FROM back ORDER BY group_id"

BRING_BACK = (
    _CAUSE
    + f"""
    , moved AS (
        UPDATE rollouts r SET state = {STATE_BY_REWARD}, reason = NULL, update_id = NULL, revision = b.revision + 1
        FROM back b WHERE r.run_no = :run_no AND r.rollout_id = b.rollout_id AND r.revision = b.revision
        RETURNING r.rollout_id, r.state, r.revision, b.state AS from_state
    ), audit AS (
        INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor)
        SELECT :run_no, rollout_id, revision, 'rewind', from_state, state, :cause, :actor FROM moved
    ), opened AS (
        UPDATE groups g SET state = 'open', held_by = NULL, held_until = NULL
        WHERE g.run_no = :run_no AND g.group_id IN (SELECT group_id FROM reopened)
    )
    SELECT count(*) FROM moved
"""
)

# What this rewind put into quarantine, in whatever part of it. Under the run's lock and `CHANGE_VERSIONS` nobody else
# quarantines for these reasons meanwhile.
QUARANTINED_SINCE = text("""
    SELECT count(*) FROM rollout_audit
    WHERE run_no = :run_no AND at >= :began AND event = 'quarantine'
      AND reason IN ('policy_withdrawn', 'candidate_not_activated')
""")

BEGAN = text("""
    SELECT LEAST(
        (SELECT min(opened_at) FROM updates WHERE run_no = :run_no AND update_id = ANY(CAST(:update_ids AS text[]))),
        (SELECT min(prepared_at) FROM policy_versions
         WHERE run_no = :run_no AND version = ANY(CAST(:versions AS int[]))))
""")


@dataclass(frozen=True)
class Undone:
    """What an undoing came to."""

    released: int
    """Rollouts that came back from consumed, offline or quarantined."""
    quarantined: int
    """Rollouts with tokens of withdrawn versions that went into quarantine."""


async def lock_updates_of(connection: AsyncConnection, run: Run, versions: Sequence[int]) -> list[str]:
    """The open updates that stand on one of these versions, locked."""
    await service.expire_due(connection, run.run_id)
    keys = {"run_no": run.run_no, "versions": list(versions)}
    return list((await connection.scalars(LOCK_UPDATES_OF, keys)).all())


async def undo(
    connection: AsyncConnection,
    run: Run,
    cause: str,
    reason: str,
    caller: Caller,
    *,
    withdrawn: Sequence[int],
    fenced: Sequence[str],
    rewound: Sequence[str] = (),
    consumed: str = "spent",
) -> Undone:
    """Withdraws these versions, fences these open updates, and brings back what they and the rewound ones had taken.

    `cause` names what undoes, as it stands in the audit: "rewind r-1".
    """
    began = await connection.scalar(text("SELECT clock_timestamp()"))
    await withdrawal.withdraw(connection, run, withdrawn, f"{cause}: {reason}", caller.actor)
    for update_id in fenced:
        await service.end(connection, run, update_id, "fenced", f"{cause}: {reason}", False, caller.actor)
    released = await _bring_back(
        connection, run, cause, caller,
        withdrawn=withdrawn, undone=[*rewound, *fenced], rewound=rewound, consumed=consumed,
    )  # fmt: skip
    if withdrawn:
        await quarantine_of_versions(connection, run, withdrawn, "policy_withdrawn", caller.actor)
    quarantined: int = (
        await connection.execute(QUARANTINED_SINCE, {"run_no": run.run_no, "began": began})
    ).scalar_one()
    return Undone(released, quarantined)


async def _bring_back(
    connection: AsyncConnection,
    run: Run,
    cause: str,
    caller: Caller,
    *,
    withdrawn: Sequence[int],
    undone: Sequence[str],
    rewound: Sequence[str],
    consumed: str,
) -> int:
    since: datetime | None = await connection.scalar(
        BEGAN, {"run_no": run.run_no, "update_ids": list(undone), "versions": list(withdrawn)}
    )
    if since is None:
        return 0
    causes = {
        "run_no": run.run_no,
        "since": since,
        "consumed": consumed,
        "rewound": list(rewound),
        "undone": list(undone),
        "withdrawn": list(withdrawn),
    }
    # Found without the locks, then decided again under them.
    group_ids = list((await connection.scalars(for_run(FIND_RETURNING, run.group_column), causes)).all())
    await groups.lock(connection, run, group_ids)
    released: int = (
        await connection.execute(
            for_run(BRING_BACK, run.group_column), causes | {"cause": cause, "actor": caller.actor}
        )
    ).scalar_one()
    await groups.refresh(connection, run, group_ids, caller.actor)
    return released
