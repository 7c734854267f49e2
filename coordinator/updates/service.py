"""What can be done with updates: opened, renewed, committed or aborted, and looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event, record_failure
from coordinator.policies.service import find_version
from coordinator.rollouts import groups
from coordinator.rollouts.queries import for_run
from coordinator.runs.service import Run, get_run, lock_run
from coordinator.updates import queries
from coordinator.wire.policies import PolicyRef
from coordinator.wire.updates import (
    AbortUpdate,
    CommitUpdate,
    OpenUpdate,
    Renew,
    UpdateList,
    UpdateState,
    UpdateView,
)


def update_view(run: Run, row: Any) -> UpdateView:
    """An update of this run as it goes over the wire."""
    fields = {name: getattr(row, name) for name in UpdateView.model_fields.keys() - {"lease_seconds"}}
    return UpdateView.model_validate(fields | {"lease_seconds": run.settings.update_lease_seconds})


async def find_row(connection: AsyncConnection, run: Run, update_id: str) -> Any:
    """The update's row, or a refusal."""
    row = (await connection.execute(queries.GET_UPDATE, {"run_no": run.run_no, "update_id": update_id})).one_or_none()
    if row is None:
        raise Refusal("update_unknown", f"run {run.run_id} has no update {update_id}")
    return row


async def lock_update(connection: AsyncConnection, run: Run, update_id: str, owner: str) -> Any:
    """The update's row, locked until the transaction ends, held to its owner."""
    await connection.execute(queries.LOCK_UPDATE, {"run_no": run.run_no, "update_id": update_id})
    row = await find_row(connection, run, update_id)
    _require_owner(row, owner)
    return row


def _require_owner(row: Any, owner: str) -> None:
    if row.owner != owner:
        raise Refusal("update_owned", f"update {row.update_id} belongs to {row.owner}, not {owner}")


def require_open(row: Any) -> None:
    """Refuses an update that has ended, by its lease or otherwise."""
    if row.state == "expired":
        raise Refusal("lease_expired", f"the lease of update {row.update_id} ended at {row.lease_until}")
    if row.state != "open":
        raise Refusal("update_fenced", f"update {row.update_id} is {row.state}: {row.reason or 'ended'}")


async def get_update(connection: AsyncConnection, run_id: str, update_id: str) -> UpdateView:
    """One update."""
    run = await get_run(connection, run_id)
    return update_view(run, await find_row(connection, run, update_id))


async def list_updates(
    connection: AsyncConnection,
    run_id: str,
    after: str | None,
    limit: int,
    *,
    state: UpdateState | None = None,
    newest_first: bool = False,
) -> UpdateList:
    """Updates in the order of their opening or against it, those beyond `after`, all or those in one state."""
    run = await get_run(connection, run_id)
    if after is not None:
        await find_row(connection, run, after)
    rows = await connection.execute(
        queries.NEWEST_UPDATES if newest_first else queries.OLDEST_UPDATES,
        {"run_no": run.run_no, "after": after, "limit": limit, "state": state},
    )
    updates = [update_view(run, row) for row in rows]
    return UpdateList(updates=updates, next_after=updates[-1].update_id if len(updates) == limit else None)


async def open_update(
    connection: AsyncConnection, run_id: str, update_id: str, body: OpenUpdate, caller: Caller
) -> tuple[UpdateView, bool]:
    """Opens an update, or finds the same one, restating its policy if it is new. Second: whether it was opened."""
    run = await lock_run(connection, run_id)
    keys = {"run_no": run.run_no, "update_id": update_id}
    await connection.execute(queries.LOCK_UPDATE, keys)
    row = (await connection.execute(queries.GET_UPDATE, keys)).one_or_none()
    if row is not None and body.policy_version is None:
        # Whatever is active by now: the first such call settled it, and this one may be its retry.
        _require_owner(row, body.owner)
        return update_view(run, row), False
    named = run.active
    if body.policy_version is not None and body.artifact_hash is not None:
        named = PolicyRef(version=body.policy_version, artifact_hash=body.artifact_hash)
    policy = await find_version(connection, run.run_no, named.version)
    if policy.artifact_hash != named.artifact_hash:
        raise Refusal(
            "policy_identity_conflict",
            f"version {policy.version} is {policy.artifact_hash}, not {named.artifact_hash}",
        )
    if policy.state in ("withdrawn", "abandoned"):
        raise Refusal("policy_withdrawn", f"version {policy.version} is {policy.state}")
    stated = {
        "policy_version": named.version,
        "artifact_hash": named.artifact_hash,
        "lag_clock": policy.lag_clock,
    }
    if row is None:
        await connection.execute(
            queries.INSERT_UPDATE,
            keys | stated | {"owner": body.owner, "lease_seconds": run.settings.update_lease_seconds},
        )
        opened = update_view(run, await find_row(connection, run, update_id))
        await record_event(
            connection,
            run.run_no,
            "update.opened",
            update_id,
            caller.actor,
            owner=body.owner,
            policy_version=named.version,
            artifact_hash=named.artifact_hash,
            lease_until=opened.lease_until.isoformat(),
        )
        return opened, True
    _require_owner(row, body.owner)
    if (row.policy_version, row.artifact_hash) != (named.version, named.artifact_hash):
        require_open(row)
        if row.after_commit_no is not None:
            raise Refusal("update_conflict", f"update {update_id} reserved under version {row.policy_version}")
        await connection.execute(queries.RESTATE_UPDATE, keys | stated)
        await record_event(
            connection,
            run.run_no,
            "update.restated",
            update_id,
            caller.actor,
            policy_version=named.version,
            artifact_hash=named.artifact_hash,
        )
    return update_view(run, await find_row(connection, run, update_id)), False


async def renew(connection: AsyncConnection, run_id: str, update_id: str, body: Renew, caller: Caller) -> UpdateView:
    """Moves the lease's end to a whole lease time from now, by the database's clock."""
    run = await lock_run(connection, run_id)
    row = await lock_update(connection, run, update_id, body.owner)
    require_open(row)
    until = await connection.scalar(
        queries.RENEW_UPDATE,
        {
            "run_no": run.run_no,
            "update_id": update_id,
            "lease_seconds": run.settings.update_lease_seconds,
        },
    )
    if until is None:
        raise Refusal("lease_expired", f"the lease of update {update_id} ended at {row.lease_until}")
    await record_event(connection, run.run_no, "update.renewed", update_id, caller.actor, lease_until=until.isoformat())
    return update_view(run, await find_row(connection, run, update_id))


async def _lock_held(connection: AsyncConnection, run: Run, update_id: str) -> tuple[list[str], list[str]]:
    """What the update holds, its groups locked: rollout ids and group ids."""
    rows = (
        await connection.execute(
            for_run(queries.HELD_ROLLOUTS, run.group_column),
            {"run_no": run.run_no, "update_id": update_id},
        )
    ).all()
    group_ids = sorted({row.group_id for row in rows})
    await groups.lock(connection, run, group_ids)
    return [row.rollout_id for row in rows], group_ids


async def commit(
    connection: AsyncConnection, run_id: str, update_id: str, body: CommitUpdate, caller: Caller
) -> UpdateView:
    """Consumes all that the update holds, once, and gives it the run's next commit_no."""
    run = await lock_run(connection, run_id)
    row = await lock_update(connection, run, update_id, body.owner)
    if row.state in ("committed", "rewound"):
        return update_view(run, row)
    require_open(row)
    if body.after_commit_no != run.last_commit_no or row.after_commit_no not in (None, run.last_commit_no):
        raise Refusal(
            "line_conflict",
            f"the line's last commit is {run.last_commit_no}; the weights contain {body.after_commit_no}",
        )
    keys = {"run_no": run.run_no, "update_id": update_id}
    withdrawn = await connection.scalar(queries.WITHDRAWN, keys | {"policy_version": row.policy_version})
    if withdrawn is not None:
        raise Refusal("policy_withdrawn", f"version {withdrawn} was withdrawn")
    held, group_ids = await _lock_held(connection, run, update_id)
    discards = {discard.rollout_id: discard.reason for discard in body.discards}
    foreign = sorted(discards.keys() - set(held))
    if foreign:
        raise Refusal(
            "invalid_request",
            f"update {update_id} does not hold {', '.join(foreign[:10])}",
            field="discards",
            item=foreign[0],
        )
    commit_no = await connection.scalar(queries.COMMIT_UPDATE, keys | {"after_commit_no": body.after_commit_no})
    if commit_no is None:
        raise Refusal("lease_expired", f"the lease of update {update_id} ended at {row.lease_until}")
    await connection.execute(
        for_run(queries.CONSUME, run.group_column),
        keys
        | {
            "held_ids": held,
            "discard_ids": list(discards),
            "discard_reasons": list(discards.values()),
            "actor": caller.actor,
        },
    )
    await groups.refresh(connection, run, group_ids, caller.actor, update_id)
    await record_event(
        connection,
        run.run_no,
        "update.committed",
        update_id,
        caller.actor,
        commit_no=commit_no,
        after_commit_no=body.after_commit_no,
        consumed=len(held) - len(discards),
        discarded=len(discards),
        lease_until=row.lease_until.isoformat(),
    )
    return update_view(run, await find_row(connection, run, update_id))


async def end(
    connection: AsyncConnection,
    run: Run,
    update_id: str,
    state: str,
    reason: str,
    quarantine: bool,
    actor: str,
) -> None:
    """Ends an open update without a commit: what it held is released or quarantined."""
    keys = {"run_no": run.run_no, "update_id": update_id}
    held, group_ids = await _lock_held(connection, run, update_id)
    await connection.execute(
        queries.RELEASE,
        keys | {"held_ids": held, "quarantine": quarantine, "reason": f"update_{state}", "actor": actor},
    )
    await connection.execute(queries.END_UPDATE, keys | {"state": state, "reason": reason})
    await groups.refresh(connection, run, group_ids, actor, update_id)
    await record_event(
        connection,
        run.run_no,
        f"update.{state}",
        update_id,
        actor,
        reason=reason,
        released=0 if quarantine else len(held),
        quarantined=len(held) if quarantine else 0,
    )
    await record_failure(connection, run.run_no, "update", state, reason, actor, update_id=update_id)


async def abort(
    connection: AsyncConnection, run_id: str, update_id: str, body: AbortUpdate, caller: Caller
) -> UpdateView:
    """Ends the update: what it held goes back to rewarded, or into quarantine."""
    run = await lock_run(connection, run_id)
    row = await lock_update(connection, run, update_id, body.owner)
    if row.state != "aborted":
        require_open(row)
        await end(connection, run, update_id, "aborted", body.reason, body.quarantine, caller.actor)
    return update_view(run, await find_row(connection, run, update_id))


async def expire_due(connection: AsyncConnection, run_id: str) -> int:
    """Aborts every update of the run whose lease has ended, by the run's rule. Answers how many."""
    run = await lock_run(connection, run_id)
    due: Sequence[str] = (await connection.scalars(queries.DUE_UPDATES, {"run_no": run.run_no})).all()
    for update_id in due:
        await connection.execute(queries.LOCK_UPDATE, {"run_no": run.run_no, "update_id": update_id})
        row = await find_row(connection, run, update_id)
        reason = f"the lease ended at {row.lease_until.isoformat()}"
        quarantine = run.settings.on_expiry == "quarantine"
        await end(connection, run, update_id, "expired", reason, quarantine, "clock")
    return len(due)


async def has_due(connection: AsyncConnection, run_id: str) -> bool:
    """Whether some update of the run outlived its lease and nobody has tidied up yet."""
    return bool(await connection.scalar(queries.HAS_DUE_UPDATES, {"run_id": run_id}))
