"""Policy versions: prepared, uploaded, committed. An artifact never changes once it is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event
from coordinator.policies import queries
from coordinator.policies.removal import hold_off_removal
from coordinator.rules.manifest import artifact_hash
from coordinator.runs.service import Run, get_run, lock_run
from coordinator.storage.locations import LocationError, Locations
from coordinator.wire.policies import PolicyList, PolicyView, PreparePolicy


def policy_view(row: Any) -> PolicyView:
    """A version as it goes over the wire."""
    documents = ("base_model", "files", "digests", "verification")
    fields = dict(row._mapping) | {
        name: json.loads(row._mapping[name]) for name in documents if row._mapping[name] is not None
    }
    return PolicyView.model_validate(fields)


async def find_version(connection: AsyncConnection, run_no: int, version: int) -> PolicyView:
    """The version, or a refusal."""
    row = (await connection.execute(queries.GET_VERSION, {"run_no": run_no, "version": version})).one_or_none()
    if row is None:
        raise Refusal("policy_version_unknown", f"the run has no policy version {version}")
    return policy_view(row)


async def get_policy(connection: AsyncConnection, run_id: str, version: int) -> PolicyView:
    """One version."""
    return await find_version(connection, (await get_run(connection, run_id)).run_no, version)


def require_durable(policy: PolicyView) -> None:
    """Refuses a version that cannot be brought back."""
    version = policy.version
    if policy.kind == "stream":
        raise Refusal("policy_not_durable", f"version {version} was pushed to the engines and left no files")
    if policy.files_removed_at is not None:
        raise Refusal("policy_not_durable", f"retention removed the files of version {version}")
    if policy.state in ("prepared", "abandoned", "withdrawn"):
        raise Refusal("policy_state", f"version {version} is {policy.state}")


async def list_policies(connection: AsyncConnection, run_id: str) -> PolicyList:
    """Every version, lowest number first."""
    run = await get_run(connection, run_id)
    rows = await connection.execute(queries.LIST_VERSIONS, {"run_no": run.run_no})
    return PolicyList(policies=[policy_view(row) for row in rows])


async def prepare(
    connection: AsyncConnection, run_id: str, body: PreparePolicy, caller: Caller, locations: Locations
) -> tuple[PolicyView, bool]:
    """Names a new version and its artifact, or finds the same one. Second: whether it is new."""
    try:
        uri = None if body.uri is None else locations.check(body.uri)
    except LocationError as error:
        raise Refusal("artifact_uri_not_allowed", str(error), field="uri") from error
    files = sorted((file.model_dump() for file in body.files), key=lambda file: str(file["name"]))
    sizes: dict[str, int] = {}
    for file in body.files:
        if sizes.setdefault(file.sha256, file.size) != file.size:
            raise Refusal(
                "invalid_request", f"{file.name} has the sha256 of another file and another size", field="files"
            )
    base_model = body.base_model.model_dump()
    try:
        named = body.artifact_hash or artifact_hash(body.kind, base_model, files)
    except ValueError as error:
        raise Refusal("invalid_file_name", str(error), field="files") from error
    run = await lock_run(connection, run_id)
    row = (await connection.execute(queries.GET_VERSION, {"run_no": run.run_no, "version": body.version})).one_or_none()
    if row is not None:
        known = policy_view(row)
        same = body.model_copy(update={"artifact_hash": named, "uri": uri})
        if all(
            getattr(known, name) == getattr(same, name)
            for name in ("artifact_hash", "parent_version", "rollback_version", "updates", "digests", "uri")
        ):
            return known, False
        raise Refusal(
            "policy_conflict",
            f"version {body.version} exists with artifact {known.artifact_hash}, parent {known.parent_version}, "
            f"rollback version {known.rollback_version}, updates {list(known.updates)}, digests {known.digests} "
            f"and URI {known.uri}",
        )
    newest = await connection.scalar(queries.NEWEST_VERSION, {"run_no": run.run_no})
    if body.version <= newest:
        raise Refusal("non_monotonic_version", f"the newest version is {newest}; {body.version} is not greater")
    lag_clock = body.version
    if body.parent_version is not None:
        parent = await find_version(connection, run.run_no, body.parent_version)
        if parent.state == "withdrawn":
            raise Refusal("policy_withdrawn", f"the parent version {parent.version} was withdrawn")
        lag_clock = parent.lag_clock + body.version - parent.version
    if body.rollback_version is not None:
        require_durable(await find_version(connection, run.run_no, body.rollback_version))
    # The parent is not held against the versions that the updates were opened on, since each comparison would refuse
    # trainers who are right. Equal: an update that was opened while its predecessor still stepped names the version
    # before the parent. The parent or an ancestor: a version may be made anew from an older parent, naming all updates
    # since, one of which was opened on a version in between. Descent of what is named decides a withdrawal either way.
    open_updates = (
        await connection.scalars(queries.UNCOMMITTED_UPDATES, {"run_no": run.run_no, "update_ids": list(body.updates)})
    ).all()
    if open_updates:
        raise Refusal("update_not_committed", f"not committed: {', '.join(open_updates)}")
    await hold_off_removal(connection)
    made = {
        "version": body.version,
        "artifact_hash": named,
        "kind": body.kind,
        "parent_version": body.parent_version,
        "rollback_version": body.rollback_version,
        "lag_clock": lag_clock,
        "base_model": base_model,
        "files": files,
        "updates": list(body.updates),
        "digests": body.digests,
        "uri": uri,
    }
    view = await insert_version(connection, run, made)
    await record_event(
        connection,
        run.run_no,
        "policy.prepared",
        str(view.version),
        caller.actor,
        artifact_hash=view.artifact_hash,
        parent_version=view.parent_version,
        updates=list(view.updates),
    )
    return view, True


async def insert_version(connection: AsyncConnection, run: Run, made: Mapping[str, Any]) -> PolicyView:
    """Adds a prepared version of these fields. The run's lock is held."""
    documents = {name: json.dumps(made[name]) for name in ("base_model", "files", "digests")}
    await connection.execute(queries.INSERT_VERSION, {"run_no": run.run_no} | dict(made) | documents)
    return await find_version(connection, run.run_no, made["version"])
