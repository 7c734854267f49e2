"""Artifacts between a folder and the coordinator: hashed and sent, fetched and verified."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from coordinator.client.connection import Connection, Progress
from coordinator.client.errors import ArtifactCorrupt
from coordinator.rules.manifest import artifact_hash, check_file_name
from coordinator.wire.policies import ArtifactFile, PolicyView

_CHUNK_BYTES = 1 << 20


def list_files(folder: Path) -> tuple[ArtifactFile, ...]:
    """The files below `folder` with size (bytes) and sha256, by name.

    Raises ValueError for an empty folder, for a name that other machines could not write, and for anything
    that is neither a file nor a folder; links are followed.
    """
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        if not path.is_file():
            raise ValueError(f"{path} is neither a file nor a folder: an artifact holds plain files")
        name = path.relative_to(folder).as_posix()
        check_file_name(name)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
        files.append(ArtifactFile(name=name, size=size, sha256=digest))
    if not files:
        raise ValueError(f"{folder} holds no files to publish")
    return tuple(files)


def upload(
    connection: Connection,
    run_id: str,
    version: int,
    folder: Path,
    file: ArtifactFile,
    progress: Progress | None,
) -> None:
    """Stream one file of a prepared version to the coordinator."""

    def content() -> Iterator[bytes]:
        sent = 0
        with (folder / file.name).open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                sent += len(chunk)
                yield chunk
                if progress:
                    progress(file.name, sent, file.size)

    connection.send(
        "PUT",
        _file_path(run_id, version, file.name),
        content=content,
        content_type="application/octet-stream",
    )


def download(connection: Connection, run_id: str, policy: PolicyView, folder: Path, progress: Progress | None) -> None:
    """Fetch the files of `policy` into `folder`, which appears whole and verified, or not at all."""
    _check_manifest(policy)
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: an artifact is written once, into a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, since a rename is atomic only within one file system.
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for file in policy.files:
            into = scratch / file.name
            into.parent.mkdir(parents=True, exist_ok=True)

            def show(count: int, file: ArtifactFile = file) -> None:
                if progress:
                    progress(file.name, count, file.size)

            connection.receive(
                _file_path(run_id, policy.version, file.name),
                into,
                size=file.size,
                sha256=file.sha256,
                progress=show,
            )
        for path in (scratch, *(below for below in scratch.rglob("*") if below.is_dir())):
            _sync_folder(path)
        scratch.chmod(0o755)
        scratch.rename(folder)
        _sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def verify(folder: Path, policy: PolicyView) -> None:
    """Check that `folder` holds exactly the files of `policy`. Raises `ArtifactCorrupt`, naming the first
    fault."""
    _check_manifest(policy)
    try:
        found = {file.name: file for file in list_files(folder)}
    except ValueError as error:
        raise ArtifactCorrupt(str(error)) from error
    expected = {file.name: file for file in policy.files}
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise ArtifactCorrupt(f"{folder} lacks {name}")
        if name not in expected:
            raise ArtifactCorrupt(f"{folder} holds {name}, which the manifest does not know")
        if found[name] != expected[name]:
            raise ArtifactCorrupt(
                f"{name} is not the file that the manifest names: {found[name]}, not {expected[name]}"
            )


def _check_manifest(policy: PolicyView) -> None:
    if policy.kind == "base":
        raise ValueError(f"version {policy.version} is the base model itself and has no files")
    try:
        computed = artifact_hash(
            policy.kind, policy.base_model.model_dump(), [file.model_dump() for file in policy.files]
        )
    except ValueError as error:
        raise ArtifactCorrupt(f"the manifest of version {policy.version} cannot be right: {error}") from error
    if computed != policy.artifact_hash:
        raise ArtifactCorrupt(
            f"the manifest of version {policy.version} has hash {computed}, not {policy.artifact_hash}"
        )


def _file_path(run_id: str, version: int, name: str) -> tuple[str, ...]:
    # Here alone slashes stay: a file's name is the rest of the path, one segment per part.
    return ("runs", run_id, "policies", str(version), "files", *name.split("/"))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
