"""What a worker says it serves: judged, stored, and counted for the activation that waits for it."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event
from coordinator.policies import activation
from coordinator.policies import queries as policy_queries
from coordinator.policies.service import find_version
from coordinator.runs.service import Run, lock_run
from coordinator.wire.policies import PolicyView
from coordinator.wire.workers import Ack, AckVerdict, WeightDigest
from coordinator.workers import queries
from coordinator.workers.service import find_live, set_fence


async def take_ack(connection: AsyncConnection, run_id: str, worker_id: str, body: Ack, caller: Caller) -> AckVerdict:
    """Stores what a worker says it serves. A mismatch vouches for nothing and fences; the right ack lifts that.

    A worker that was dropped from an activation stays fenced until it acks the active version.
    Who serves a withdrawn version rightly, as workers do until the restoring one is active, is not fenced for it.
    """
    run = await lock_run(connection, run_id)
    worker = await find_live(connection, run, worker_id, body.incarnation)
    policy = await find_version(connection, run.run_no, body.version)
    reason, detail = "ok", None
    left = sorted(set(run.settings.required_caches) - set(body.caches_reset))
    if body.artifact_hash != policy.artifact_hash:
        reason = "worker_mismatch"
        detail = f"serves {body.artifact_hash}, version {body.version} is {policy.artifact_hash}"
    elif policy.state == "withdrawn":
        reason = "policy_withdrawn"
        detail = f"version {body.version} was withdrawn: what is made with it is quarantined"
    elif policy.state == "abandoned":
        reason, detail = "worker_mismatch", f"version {body.version} is abandoned"
    elif left:
        reason, detail = "caches_not_reset", f"not reset: {', '.join(left)}"
    elif body.digest is not None:
        detail = await _contradiction(connection, run, worker_id, policy, body, body.digest)
        reason = "ok" if detail is None else "worker_mismatch"
    opened = (await connection.execute(policy_queries.OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    activation_id = opened.activation_id if opened is not None and opened.version == body.version else None
    parameters = {
        "run_no": run.run_no,
        "worker_id": worker_id,
        "incarnation": body.incarnation,
        "version": body.version,
        "artifact_hash": body.artifact_hash,
        **_digest_columns(body.digest),
        "caches_reset": sorted(set(body.caches_reset)),
        "activation_id": activation_id,
        "matching": reason == "ok",
        "detail": detail,
    }
    repeated = (await connection.execute(queries.SAME_ACK, parameters)).one_or_none() is not None
    if not repeated:
        await connection.execute(queries.STORE_ACK, parameters)
        await record_event(
            connection,
            run.run_no,
            "worker.acked",
            worker_id,
            caller.actor,
            incarnation=body.incarnation,
            version=body.version,
            artifact_hash=body.artifact_hash,
            matching=reason == "ok",
            detail=detail,
            digest=None if body.digest is None else body.digest.model_dump(),
            caches_reset=parameters["caches_reset"],
            activation_id=activation_id,
        )
    keys = {"run_no": run.run_no, "worker_id": worker_id}
    if reason not in ("ok", "policy_withdrawn"):
        if worker.fenced:
            await connection.execute(queries.VOID_ACKS, keys)
        else:
            await set_fence(connection, run, worker_id, reason, caller.actor)
    lifted = (
        reason == "ok"
        and worker.fenced
        and (body.version == run.active.version or not await connection.scalar(queries.MUST_ACK_ACTIVE, keys))
    )
    if lifted:
        await set_fence(connection, run, worker_id, None, caller.actor)
    verdict = await activation.switch_if_ready(connection, run, body.version, caller.actor)
    if lifted and opened is not None and opened.version != body.version:
        # A dropped worker may have confirmed the candidate before the active version: that counts from now on.
        await activation.switch_if_ready(connection, run, opened.version, caller.actor)
    return AckVerdict.model_validate(
        {"matching": reason == "ok", "reason": reason, "detail": detail, "activation": verdict}
    )


def _digest_columns(digest: WeightDigest | None) -> dict[str, str | None]:
    if digest is None:
        return {"digest_layout": None, "digest_registered": None, "digest_active": None}
    return {
        "digest_layout": digest.layout,
        "digest_registered": digest.registered,
        "digest_active": digest.active,
    }


async def _contradiction(
    connection: AsyncConnection, run: Run, worker_id: str, policy: PolicyView, ack: Ack, digest: WeightDigest
) -> str | None:
    """Why the weights in the engine's memory cannot be those of the version, or None.

    A label is set without touching a weight; so what the learner stated decides, then what other engines of the same
    layout hold, then whether anything changed since this engine served another artifact.
    """
    stated = policy.digests.get(digest.layout)
    if stated is not None and digest.registered != stated:
        return f"the engine holds {digest.registered}; for {digest.layout} version {policy.version} must be {stated}"
    keys = {
        "run_no": run.run_no,
        "worker_id": worker_id,
        "incarnation": ack.incarnation,
        "artifact_hash": ack.artifact_hash,
        **_digest_columns(digest),
    }
    other = (await connection.execute(queries.SAME_LAYOUT, keys)).one_or_none()
    if other is not None:
        which = "registered" if other.digest_registered != digest.registered else "active"
        mine, theirs = getattr(digest, which), getattr(other, f"digest_{which}")
        return (
            f"the engine's {which} weights have digest {mine}; worker {other.worker_id} of the same layout has {theirs}"
        )
    if stated is None:
        before = await connection.scalar(queries.UNCHANGED, keys)
        if before is not None:
            return f"the engine's weights are still those of version {before}: the digest did not change"
    return None
