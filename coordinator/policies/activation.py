"""Activations: the required workers are frozen, they confirm, and the pointer moves in one transaction.

Everything that changes an activation holds the run's lock, so verdicts are made from rows that stand still. One is
open at a time; the newest version that was asked for meanwhile waits, and opens when that one ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import TextClause
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event, record_failure
from coordinator.policies import queries
from coordinator.policies.reading import find_activation, keep_what_was_said
from coordinator.rollouts.quarantine import quarantine_of_versions
from coordinator.rules.activation import decide_activation
from coordinator.runs.service import Run, lock_run
from coordinator.wire.policies import (
    ActivationVerdict,
    ActivationView,
    GiveUp,
    OpenActivation,
    PolicyRef,
)


async def _row(connection: AsyncConnection, statement: TextClause, run: Run, **keys: object) -> Any:
    return (await connection.execute(statement, {"run_no": run.run_no} | keys)).one_or_none()


async def open_activation(
    connection: AsyncConnection, run_id: str, version: int, body: OpenActivation, caller: Caller
) -> tuple[ActivationView, bool]:
    """Freezes the required workers, or finds the same activation. Second: whether it is new.

    The artifact may still be on its way; only the switch needs it committed. While another activation is open, a newer
    version waits, unless it is to supersede.
    """
    run = await lock_run(connection, run_id)
    asked = None if body.required_workers is None else sorted(set(body.required_workers))
    row = await _row(connection, queries.GET_ACTIVATION, run, activation_id=body.activation_id)
    if row is not None:
        if row.version != version or row.asked_workers != asked:
            whom = "the workers then live" if row.asked_workers is None else ", ".join(row.asked_workers)
            raise Refusal(
                "activation_conflict", f"activation {body.activation_id} is of version {row.version}, by {whom}"
            )
        return await find_activation(connection, run, body.activation_id), False
    policy = await _row(connection, queries.GET_VERSION, run, version=version)
    if policy is None:
        raise Refusal("policy_version_unknown", f"the run has no policy version {version}")
    if policy.state not in ("prepared", "committed"):
        raise Refusal("policy_state", f"version {version} is {policy.state}")
    if version <= run.active.version:
        raise Refusal("non_monotonic_version", f"version {run.active.version} is active already")
    opened = await _row(connection, queries.OPEN_ACTIVATION, run)
    waiting = await _row(connection, queries.WAITING_ACTIVATION, run)
    for other, how in ((opened, "is open"), (waiting, "waits")):
        if other is not None and version <= other.version:
            raise Refusal("activation_open", f"activation {other.activation_id} of version {other.version} {how}")
    unknown = (await connection.scalars(queries.UNKNOWN_WORKERS, {"run_no": run.run_no, "asked_workers": asked})).all()
    if unknown:
        raise Refusal("worker_unknown", f"not registered: {', '.join(unknown)}")
    if waiting is not None:  # only the newest waits
        await _supersede(connection, run, waiting, version, caller.actor)
    if opened is not None and body.supersede:
        await _supersede(connection, run, opened, version, caller.actor)
    keys = {"run_no": run.run_no, "activation_id": body.activation_id, "version": version, "asked_workers": asked}
    await connection.execute(queries.INSERT_ACTIVATION, keys)
    if opened is not None and not body.supersede:
        await record_event(
            connection, run.run_no, "activation.waiting", body.activation_id, caller.actor,
            version=version, behind=opened.activation_id,
        )  # fmt: skip
    elif not await _begin(connection, run, body.activation_id, version, asked, caller.actor):
        raise Refusal("no_required_workers", f"run {run_id} has no worker that could confirm version {version}")
    return await find_activation(connection, run, body.activation_id), True


async def _begin(
    connection: AsyncConnection, run: Run, activation_id: str, version: int, asked: list[str] | None, actor: str
) -> bool:
    """Opens an activation that waits: its workers are frozen and its deadline begins. False: nobody could confirm."""
    keys = {"run_no": run.run_no, "activation_id": activation_id}
    frozen = (
        await connection.scalars(
            queries.FREEZE_WORKERS,
            keys | {"asked_workers": asked, "lost_after_seconds": run.settings.lost_after_seconds},
        )
    ).all()
    if not frozen:
        return False
    await connection.execute(
        queries.BEGIN_ACTIVATION, keys | {"deadline_seconds": run.settings.activation_deadline_seconds}
    )
    opened = await _row(connection, queries.OPEN_ACTIVATION, run)
    await record_event(
        connection,
        run.run_no,
        "activation.opened",
        activation_id,
        actor,
        version=version,
        artifact_hash=opened.artifact_hash,
        required_workers=sorted(frozen),
    )
    return True


async def _supersede(connection: AsyncConnection, run: Run, other: Any, version: int, actor: str) -> None:
    """Ends an activation for the sake of a newer version; its own is abandoned."""
    await _end(connection, run, other, "superseded", f"version {version} was asked for", actor)
    await connection.execute(queries.ABANDON_VERSION, {"run_no": run.run_no, "version": other.version})


async def _open_waiting(connection: AsyncConnection, run: Run, actor: str) -> None:
    """After the open activation ended: the one that waits opens, with the workers that are there now."""
    waiting = await _row(connection, queries.WAITING_ACTIVATION, run)
    if waiting is None:
        return
    begun = await _begin(connection, run, waiting.activation_id, waiting.version, waiting.asked_workers, actor)
    if not begun:
        reason = "no_required_workers: nobody could confirm it when its turn came"
        await _end(connection, run, waiting, "failed", reason, actor)


async def judge(connection: AsyncConnection, run: Run, activation: Any) -> ActivationVerdict:
    """The first reason that stands between an activation and the switch, from rows that are locked."""
    policy = (
        await connection.execute(queries.GET_VERSION, {"run_no": run.run_no, "version": activation.version})
    ).one()
    rows = await connection.execute(
        queries.REQUIRED_WORKERS, {"run_no": run.run_no, "activation_id": activation.activation_id}
    )
    acks: dict[str, tuple[object, object] | None] = {}
    for row in rows:
        if row.matching is None:
            acks[row.worker_id] = None
        elif row.matching:
            acks[row.worker_id] = (row.acked_version, row.acked_hash)
        else:
            # A stored ack may name the right hash and still not count: caches left, a digest that is wrong.
            acks[row.worker_id] = (row.acked_version, None)
    decision = decide_activation(
        run.active.version,
        activation.version,
        policy.artifact_hash,
        policy.state == "committed",
        acks,
        list(acks),
    )
    return ActivationVerdict(
        activated=decision.reason == "activated",
        reason=cast(Any, decision.reason),
        missing_workers=tuple(decision.missing),
        mismatched_workers=tuple(decision.mismatched),
        active=run.active,
    )


async def _switch(connection: AsyncConnection, run: Run, activation: Any, actor: str) -> ActivationVerdict:
    """Moves the pointer: retirement, activation, pointer and journal in this one transaction."""
    await keep_what_was_said(connection, run, activation.activation_id)
    await connection.execute(queries.RETIRE_ACTIVE, {"run_no": run.run_no})
    await connection.execute(queries.ACTIVATE_VERSION, {"run_no": run.run_no, "version": activation.version})
    await connection.execute(queries.MOVE_POINTER, {"run_no": run.run_no, "version": activation.version})
    await connection.execute(
        queries.END_ACTIVATION,
        {
            "run_no": run.run_no,
            "activation_id": activation.activation_id,
            "state": "succeeded",
            "reason": None,
        },
    )
    await record_event(
        connection,
        run.run_no,
        "policy.activated",
        str(activation.version),
        actor,
        activation_id=activation.activation_id,
        artifact_hash=activation.artifact_hash,
        retired=run.active.version,
    )
    await _open_waiting(connection, run, actor)
    return ActivationVerdict(
        activated=True,
        reason="activated",
        missing_workers=(),
        mismatched_workers=(),
        active=PolicyRef(version=activation.version, artifact_hash=activation.artifact_hash),
    )


async def switch_if_ready(connection: AsyncConnection, run: Run, version: int, actor: str) -> ActivationVerdict | None:
    """After something that an open activation of this version waits for: its verdict, and the switch if it holds.

    None when no activation of the version is open.
    """
    activation = (await connection.execute(queries.OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    if activation is None or activation.version != version:
        return None
    verdict = await judge(connection, run, activation)
    if verdict.activated and run.settings.activation == "last_ack":
        return await _switch(connection, run, activation, actor)
    if verdict.activated:
        # The rule knows five reasons, and `activated` is the one for when nothing stands in the way: so it stays the
        # reason, and a word of its own says what is still to come.
        return verdict.model_copy(update={"activated": False, "waits_for_hand": True})
    return verdict


async def activate(connection: AsyncConnection, run_id: str, version: int, caller: Caller) -> ActivationVerdict:
    """Switches to the version if nothing stands in the way; a refusal is a verdict."""
    run = await lock_run(connection, run_id)
    activation = (
        await connection.execute(queries.LATEST_OF_VERSION, {"run_no": run.run_no, "version": version})
    ).one_or_none()
    if activation is None:
        raise Refusal("activation_unknown", f"no activation of version {version} was opened")
    if activation.state == "succeeded":
        return ActivationVerdict(
            activated=True,
            reason="activated",
            missing_workers=(),
            mismatched_workers=(),
            active=run.active,
        )
    if activation.state == "waiting":
        raise Refusal("activation_open", f"activation {activation.activation_id} waits for the open one to end")
    if activation.state != "open":
        raise Refusal(
            "activation_ended",
            f"activation {activation.activation_id} is {activation.state}: {activation.reason}",
        )
    verdict = await judge(connection, run, activation)
    return await _switch(connection, run, activation, caller.actor) if verdict.activated else verdict


async def give_up(
    connection: AsyncConnection, run_id: str, activation_id: str, body: GiveUp, caller: Caller
) -> ActivationView:
    """Ends an activation that is open or waits. Its version is abandoned, and what workers made with it is
    quarantined."""
    run = await lock_run(connection, run_id)
    activation = await find_activation(connection, run, activation_id)
    if activation.state == "given_up":
        return activation
    if activation.state not in ("open", "waiting"):
        raise Refusal("activation_ended", f"activation {activation_id} is {activation.state}")
    await _end(connection, run, activation, "given_up", body.reason, caller.actor)
    await connection.execute(queries.ABANDON_VERSION, {"run_no": run.run_no, "version": activation.version})
    await _open_waiting(connection, run, caller.actor)
    return await find_activation(connection, run, activation_id)


async def _end(connection: AsyncConnection, run: Run, activation: Any, state: str, reason: str, actor: str) -> None:
    """Ends an activation without the switch, and records why."""
    keys = {"run_no": run.run_no, "activation_id": activation.activation_id}
    # Waits for arrivals that were judged while this was open, so that the quarantine below finds them.
    await connection.execute(queries.LOCK_VERSION, {"run_no": run.run_no, "version": activation.version})
    await keep_what_was_said(connection, run, activation.activation_id)
    await connection.execute(queries.END_ACTIVATION, keys | {"state": state, "reason": reason})
    await record_event(
        connection,
        run.run_no,
        f"activation.{state}",
        activation.activation_id,
        actor,
        version=activation.version,
        reason=reason,
    )
    await record_failure(connection, run.run_no, "activation", state, reason, actor, version=activation.version)
    await quarantine_of_versions(connection, run, [activation.version], "candidate_not_activated", actor)


async def fail(connection: AsyncConnection, run: Run, activation: Any, reason: str, actor: str) -> None:
    """Fails an activation that is open or waits; the version may be tried again. The run's lock is held."""
    await _end(connection, run, activation, "failed", reason, actor)
    await _open_waiting(connection, run, actor)


async def fail_of_versions(
    connection: AsyncConnection, run: Run, versions: Sequence[int], reason: str, actor: str
) -> None:
    """Fails the activations of these versions, the waiting one first, so that it does not open meanwhile."""
    for statement in (queries.WAITING_ACTIVATION, queries.OPEN_ACTIVATION):
        row = await _row(connection, statement, run)
        if row is not None and row.version in versions:
            await fail(connection, run, row, reason, actor)
