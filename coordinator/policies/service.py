"""Policy versions: prepared, uploaded, committed. An artifact never changes once it is named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event, record_failure
from coordinator.policies import queries
from coordinator.policies.activation import switch_if_ready
from coordinator.rules.manifest import artifact_hash
from coordinator.runs.service import get_run, lock_run
from coordinator.storage.artifacts import ArtifactStore, NoSpaceError, WrongContentError
from coordinator.storage.database import Database
from coordinator.wire.policies import ArtifactFile, PolicyList, PolicyView, PreparePolicy


def policy_view(row: Any) -> PolicyView:
    """A version as it goes over the wire."""
    fields = dict(row._mapping) | {name: json.loads(row._mapping[name]) for name in ("base_model", "files", "digests")}
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


async def list_policies(connection: AsyncConnection, run_id: str) -> PolicyList:
    """Every version, lowest number first."""
    run = await get_run(connection, run_id)
    rows = await connection.execute(queries.LIST_VERSIONS, {"run_no": run.run_no})
    return PolicyList(policies=[policy_view(row) for row in rows])


async def prepare(
    connection: AsyncConnection, run_id: str, body: PreparePolicy, caller: Caller
) -> tuple[PolicyView, bool]:
    """Names a new version and its artifact, or finds the same one. Second: whether it is new."""
    files = sorted((file.model_dump() for file in body.files), key=lambda file: str(file["name"]))
    base_model = body.base_model.model_dump()
    try:
        named = body.artifact_hash or artifact_hash(body.kind, base_model, files)
    except ValueError as error:
        raise Refusal("invalid_file_name", str(error), field="files") from error
    run = await lock_run(connection, run_id)
    row = (await connection.execute(queries.GET_VERSION, {"run_no": run.run_no, "version": body.version})).one_or_none()
    if row is not None:
        known = policy_view(row)
        if (known.artifact_hash, known.parent_version, known.updates, known.digests) == (
            named,
            body.parent_version,
            body.updates,
            body.digests,
        ):
            return known, False
        raise Refusal(
            "policy_conflict",
            f"version {body.version} exists with artifact {known.artifact_hash}, parent {known.parent_version}, "
            f"updates {list(known.updates)} and digests {known.digests}",
        )
    newest = await connection.scalar(queries.NEWEST_VERSION, {"run_no": run.run_no})
    if body.version <= newest:
        raise Refusal("non_monotonic_version", f"the newest version is {newest}; {body.version} is not greater")
    parent = await find_version(connection, run.run_no, body.parent_version)
    if parent.state == "withdrawn":
        raise Refusal("policy_withdrawn", f"the parent version {parent.version} was withdrawn")
    open_updates = (
        await connection.scalars(queries.UNCOMMITTED_UPDATES, {"run_no": run.run_no, "update_ids": list(body.updates)})
    ).all()
    if open_updates:
        raise Refusal("update_not_committed", f"not committed: {', '.join(open_updates)}")
    await connection.execute(
        queries.INSERT_VERSION,
        {
            "run_no": run.run_no,
            "version": body.version,
            "artifact_hash": named,
            "kind": body.kind,
            "parent_version": body.parent_version,
            "lag_clock": parent.lag_clock + body.version - parent.version,
            "base_model": json.dumps(base_model),
            "files": json.dumps(files),
            "updates": list(body.updates),
            "digests": json.dumps(body.digests),
        },
    )
    await record_event(
        connection,
        run.run_no,
        "policy.prepared",
        str(body.version),
        caller.actor,
        artifact_hash=named,
        parent_version=body.parent_version,
        updates=list(body.updates),
    )
    return await find_version(connection, run.run_no, body.version), True


def _file(policy: PolicyView, name: str) -> ArtifactFile:
    for file in policy.files:
        if file.name == name:
            return file
    raise Refusal("artifact_file_unknown", f"the manifest of version {policy.version} has no file {name!r}")


async def upload(
    database: Database,
    store: ArtifactStore,
    run_id: str,
    version: int,
    name: str,
    chunks: AsyncIterator[bytes],
) -> PolicyView:
    """Stores one file of a version's artifact. Sending it again is safe."""
    policy = await database.transaction(get_policy, run_id, version)
    file = _file(policy, name)
    if policy.state in ("abandoned", "withdrawn"):
        raise Refusal("policy_state", f"version {version} is {policy.state}")
    try:
        await store.put(file.sha256, file.size, chunks)
    except WrongContentError as error:
        raise Refusal("artifact_file_mismatch", f"{name}: {error}", item=name) from error
    except NoSpaceError as error:
        raise Refusal("no_space", str(error)) from error
    return policy


async def locate(
    connection: AsyncConnection, store: ArtifactStore, run_id: str, version: int, name: str
) -> tuple[ArtifactFile, str]:
    """The manifest's entry for a file and its path in the store."""
    file = _file(await get_policy(connection, run_id, version), name)
    if not store.has(file.sha256, file.size):
        raise Refusal("artifact_file_missing", f"{name} of version {version} has not been uploaded")
    return file, str(store.path(file.sha256))


async def commit(database: Database, store: ArtifactStore, run_id: str, version: int, caller: Caller) -> PolicyView:
    """Commits a version when every file is there and every hash agrees; the files are read once more for it."""
    policy = await database.transaction(get_policy, run_id, version)
    if policy.state == "prepared":
        faulty: list[str] = []
        for file in policy.files:
            intact = store.has(file.sha256, file.size) and await asyncio.to_thread(store.is_intact, file.sha256)
            if not intact:
                faulty.append(file.name)
        if faulty:
            await database.transaction(_record_incomplete, run_id, version, faulty, caller)
            raise Refusal("artifact_incomplete", f"missing or changed: {', '.join(faulty)}", files=faulty)
    return await database.transaction(_commit, run_id, version, caller)


async def _record_incomplete(
    connection: AsyncConnection, run_id: str, version: int, faulty: list[str], caller: Caller
) -> None:
    run = await get_run(connection, run_id)
    await record_failure(
        connection,
        run.run_no,
        "artifact",
        "artifact_not_committed",
        f"missing or changed: {', '.join(faulty)}",
        caller.actor,
        version=version,
    )


async def _commit(connection: AsyncConnection, run_id: str, version: int, caller: Caller) -> PolicyView:
    run = await lock_run(connection, run_id)
    policy = await find_version(connection, run.run_no, version)
    if policy.state in ("abandoned", "withdrawn"):
        raise Refusal("policy_state", f"version {version} is {policy.state}")
    if policy.state == "prepared":
        await connection.execute(queries.COMMIT_VERSION, {"run_no": run.run_no, "version": version})
        await record_event(
            connection,
            run.run_no,
            "policy.committed",
            str(version),
            caller.actor,
            artifact_hash=policy.artifact_hash,
        )
        await switch_if_ready(connection, run, version, caller.actor)
    return await find_version(connection, run.run_no, version)
