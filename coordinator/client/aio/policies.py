"""Artifacts between a folder and the coordinator: sent and fetched, from where it broke off, and verified."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from coordinator.client.aio.connection import AsyncConnection, Progress
from coordinator.client.aio.pace import run_blocking, sleep
from coordinator.client.artifacts import IncomingFile, IncomingFolder, check_manifest, describe, open_at, read_part
from coordinator.client.errors import ArtifactCorrupt, Refused
from coordinator.client.slow import Slow
from coordinator.wire.policies import ArtifactFile, PolicyView

_PART_BYTES = 1 << 20
_BUSY_SECONDS = 1.0
_CHECKED_BYTES_A_SECOND = 25e6
"""At least so fast the coordinator reads again what had arrived of a file before it was broken off."""


async def described(folder: Path, names: Sequence[str]) -> list[ArtifactFile]:
    """The manifest's entries of these files of a folder."""
    total = sum([(await run_blocking((folder / name).stat)).st_size for name in names])
    slow, done = Slow(f"{folder} is hashed", total), 0

    def advanced(count: int) -> None:
        nonlocal done
        done += count
        slow.at(done)

    return [await run_blocking(describe, folder, name, advanced) for name in names]


async def upload(
    connection: AsyncConnection,
    run_id: str,
    version: int,
    folder: Path,
    file: ArtifactFile,
    progress: Progress | None,
) -> None:
    """Bring one file of a prepared version to the coordinator, as far as it is not there already."""
    slow = Slow(f"{file.name} is uploaded", file.size)
    resumed = False

    def show(count: int) -> None:
        slow.at(count)
        if progress:
            progress(file.name, count, file.size)

    async def content(offset: int) -> AsyncIterator[bytes]:
        nonlocal resumed
        resumed = resumed or offset > 0
        sent = offset
        while part := await run_blocking(read_part, folder / file.name, sent, _PART_BYTES):
            sent += len(part)
            yield part
            show(sent)

    while True:
        try:
            there = await connection.send_file(
                _file_path(run_id, version, "uploads", file.name),
                _file_path(run_id, version, "files", file.name),
                content,
                longest_check_seconds=file.size / _CHECKED_BYTES_A_SECOND,
            )
        except Refused as refused:
            if refused.code == "artifact_file_mismatch" and resumed:
                resumed = False  # what had arrived earlier was damaged by a crash, and is gone now
            elif refused.code not in ("upload_busy", "upload_offset"):
                raise
        else:
            if there.stored:
                show(file.size)
                return
            if not there.busy:
                raise ValueError(f"{folder / file.name} has become shorter while it was uploaded")
            slow.at(there.received)
        await sleep(_BUSY_SECONDS)


async def download(
    connection: AsyncConnection, run_id: str, policy: PolicyView, folder: Path, progress: Progress | None
) -> None:
    """Fetch the files of `policy` into `folder`, which appears whole and verified, or not at all."""
    check_manifest(policy)
    incoming = IncomingFolder(folder)
    slow = Slow(f"version {policy.version} is downloaded", sum(file.size for file in policy.files))
    before = 0
    try:
        await run_blocking(incoming.make)
        for file in policy.files:

            def show(count: int, file: ArtifactFile = file, before: int = before) -> None:
                slow.at(before + count)
                if progress:
                    progress(file.name, count, file.size)

            with IncomingFile(incoming.scratch / file.name, file) as received:
                if policy.uri is None:
                    path = _file_path(run_id, policy.version, "files", file.name)
                    await connection.receive(path, received, show)
                else:
                    await _copy(policy.uri, received, file, show)
            before += file.size
        await run_blocking(incoming.appear)
    except BaseException:
        await run_blocking(incoming.discard)
        raise


async def _copy(uri: str, received: IncomingFile, file: ArtifactFile, show: Callable[[int], None]) -> None:
    """Read one file where it lies. What cannot be read there is `ArtifactCorrupt` by its name."""
    try:
        source = await run_blocking(open_at, uri, file.name)
    except FileNotFoundError as error:
        raise ArtifactCorrupt(f"{file.name} is not at {uri}") from error
    with source:
        while part := await run_blocking(source.read, _PART_BYTES):
            show(await run_blocking(received.write, part))
    await run_blocking(received.finish)


def _file_path(run_id: str, version: int, what: str, name: str) -> tuple[str, ...]:
    # Here alone slashes stay: a file's name is the rest of the path, one segment per part.
    return ("runs", run_id, "policies", str(version), what, *name.split("/"))
