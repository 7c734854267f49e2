"""Uploads under way: what came of a file so far, so that one that was broken off goes on at the byte it reached.

Each is a file `upload-SHA256~RUN~TOKEN` beside the whole ones, as long as what came, on a disk that replicas may share.
Who writes to it holds its `flock`, so that two never write to one file; a crash lets go of it. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

SPARE_BYTES = 64 << 20
"""Room that an upload must leave on the disk."""

SILENT_SECONDS = 10.0
"""A writer that wrote nothing for so long does not keep others from going on."""

ABANDONED_SECONDS = 3600
"""An upload that wrote nothing for so long is removed."""

SYNC_BYTES = 64 << 20
"""So much at most waits in memory for the disk."""

_PREFIX = "upload-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoSpaceError(OSError):
    """The disk has no room for the file."""


class UploadBusyError(RuntimeError):
    """Another request is writing to the upload at this moment."""


class UploadOffsetError(ValueError):
    """The bytes begin beyond what is here: `received` bytes are."""

    def __init__(self, received: int) -> None:
        super().__init__(f"{received} bytes of the file are here")
        self.received = received


class Upload:
    """A file that is being received, by one writer alone. `received` bytes of it are there."""

    def __init__(self, path: Path, descriptor: int, received: int) -> None:
        self.path = path
        self.received = received
        self._descriptor = descriptor
        self._unsynced = 0
        self._digest = hashlib.sha256() if received == 0 else None

    def write(self, data: bytes) -> None:
        """Adds bytes. NoSpaceError if the disk takes no more."""
        try:
            left = memoryview(data)
            while left:
                written = os.pwrite(self._descriptor, left, self.received)
                if self._digest is not None:
                    self._digest.update(left[:written])
                left = left[written:]
                self.received += written
                self._unsynced += written
            if self._unsynced >= SYNC_BYTES:
                self.sync()
        except OSError as error:
            if error.errno in _FULL:
                raise NoSpaceError(f"the disk took {self.received} bytes of the file and no more") from error
            raise

    def sync(self) -> None:
        """What was written is on disk afterwards."""
        os.fdatasync(self._descriptor)
        self._unsynced = 0

    def hexdigest(self) -> str | None:
        """The sha256 of all of it; none where it began before this request, and has to be read again."""
        return None if self._digest is None else self._digest.hexdigest()

    def rename(self, target: Path) -> None:
        """Gives the whole file its name. UploadOffsetError if it was removed meanwhile."""
        try:
            self.path.replace(target)
        except FileNotFoundError as error:
            raise UploadOffsetError(0) from error

    def discard(self) -> None:
        """Nothing of it stays."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of it; what was written stays for whoever goes on."""
        os.close(self._descriptor)


def received(folder: Path, run_id: str, sha256: str) -> tuple[int, bool]:
    """How many bytes of a file that a run is uploading are here, and whether somebody is sending more."""
    longest, busy = 0, False
    for path in _existing(_paths(folder, run_id, sha256)):
        descriptor = _lock(path)
        if descriptor is None:
            busy = busy or _is_written_to(path)
        else:
            os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            longest = max(longest, path.stat().st_size)
    return longest, busy


def begin(folder: Path, run_id: str, sha256: str, size: int, offset: int) -> Upload:
    """Goes on with an upload at `offset`, or begins one at 0.

    NoSpaceError if the rest does not fit, UploadOffsetError if less is here, UploadBusyError if another writes to it.
    """
    if shutil.disk_usage(folder).free < size - offset + SPARE_BYTES:
        raise NoSpaceError(f"{size - offset} bytes do not fit on the disk of the artifact store")
    busy: list[Path] = []
    longest = 0
    for path in _existing(_paths(folder, run_id, sha256)):
        descriptor = _lock(path)
        if descriptor is None:
            busy.append(path)
            continue
        length = os.fstat(descriptor).st_size
        longest = max(longest, length)
        if length >= offset:
            os.ftruncate(descriptor, offset)
            os.utime(descriptor)
            return Upload(path, descriptor, offset)
        os.close(descriptor)
    if offset == 0:
        return Upload(*_create(folder, run_id, sha256), 0)
    for path in _existing(busy):
        there = path.stat()
        longest = max(longest, there.st_size)
        if there.st_size >= offset:
            if _is_written_to(path):
                raise UploadBusyError("another request is sending this file")
            return _take_over(path, folder, run_id, sha256, offset)
    raise UploadOffsetError(longest)


def remove_abandoned(folder: Path) -> int:
    """Removes uploads that nobody wrote to for an hour. Answers how many."""
    removed = 0
    for path in _existing(folder.glob(f"{_PREFIX}*")):
        descriptor = _lock(path)
        try:
            # A request that hangs for an hour is as good as gone: its file goes, locked or not.
            if path.exists() and path.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                path.unlink(missing_ok=True)
                removed += 1
        finally:
            if descriptor is not None:
                os.close(descriptor)
    return removed


def _paths(folder: Path, run_id: str, sha256: str) -> Iterator[Path]:
    return folder.glob(f"{_PREFIX}{sha256}~{run_id}~*")  # neither a hash nor a run's id has wildcards or a ~


def _existing(paths: Iterator[Path] | list[Path]) -> list[Path]:
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _is_written_to(path: Path) -> bool:
    try:
        return path.stat().st_mtime > time.time() - SILENT_SECONDS
    except FileNotFoundError:
        return False


def _lock(path: Path) -> int | None:
    """The opened file, locked; none while another has it, or when it has just gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        return None
    os.close(descriptor)
    return None


def _create(folder: Path, run_id: str, sha256: str) -> tuple[Path, int]:
    path = folder / f"{_PREFIX}{sha256}~{run_id}~{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return path, descriptor


def _take_over(silent: Path, folder: Path, run_id: str, sha256: str, offset: int) -> Upload:
    """A copy of what a silent writer had written, since it may wake up and write on into its own file."""
    path, descriptor = _create(folder, run_id, sha256)
    upload = Upload(path, descriptor, 0)
    try:
        with silent.open("rb") as file:
            while upload.received < offset and (part := file.read(min(1 << 20, offset - upload.received))):
                upload.write(part)
        if upload.received < offset:
            raise UploadOffsetError(upload.received)
        silent.unlink(missing_ok=True)
    except BaseException:
        upload.discard()
        upload.close()
        raise
    return upload
