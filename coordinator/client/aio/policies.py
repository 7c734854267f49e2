"""Artifacts between a folder and the coordinator: sent in parts, fetched and verified."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from coordinator.client.aio.connection import AsyncConnection, Progress
from coordinator.client.aio.pace import run_blocking
from coordinator.client.artifacts import IncomingFolder, check_manifest, read_part
from coordinator.wire.policies import ArtifactFile, PolicyView

_PART_BYTES = 1 << 20


async def upload(
    connection: AsyncConnection,
    run_id: str,
    version: int,
    folder: Path,
    file: ArtifactFile,
    progress: Progress | None,
) -> None:
    """Stream one file of a prepared version to the coordinator."""

    async def content() -> AsyncIterator[bytes]:
        sent = 0
        while part := await run_blocking(read_part, folder / file.name, sent, _PART_BYTES):
            sent += len(part)
            yield part
            if progress:
                progress(file.name, sent, file.size)

    await connection.send(
        "PUT",
        _file_path(run_id, version, file.name),
        content=content,
        content_type="application/octet-stream",
    )


async def download(
    connection: AsyncConnection, run_id: str, policy: PolicyView, folder: Path, progress: Progress | None
) -> None:
    """Fetch the files of `policy` into `folder`, which appears whole and verified, or not at all."""
    check_manifest(policy)
    incoming = IncomingFolder(folder)
    try:
        await run_blocking(incoming.make)
        for file in policy.files:

            def show(count: int, file: ArtifactFile = file) -> None:
                if progress:
                    progress(file.name, count, file.size)

            await connection.receive(
                _file_path(run_id, policy.version, file.name),
                incoming.scratch / file.name,
                size=file.size,
                sha256=file.sha256,
                progress=show,
            )
        await run_blocking(incoming.appear)
    except BaseException:
        await run_blocking(incoming.discard)
        raise


def _file_path(run_id: str, version: int, name: str) -> tuple[str, ...]:
    # Here alone slashes stay: a file's name is the rest of the path, one segment per part.
    return ("runs", run_id, "policies", str(version), "files", *name.split("/"))
