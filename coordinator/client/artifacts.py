"""Artifacts on this machine's disk: listed and hashed, received and verified. Everything here blocks."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from coordinator.client.errors import ArtifactCorrupt
from coordinator.rules.manifest import artifact_hash, check_file_name
from coordinator.wire.policies import ArtifactFile, PolicyView

_PIECE_BYTES = 1 << 20


def file_names(folder: Path) -> list[str]:
    """The names of the files below `folder`, in the order of a manifest.

    Raises ValueError for an empty folder, for a name that other machines could not write, and for anything
    that is neither a file nor a folder; links are followed.
    """
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        if not path.is_file():
            raise ValueError(f"{path} is neither a file nor a folder: an artifact holds plain files")
        name = path.relative_to(folder).as_posix()
        check_file_name(name)
        names.append(name)
    if not names:
        raise ValueError(f"{folder} holds no files to publish")
    return names


def describe(folder: Path, name: str, advanced: Callable[[int], None] = lambda _: None) -> ArtifactFile:
    """One file of `folder` with its size (bytes) and sha256. `advanced` is told the bytes of each piece read."""
    digest, size = hashlib.sha256(), 0
    with (folder / name).open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
            advanced(len(piece))
    return ArtifactFile(name=name, size=size, sha256=digest.hexdigest())


def read_part(path: Path, offset: int, count: int) -> bytes:
    """Up to `count` bytes of a file from `offset` on; empty at its end."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(count)


def open_at(uri: str, name: str) -> BinaryIO:
    """A file in the folder that a URI names, for reading, by whatever fsspec has a filesystem for."""
    import fsspec  # on first use: most artifacts lie at the coordinator

    filesystem, root = fsspec.core.url_to_fs(uri)
    return cast(BinaryIO, filesystem.open(f"{root}/{name}", "rb"))


def verify(folder: Path, policy: PolicyView) -> None:
    """Check that `folder` holds exactly the files of `policy`. Raises `ArtifactCorrupt`, naming the first
    fault."""
    check_manifest(policy)
    try:
        found = {name: describe(folder, name) for name in file_names(folder)}
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


def check_manifest(policy: PolicyView) -> None:
    """Raises ValueError where `policy` has no files, `ArtifactCorrupt` where its hash is not its manifest's."""
    if policy.kind == "base":
        raise ValueError(f"version {policy.version} is the base model itself and has no files")
    if policy.kind == "stream":
        raise ValueError(f"version {policy.version} was pushed to the engines and left no files")
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


class IncomingFile:
    """A file of known size (bytes) and hash while it is received into `path`, perhaps over several connections.

    `count` is the bytes so far. Leaving the `with` closes it.
    """

    def __init__(self, path: Path, file: ArtifactFile) -> None:
        self._path = path
        self._name = file.name
        self.size = file.size
        self._sha256 = file.sha256
        self._digest = hashlib.sha256()
        self.count = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> IncomingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, chunk: bytes) -> int:
        """Write on, and answer the bytes so far. Raises `ArtifactCorrupt` before it writes more than `size`."""
        self.count += len(chunk)
        if self.count > self.size:
            raise ArtifactCorrupt(f"{self._name} is longer than the {self.size} bytes of its manifest")
        self._digest.update(chunk)
        self._opened().write(chunk)
        return self.count

    def restart(self) -> None:
        """Forget what was received: it comes again from the beginning."""
        self._opened().truncate(0)
        self._opened().seek(0)
        self._digest = hashlib.sha256()
        self.count = 0

    def finish(self) -> None:
        """Put it on disk and check it. Raises `ArtifactCorrupt` where size or hash is another."""
        file = self._opened()
        file.flush()
        os.fsync(file.fileno())
        if self.count != self.size or self._digest.hexdigest() != self._sha256:
            raise ArtifactCorrupt(
                f"{self._name} is {self.count} bytes with sha256 {self._digest.hexdigest()}; "
                f"the manifest says {self.size} bytes with {self._sha256}"
            )

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
        return self._file


class IncomingFolder:
    """A folder while its files are received into `scratch`: it appears whole, or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scratch: Path | None = None

    @property
    def scratch(self) -> Path:
        """Where its files belong until it is whole."""
        assert self._scratch is not None, "made by `make`"
        return self._scratch

    def make(self) -> None:
        """Make the place for its files. Raises FileExistsError where the folder is there already."""
        if self._folder.exists():
            raise FileExistsError(f"{self._folder} is there already: an artifact is written once, into a new folder")
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, since a rename is atomic only within one file system.
        self._scratch = Path(tempfile.mkdtemp(prefix=f".{self._folder.name}-", dir=self._folder.parent))

    def appear(self) -> None:
        """Give it its name, for good."""
        for path in (self.scratch, *(below for below in self.scratch.rglob("*") if below.is_dir())):
            _sync_folder(path)
        self.scratch.chmod(0o755)
        self.scratch.rename(self._folder)
        _sync_folder(self._folder.parent)

    def discard(self) -> None:
        """Remove what was received; nothing is left where it had appeared."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
