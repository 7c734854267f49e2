"""Rollback and withdrawal: an operator takes versions back, the pointer's among them."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event
from coordinator.policies import restoring, withdrawal
from coordinator.policies.activation import open_activation
from coordinator.policies.files import absent
from coordinator.policies.service import find_version, require_durable
from coordinator.rewinds.undoing import lock_updates_of, undo
from coordinator.rollouts.queries import CHANGE_VERSIONS
from coordinator.runs.service import Run, get_run, lock_run
from coordinator.storage.artifacts import ArtifactStore
from coordinator.wire.policies import OpenActivation, PolicyView
from coordinator.wire.rewinds import Rollback, RollbackList, RollbackView, WithdrawPolicy, WithdrawView

_COLUMNS = "rollback_id, to_version, version, reason, actor, at, CAST(answer AS text) AS answer"

GET_ROLLBACK = text(f"SELECT {_COLUMNS} FROM rollbacks WHERE run_no = :run_no AND rollback_id = :rollback_id")

LIST_ROLLBACKS = text(f"SELECT {_COLUMNS} FROM rollbacks WHERE run_no = :run_no ORDER BY at, rollback_id")

GET_WITHDRAWAL = text("""
    SELECT CAST(detail AS text) FROM journal
    WHERE run_no = :run_no AND event = 'policy.withdrawal' AND subject = :subject
""")

INSERT_ROLLBACK = text("""
    INSERT INTO rollbacks (run_no, rollback_id, to_version, version, reason, actor, answer)
    VALUES (:run_no, :rollback_id, :to_version, :version, :reason, :actor, CAST(:answer AS jsonb))
""")


async def roll_back(
    connection: AsyncConnection,
    run_id: str,
    rollback_id: str,
    body: Rollback,
    caller: Caller,
    artifacts: ArtifactStore,
) -> tuple[RollbackView, bool]:
    """Prepares an earlier artifact under a new number and withdraws what is not its ancestor, or finds the same
    rollback. Second: whether it is new.

    The line of commits stays as it is: only a trainer that restores a checkpoint goes back on it, by a rewind.
    """
    run = await lock_run(connection, run_id)
    await connection.execute(CHANGE_VERSIONS, {"run_no": run.run_no})
    keys = {"run_no": run.run_no, "rollback_id": rollback_id}
    row = (await connection.execute(GET_ROLLBACK, keys)).one_or_none()
    if row is not None:
        asked = (body.to_version, body.version, body.activation_id)
        was = (row.to_version, row.version, json.loads(row.answer)["activation_id"])
        if any(a not in (None, w) for a, w in zip(asked, was, strict=True)):
            raise Refusal("rollback_conflict", f"rollback {rollback_id} went to version {row.to_version}")
        return await _view(connection, run, row), False
    target = await _target(connection, run, body.to_version)
    missing = [] if target.uri is not None else await artifacts.on_disk(absent, artifacts, target)
    if missing:
        raise Refusal(
            "policy_not_durable", f"the artifact store has lost files of version {target.version}: {missing[0]}"
        )
    to_version = target.version
    withdrawn = await withdrawal.not_ancestors(connection, run, to_version)
    fenced = await lock_updates_of(connection, run, withdrawn)
    cause = f"rollback {rollback_id}"
    undone = await undo(connection, run, cause, body.reason, caller, withdrawn=withdrawn, fenced=fenced)
    restored = await restoring.prepare_restoring(connection, run, target, body.version, caller)
    if body.activation_id is not None:
        opening = OpenActivation(activation_id=body.activation_id, supersede=True)
        await open_activation(connection, run_id, restored.version, opening, caller)
    answer = {
        "fenced_updates": fenced,
        "withdrawn_versions": withdrawn,
        "released": undone.released,
        "quarantined": undone.quarantined,
        "activation_id": body.activation_id,
    }
    await connection.execute(
        INSERT_ROLLBACK,
        keys
        | {
            "to_version": to_version,
            "version": restored.version,
            "reason": body.reason,
            "actor": caller.actor,
            "answer": json.dumps(answer),
        },
    )
    await record_event(
        connection,
        run.run_no,
        "policy.rolled_back",
        str(restored.version),
        caller.actor,
        rollback_id=rollback_id,
        to_version=to_version,
        fenced=fenced,
        withdrawn=withdrawn,
        released=undone.released,
        quarantined=undone.quarantined,
        reason=body.reason,
    )
    return await _view(connection, run, (await connection.execute(GET_ROLLBACK, keys)).one()), True


async def _target(connection: AsyncConnection, run: Run, named: int | None) -> PolicyView:
    """The version to go back to: the one that was named, else the one that the active version names, else its nearest
    durable ancestor."""
    active = await find_version(connection, run.run_no, run.active.version)
    number = active.rollback_version if named is None else named
    if number is None:
        target = await restoring.nearest_durable(connection, run, active.parent_version)
        if target is None:
            raise Refusal("policy_not_durable", f"no durable version lies before version {active.version}")
        return target
    target = await find_version(connection, run.run_no, number)
    require_durable(target)
    if number >= active.version:
        raise Refusal(
            "policy_state",
            f"version {number} is not earlier than the active one, {active.version}; "
            "withdraw the versions that are not to be used",
        )
    return target


async def _view(connection: AsyncConnection, run: Run, row: Any) -> RollbackView:
    return RollbackView(
        rollback_id=row.rollback_id,
        to_version=row.to_version,
        reason=row.reason,
        actor=row.actor,
        at=row.at,
        restoring=await find_version(connection, run.run_no, row.version),
        **json.loads(row.answer),
    )


async def list_rollbacks(connection: AsyncConnection, run_id: str) -> RollbackList:
    """Every rollback of the run, oldest first."""
    run = await get_run(connection, run_id)
    rows = (await connection.execute(LIST_ROLLBACKS, {"run_no": run.run_no})).all()
    return RollbackList(rollbacks=[await _view(connection, run, row) for row in rows])


async def withdraw(
    connection: AsyncConnection, run_id: str, version: int, body: WithdrawPolicy, caller: Caller
) -> WithdrawView:
    """Withdraws a version and what was made from it. Again: what the first such call answered."""
    run = await lock_run(connection, run_id)
    await connection.execute(CHANGE_VERSIONS, {"run_no": run.run_no})
    policy = await find_version(connection, run.run_no, version)
    if policy.state == "abandoned":
        raise Refusal("policy_state", f"version {version} is abandoned, and cannot be used in any case")
    first = await connection.scalar(GET_WITHDRAWAL, {"run_no": run.run_no, "subject": str(version)})
    if first is not None:
        return await _withdrawal(connection, run, json.loads(first))
    withdrawn = await withdrawal.descendants(connection, run, version)
    fenced = await lock_updates_of(connection, run, withdrawn)
    cause = f"withdrawal of version {version}"
    undone = await undo(connection, run, cause, body.reason, caller, withdrawn=withdrawn, fenced=fenced)
    restored, none_left = await restoring.restore_after(
        connection, run, withdrawn, body.restoring_version, caller, [policy.artifact_hash]
    )
    answer = {
        "withdrawn": withdrawn,
        "fenced": fenced,
        "released": undone.released,
        "quarantined": undone.quarantined,
        "restoring_version": None if restored is None else restored.version,
        "no_restorable_version": none_left,
    }
    await record_event(
        connection,
        run.run_no,
        "policy.withdrawal",
        str(version),
        caller.actor,
        reason=body.reason,
        withdrawn=withdrawn,
        fenced=fenced,
        released=undone.released,
        quarantined=undone.quarantined,
        restoring_version=answer["restoring_version"],
        no_restorable_version=none_left,
    )
    return await _withdrawal(connection, run, answer)


async def _withdrawal(connection: AsyncConnection, run: Run, answer: dict[str, Any]) -> WithdrawView:
    restored = answer["restoring_version"]
    return WithdrawView(
        withdrawn_versions=answer["withdrawn"],
        fenced_updates=answer["fenced"],
        released=answer["released"],
        quarantined=answer["quarantined"],
        restoring=None if restored is None else await find_version(connection, run.run_no, restored),
        no_restorable_version=answer["no_restorable_version"],
    )
