"""Rewind: a trainer restored a checkpoint, and what came after its commit is undone, once.

Everything happens in one transaction under the run's lock.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event
from coordinator.policies import restoring, withdrawal
from coordinator.rollouts import groups
from coordinator.rollouts.quarantine import quarantine_of_versions
from coordinator.rollouts.queries import CHANGE_VERSIONS, STATE_BY_REWARD, for_run, states
from coordinator.runs.service import Run, get_run, lock_run
from coordinator.updates import service
from coordinator.wire.policies import PolicyView
from coordinator.wire.rewinds import Rewind, RewindList, RewindView

GET_REWIND = text("""
    SELECT rewind_id, to_commit_no, consumed, reason, actor, at, CAST(answer AS text) AS answer FROM rewinds
    WHERE run_no = :run_no AND rewind_id = :rewind_id
""")

LIST_REWINDS = text("""
    SELECT rewind_id, to_commit_no, consumed, reason, actor, at, CAST(answer AS text) AS answer FROM rewinds
    WHERE run_no = :run_no ORDER BY at, rewind_id
""")

SURVIVES = text("""
    SELECT update_id FROM updates WHERE run_no = :run_no AND commit_no = :commit_no AND state = 'committed'
""")

REWOUND_BY = text("""
    SELECT reason FROM updates WHERE run_no = :run_no AND commit_no = :commit_no AND state = 'rewound'
""")

LOCK_OPEN_UPDATES = text("""
    SELECT update_id FROM updates WHERE run_no = :run_no AND state = 'open' ORDER BY update_id FOR UPDATE
""")

LATER_UPDATES = text("""
    SELECT update_id FROM updates WHERE run_no = :run_no AND state = 'committed' AND commit_no > :commit_no
    ORDER BY update_id
""")

MARK_REWOUND = text("""
    UPDATE updates SET state = 'rewound', reason = :reason
    WHERE run_no = :run_no AND update_id = ANY(CAST(:update_ids AS text[]))
""")

MOVE_LINE = text("UPDATE runs SET last_commit_no = :commit_no WHERE run_no = :run_no")

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
        SELECT :run_no, rollout_id, revision, 'rewind', from_state, state, :rewind_id, :actor FROM moved
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

INSERT_REWIND = text("""
    INSERT INTO rewinds (run_no, rewind_id, to_commit_no, consumed, reason, actor, answer)
    VALUES (:run_no, :rewind_id, :to_commit_no, :consumed, :reason, :actor, CAST(:answer AS jsonb))
    RETURNING at
""")

_ANSWERED = (
    "rewound_updates",
    "fenced_updates",
    "withdrawn_versions",
    "released",
    "quarantined",
    "no_restorable_version",
)


async def rewind(
    connection: AsyncConnection, run_id: str, rewind_id: str, body: Rewind, caller: Caller
) -> tuple[RewindView, bool]:
    """Goes back to a commit, or finds the same rewind. Second: whether it is new."""
    run = await lock_run(connection, run_id)
    await connection.execute(CHANGE_VERSIONS, {"run_no": run.run_no})
    keys = {"run_no": run.run_no, "rewind_id": rewind_id}
    row = (await connection.execute(GET_REWIND, keys)).one_or_none()
    if row is not None:
        if (row.to_commit_no, row.consumed) != (body.to_commit_no, body.consumed):
            raise Refusal("rewind_conflict", f"rewind {rewind_id} went to commit {row.to_commit_no} ({row.consumed})")
        return await _view(connection, run, row), False
    await _require_on_line(connection, run, body.to_commit_no)
    began = await connection.scalar(text("SELECT clock_timestamp()"))
    await service.expire_due(connection, run_id)
    fenced = list((await connection.scalars(LOCK_OPEN_UPDATES, {"run_no": run.run_no})).all())
    line = {"run_no": run.run_no, "commit_no": body.to_commit_no}
    rewound = list((await connection.scalars(LATER_UPDATES, line)).all())
    withdrawn = await withdrawal.withdraw_made_by(connection, run, rewound, f"rewind {rewind_id}", caller.actor)
    for update_id in fenced:
        await service.end(
            connection, run, update_id, "fenced", f"rewind {rewind_id}: {body.reason}", False, caller.actor
        )
    marked = {"run_no": run.run_no, "update_ids": rewound, "reason": f"rewind {rewind_id}: {body.reason}"}
    await connection.execute(MARK_REWOUND, marked)
    await connection.execute(MOVE_LINE, line)
    released = await _bring_back(connection, run, rewind_id, body, rewound, fenced, withdrawn, caller)
    if withdrawn:
        await quarantine_of_versions(connection, run, withdrawn, "policy_withdrawn", caller.actor)
    quarantined: int = (
        await connection.execute(QUARANTINED_SINCE, {"run_no": run.run_no, "began": began})
    ).scalar_one()
    restored: PolicyView | None = None
    if run.active.version in withdrawn:
        restored = await restoring.prepare_restoring(connection, run, body.restoring_version, caller)
    answer: dict[str, Any] = {
        "rewound_updates": rewound,
        "fenced_updates": fenced,
        "withdrawn_versions": withdrawn,
        "released": released,
        "quarantined": quarantined,
        "no_restorable_version": run.active.version in withdrawn and restored is None,
        "restoring_version": None if restored is None else restored.version,
    }
    await connection.execute(
        INSERT_REWIND,
        keys
        | {
            "to_commit_no": body.to_commit_no,
            "consumed": body.consumed,
            "reason": body.reason,
            "actor": caller.actor,
            "answer": json.dumps(answer),
        },
    )
    await record_event(
        connection,
        run.run_no,
        "line.rewound",
        rewind_id,
        caller.actor,
        rewind_id=rewind_id,
        to_commit_no=body.to_commit_no,
        consumed=body.consumed,
        rewound=rewound,
        fenced=fenced,
        withdrawn=withdrawn,
        released=released,
        quarantined=quarantined,
        reason=body.reason,
    )
    return await _view(connection, run, (await connection.execute(GET_REWIND, keys)).one()), True


async def _require_on_line(connection: AsyncConnection, run: Run, commit_no: int) -> None:
    keys = {"run_no": run.run_no, "commit_no": commit_no}
    if commit_no > run.commits:  # they are numbered without holes
        raise Refusal(
            "commit_unknown", f"the run has made {run.commits} commits, no commit {commit_no}", field="to_commit_no"
        )
    if commit_no and (await connection.execute(SURVIVES, keys)).one_or_none() is None:
        reason = await connection.scalar(REWOUND_BY, keys)
        raise Refusal(
            "commit_rewound",
            f"commit {commit_no} was undone ({reason}); the surviving line ends at {run.last_commit_no}",
            field="to_commit_no",
        )
    if run.commits - commit_no > run.settings.rewind_commits:
        raise Refusal(
            "beyond_retention",
            f"commit {commit_no} lies {run.commits - commit_no} commits back; "
            f"the run keeps {run.settings.rewind_commits}",
        )


async def _bring_back(
    connection: AsyncConnection,
    run: Run,
    rewind_id: str,
    body: Rewind,
    rewound: list[str],
    fenced: list[str],
    withdrawn: list[int],
    caller: Caller,
) -> int:
    undone = [*rewound, *fenced]
    since: datetime | None = await connection.scalar(
        BEGAN, {"run_no": run.run_no, "update_ids": undone, "versions": withdrawn}
    )
    if since is None:
        return 0
    causes = {
        "run_no": run.run_no,
        "since": since,
        "consumed": body.consumed,
        "rewound": rewound,
        "undone": undone,
        "withdrawn": withdrawn,
    }
    # Found without the locks, then decided again under them.
    group_ids = list((await connection.scalars(for_run(FIND_RETURNING, run.group_column), causes)).all())
    await groups.lock(connection, run, group_ids)
    released: int = (
        await connection.execute(
            for_run(BRING_BACK, run.group_column), causes | {"rewind_id": rewind_id, "actor": caller.actor}
        )
    ).scalar_one()
    await groups.refresh(connection, run, group_ids, caller.actor)
    return released


async def _view(connection: AsyncConnection, run: Run, row: Any) -> RewindView:
    answer = json.loads(row.answer)
    restored = answer["restoring_version"]
    return RewindView(
        rewind_id=row.rewind_id,
        to_commit_no=row.to_commit_no,
        consumed=row.consumed,
        reason=row.reason,
        actor=row.actor,
        at=row.at,
        restoring=None if restored is None else await restoring.find(connection, run, restored),
        **{name: answer[name] for name in _ANSWERED},
    )


async def list_rewinds(connection: AsyncConnection, run_id: str) -> RewindList:
    """Every rewind of the run, oldest first."""
    run = await get_run(connection, run_id)
    rows = (await connection.execute(LIST_REWINDS, {"run_no": run.run_no})).all()
    return RewindList(rewinds=[await _view(connection, run, row) for row in rows])
