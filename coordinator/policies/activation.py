"""Activations: the required workers are frozen, they confirm, and the pointer moves in one transaction.

Everything that changes an activation holds the run's lock, so verdicts are made from rows that stand still.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event, record_failure
from coordinator.policies import queries
from coordinator.rollouts.quarantine import quarantine_of_versions
from coordinator.rules.activation import decide_activation
from coordinator.runs.service import Run, get_run, lock_run
from coordinator.wire.policies import (
    ActivationList,
    ActivationVerdict,
    ActivationView,
    Candidate,
    GiveUp,
    OpenActivation,
    PolicyRef,
    RequiredWorker,
    Watch,
)


async def _required(
    connection: AsyncConnection, run: Run, activation_id: str | None
) -> dict[str, list[RequiredWorker]]:
    """The required workers of one activation, or of all, with what they said."""
    rows = await connection.execute(queries.REQUIRED_WORKERS, {"run_no": run.run_no, "activation_id": activation_id})
    required: defaultdict[str, list[RequiredWorker]] = defaultdict(list)
    for row in rows:
        ack = "missing" if row.matching is None else "matching" if row.matching else "mismatched"
        required[row.activation_id].append(
            RequiredWorker.model_validate(
                {
                    "worker_id": row.worker_id,
                    "incarnation": row.incarnation,
                    "ack": ack,
                    "acked_at": row.acked_at,
                    "detail": row.detail,
                }
            )
        )
    return required


def _view(row: Any, required: list[RequiredWorker]) -> ActivationView:
    fields = {name: getattr(row, name) for name in ActivationView.model_fields.keys() - {"required"}}
    return ActivationView(required=tuple(required), **fields)


async def find_activation(connection: AsyncConnection, run: Run, activation_id: str) -> ActivationView:
    """The activation, or a refusal."""
    row = (
        await connection.execute(queries.GET_ACTIVATION, {"run_no": run.run_no, "activation_id": activation_id})
    ).one_or_none()
    if row is None:
        raise Refusal("activation_unknown", f"there is no activation {activation_id}")
    return _view(row, (await _required(connection, run, activation_id))[activation_id])


async def get_activation(connection: AsyncConnection, run_id: str, activation_id: str) -> ActivationView:
    """One activation."""
    return await find_activation(connection, await get_run(connection, run_id), activation_id)


async def list_activations(connection: AsyncConnection, run_id: str) -> ActivationList:
    """Every activation, oldest first."""
    run = await get_run(connection, run_id)
    required = await _required(connection, run, None)
    rows = await connection.execute(queries.LIST_ACTIVATIONS, {"run_no": run.run_no})
    return ActivationList(activations=[_view(row, required[row.activation_id]) for row in rows])


async def open_activation(
    connection: AsyncConnection, run_id: str, version: int, body: OpenActivation, caller: Caller
) -> tuple[ActivationView, bool]:
    """Freezes the required workers, or finds the same activation. Second: whether it is new.

    The artifact may still be on its way; only the switch needs it committed.
    """
    run = await lock_run(connection, run_id)
    keys = {"run_no": run.run_no, "activation_id": body.activation_id}
    asked = None if body.required_workers is None else sorted(set(body.required_workers))
    row = (await connection.execute(queries.GET_ACTIVATION, keys)).one_or_none()
    if row is not None:
        if row.version != version or row.asked_workers != asked:
            raise Refusal("activation_conflict", f"activation {body.activation_id} is of version {row.version}")
        return await find_activation(connection, run, body.activation_id), False
    policy = (await connection.execute(queries.GET_VERSION, {"run_no": run.run_no, "version": version})).one_or_none()
    if policy is None:
        raise Refusal("policy_version_unknown", f"the run has no policy version {version}")
    if policy.state not in ("prepared", "committed"):
        raise Refusal("policy_state", f"version {version} is {policy.state}")
    if version <= run.active.version:
        raise Refusal("non_monotonic_version", f"version {run.active.version} is active already")
    other = (await connection.execute(queries.OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    if other is not None:
        raise Refusal(
            "activation_open",
            f"activation {other.activation_id} of version {other.version} is open until {other.deadline_at}",
        )
    await connection.execute(
        queries.INSERT_ACTIVATION,
        keys
        | {
            "version": version,
            "asked_workers": asked,
            "deadline_seconds": run.settings.activation_deadline_seconds,
        },
    )
    frozen = (
        await connection.scalars(
            queries.FREEZE_WORKERS,
            keys | {"asked_workers": asked, "lost_after_seconds": run.settings.lost_after_seconds},
        )
    ).all()
    unknown = sorted(set(asked or ()) - set(frozen))
    if unknown:
        raise Refusal("worker_unknown", f"not registered: {', '.join(unknown)}")
    if not frozen:
        raise Refusal("no_required_workers", f"run {run_id} has no worker that could confirm version {version}")
    await record_event(
        connection,
        run.run_no,
        "activation.opened",
        body.activation_id,
        caller.actor,
        version=version,
        artifact_hash=policy.artifact_hash,
        required_workers=sorted(frozen),
    )
    await switch_if_ready(connection, run, version, caller.actor)
    return await find_activation(connection, run, body.activation_id), True


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
        return verdict.model_copy(update={"activated": False})
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
    """Ends an open activation. Its version is abandoned, and what workers made with it is quarantined."""
    run = await lock_run(connection, run_id)
    activation = await find_activation(connection, run, activation_id)
    if activation.state == "given_up":
        return activation
    if activation.state != "open":
        raise Refusal("activation_ended", f"activation {activation_id} is {activation.state}")
    await _end(connection, run, activation, "given_up", body.reason, caller.actor)
    await connection.execute(queries.ABANDON_VERSION, {"run_no": run.run_no, "version": activation.version})
    return await find_activation(connection, run, activation_id)


async def _end(
    connection: AsyncConnection, run: Run, activation: ActivationView, state: str, reason: str, actor: str
) -> None:
    """Ends an activation without the switch, and records why."""
    keys = {"run_no": run.run_no, "activation_id": activation.activation_id}
    # Waits for arrivals that were judged while this was open, so that the quarantine below finds them.
    await connection.execute(queries.LOCK_VERSION, {"run_no": run.run_no, "version": activation.version})
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


async def fail(connection: AsyncConnection, run: Run, activation_id: str, reason: str, actor: str) -> None:
    """Fails an open activation; the run's lock is held."""
    await _end(connection, run, await find_activation(connection, run, activation_id), "failed", reason, actor)


async def fail_overdue(connection: AsyncConnection, run_id: str) -> None:
    """Fails the run's open activation if its deadline has passed; the version may be tried again."""
    run = await lock_run(connection, run_id)
    row = (await connection.execute(queries.OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    overdue = (await connection.scalars(queries.OVERDUE_ACTIVATIONS)).all()
    if row is None or run_id not in overdue:
        return
    verdict = await judge(connection, run, row)
    silent = ", ".join((*verdict.missing_workers, *verdict.mismatched_workers))
    activation = await find_activation(connection, run, row.activation_id)
    reason = f"deadline: {verdict.reason}" + (f" ({silent})" if silent else "")
    await _end(connection, run, activation, "failed", reason, "clock")


async def leave(connection: AsyncConnection, run: Run, worker_id: str, reason: str, actor: str) -> None:
    """Takes a worker that drains or deregisters out of the open activation, with a record."""
    activation_id = await connection.scalar(
        queries.LEAVE_ACTIVATION, {"run_no": run.run_no, "worker_id": worker_id, "reason": reason}
    )
    if activation_id is None:
        return
    await record_event(
        connection, run.run_no, "activation.dropped", activation_id, actor, worker_id=worker_id, reason=reason
    )
    activation = await find_activation(connection, run, activation_id)
    if activation.required:
        await switch_if_ready(connection, run, activation.version, actor)
    else:
        await _end(connection, run, activation, "failed", "no_required_workers: the last one left", actor)


async def watch(connection: AsyncConnection, run_id: str) -> Watch:
    """The active version and the candidate that is to follow it."""
    run = await get_run(connection, run_id)
    row = (await connection.execute(queries.OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    candidate = None
    if row is not None:
        names = Candidate.model_fields.keys()
        candidate = Candidate.model_validate({name: getattr(row, name) for name in names})
    return Watch(event_no=run.event_no, active=run.active, candidate=candidate)
