"""The files of policy versions: uploaded, downloaded, and committed when all of them are there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import BinaryIO

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.policies import verification
from coordinator.policies.service import find_version, get_policy
from coordinator.runs.service import get_run, lock_run
from coordinator.storage.artifacts import (
    ArtifactStore,
    NoSpaceError,
    UploadBusyError,
    UploadOffsetError,
    WrongContentError,
)
from coordinator.storage.database import Database
from coordinator.storage.locations import Locations
from coordinator.wire.policies import ArtifactFile, FileUpload, PolicyView

# A version that was marked while a file of it arrived: the file leaves the store with the next round.
GOING_AGAIN = text("""
    UPDATE policy_versions SET files_gone = false
    WHERE run_no = :run_no AND version = :version AND files_removed_at IS NOT NULL
    RETURNING version
""")


def _file(policy: PolicyView, name: str) -> ArtifactFile:
    for file in policy.files:
        if file.name == name:
            return file
    raise Refusal("artifact_file_unknown", f"the manifest of version {policy.version} has no file {name!r}")


def _removed(policy: PolicyView) -> str:
    return f"the files of version {policy.version} were removed by retention at {policy.files_removed_at}"


def _takes_files(policy: PolicyView) -> None:
    """Refuses an upload to a version that is over, or whose files lie elsewhere."""
    if policy.state in ("abandoned", "withdrawn"):
        raise Refusal("policy_state", f"version {policy.version} is {policy.state}")
    if policy.files_removed_at is not None:
        raise Refusal("policy_state", _removed(policy))
    if policy.uri is not None:
        raise Refusal(
            "policy_state", f"the files of version {policy.version} lie at {policy.uri}, and are not uploaded"
        )


async def upload(
    database: Database,
    store: ArtifactStore,
    run_id: str,
    version: int,
    name: str,
    chunks: AsyncIterator[bytes],
    offset: int | None,
) -> FileUpload:
    """Receives one file of a version's artifact, or from `offset` on a part of it. Sending it again is safe."""
    policy = await database.transaction(get_policy, run_id, version)
    file = _file(policy, name)
    _takes_files(policy)
    if offset is not None and await store.on_disk(store.has, file.sha256, file.size):
        # The last part once more, after its answer was lost: there is nothing to add.
        return FileUpload(name=name, size=file.size, received=file.size, stored=True)
    if offset is not None and offset > file.size:
        raise Refusal("upload_offset", f"{name} has {file.size} bytes", received=0)
    try:
        received = await store.put(run_id, file.sha256, file.size, chunks, offset)
    except WrongContentError as error:
        raise Refusal("artifact_file_mismatch", f"{name}: {error}", item=name) from error
    except UploadOffsetError as error:
        raise Refusal("upload_offset", f"{name}: {error}", item=name, received=error.received) from error
    except UploadBusyError as error:
        raise Refusal("upload_busy", f"{name}: {error}", item=name) from error
    except NoSpaceError as error:
        raise Refusal("no_space", str(error)) from error
    if policy.state != "prepared":  # of one that is prepared no file is removed
        await database.transaction(_still_wanted, run_id, version)
    return FileUpload(name=name, size=file.size, received=received, stored=received == file.size)


async def _still_wanted(connection: AsyncConnection, run_id: str, version: int) -> None:
    run = await get_run(connection, run_id)
    policy = await find_version(connection, run.run_no, version)
    if policy.files_removed_at is not None:
        await connection.execute(GOING_AGAIN, {"run_no": run.run_no, "version": version})


async def received(database: Database, store: ArtifactStore, run_id: str, version: int, name: str) -> FileUpload:
    """How much of a file is here."""
    policy = await database.transaction(get_policy, run_id, version)
    file = _file(policy, name)
    _takes_files(policy)
    if await store.on_disk(store.has, file.sha256, file.size):
        return FileUpload(name=name, size=file.size, received=file.size, stored=True)
    count, busy = await store.on_disk(store.received, run_id, file.sha256)
    return FileUpload(name=name, size=file.size, received=min(count, file.size), stored=False, busy=busy)


async def find(
    database: Database, store: ArtifactStore, run_id: str, version: int, name: str
) -> tuple[ArtifactFile, BinaryIO]:
    """The manifest's entry for a file, and the file, opened: a removal does not take it away any more."""
    policy = await database.transaction(get_policy, run_id, version)
    file = _file(policy, name)
    if policy.uri is not None:
        raise Refusal("artifact_file_missing", f"the files of version {version} lie at {policy.uri}: read them there")
    if policy.files_removed_at is not None:
        raise Refusal("artifact_file_missing", _removed(policy))
    try:
        return file, await store.on_disk(store.open, file.sha256)
    except FileNotFoundError as error:
        raise Refusal("artifact_file_missing", f"{name} of version {version} has not been uploaded") from error


async def commit(
    database: Database, store: ArtifactStore, locations: Locations, run_id: str, version: int, caller: Caller
) -> PolicyView:
    """Commits a version when every file is there and every hash agrees; the files are read once more for it.

    Of a large artifact, or one at a URI, they are read in the background: the version is still prepared then, and its
    `verification` runs.
    """
    policy = await database.transaction(get_policy, run_id, version)
    if policy.state != "prepared":
        return await database.transaction(_commit, run_id, version, caller.actor)
    if policy.uri is None:
        small = sum(file.size for file in policy.files) <= verification.SMALL_BYTES
        if small:
            faulty = await verification.faulty_files(store, locations, policy)
        else:
            faulty = await store.on_disk(absent, store, policy)
        if faulty:
            await database.transaction(_record_incomplete, run_id, version, faulty, caller.actor)
            raise Refusal("artifact_incomplete", verification.incomplete(faulty), files=faulty)
        if small:
            return await database.transaction(_commit, run_id, version, caller.actor)
    return await database.transaction(verification.ask, run_id, version, caller.actor)


def absent(store: ArtifactStore, policy: PolicyView) -> list[str]:
    """The files of a version that are not in the store. Blocks."""
    return [file.name for file in policy.files if not store.has(file.sha256, file.size)]


async def _record_incomplete(
    connection: AsyncConnection, run_id: str, version: int, faulty: list[str], actor: str
) -> None:
    run = await get_run(connection, run_id)
    await verification.record_incomplete(connection, run.run_no, version, faulty, actor)


async def _commit(connection: AsyncConnection, run_id: str, version: int, actor: str) -> PolicyView:
    run = await lock_run(connection, run_id)
    await verification.commit_version(connection, run, version, actor)
    return await find_version(connection, run.run_no, version)
