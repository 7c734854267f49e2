"""Rewind: a trainer restored a checkpoint, and what came after its commit is undone, once.

Everything happens in one transaction under the run's lock.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event
from coordinator.policies import restoring, withdrawal
from coordinator.policies.service import find_version
from coordinator.rewinds.undoing import undo
from coordinator.rollouts.queries import CHANGE_VERSIONS
from coordinator.runs.service import Run, get_run, lock_run
from coordinator.updates import service
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
    await service.expire_due(connection, run_id)
    fenced = list((await connection.scalars(LOCK_OPEN_UPDATES, {"run_no": run.run_no})).all())
    line = {"run_no": run.run_no, "commit_no": body.to_commit_no}
    rewound = list((await connection.scalars(LATER_UPDATES, line)).all())
    marked = {"run_no": run.run_no, "update_ids": rewound, "reason": f"rewind {rewind_id}: {body.reason}"}
    await connection.execute(MARK_REWOUND, marked)
    await connection.execute(MOVE_LINE, line)
    withdrawn = await withdrawal.made_by(connection, run, rewound)
    undone = await undo(
        connection, run, f"rewind {rewind_id}", body.reason, caller,
        withdrawn=withdrawn, fenced=fenced, rewound=rewound, consumed=body.consumed,
    )  # fmt: skip
    restored, none_left = await restoring.restore_after(connection, run, withdrawn, body.restoring_version, caller)
    answer: dict[str, Any] = {
        "rewound_updates": rewound,
        "fenced_updates": fenced,
        "withdrawn_versions": withdrawn,
        "released": undone.released,
        "quarantined": undone.quarantined,
        "no_restorable_version": none_left,
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
        released=undone.released,
        quarantined=undone.quarantined,
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
        restoring=None if restored is None else await find_version(connection, run.run_no, restored),
        **{name: answer[name] for name in _ANSWERED},
    )


async def list_rewinds(connection: AsyncConnection, run_id: str) -> RewindList:
    """Every rewind of the run, oldest first."""
    run = await get_run(connection, run_id)
    rows = (await connection.execute(LIST_REWINDS, {"run_no": run.run_no})).all()
    return RewindList(rewinds=[await _view(connection, run, row) for row in rows])
