"""The artifact store: files under their sha256, so that the same bytes are kept once, over versions and runs.

`AB/ABCD...` is a whole file, `upload-...` one that is under way (see `coordinator.storage.uploads`), `removed-...` one
that is about to go. Several servers may work on one folder. No file is ever held in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

from coordinator.storage import uploads
from coordinator.storage.uploads import NoSpaceError, Upload, UploadBusyError, UploadOffsetError

__all__ = ["ArtifactStore", "NoSpaceError", "UploadBusyError", "UploadOffsetError", "WrongContentError"]

log = logging.getLogger("coordinator.artifacts")

CHUNK = 1 << 20
HASH_BYTES = 4 << 20
"""Read and hashed in one go: some milliseconds, then another file has its turn."""

P = ParamSpec("P")
T = TypeVar("T")


class WrongContentError(ValueError):
    """The bytes are not the ones that were announced."""


class StoreError(RuntimeError):
    """The disk failed. Not an OSError, which would be taken for a database that is away."""


class ArtifactStore:
    """A folder of files named by their sha256. A file is there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_threads()
        self.tidy()

    def _make_threads(self) -> None:
        # Of its own: nothing else waits behind a slow disk, and uploads do not wait behind verification.
        self._disk = ThreadPoolExecutor(4, "artifact-disk")
        self._hashing = ThreadPoolExecutor(2, "artifact-hash")
        self._remote = ThreadPoolExecutor(8, "artifact-remote")

    def close(self) -> None:
        """Ends its threads. It may be used again, as by an app that is started a second time."""
        for threads in (self._disk, self._hashing, self._remote):
            threads.shutdown(wait=False)
        self._make_threads()

    def tidy(self) -> int:
        """Removes uploads that were given up, and what a kill left of a removal. Answers how many uploads. Blocks."""
        try:
            for left in self.folder.glob("removed-*"):
                left.unlink(missing_ok=True)
            return uploads.remove_abandoned(self.folder)
        except OSError as error:
            raise StoreError(f"the artifact store cannot be tidied: {error}") from error

    def path(self, sha256: str) -> Path:
        """Where a file with this hash is, if it is there."""
        return self.folder / sha256[:2] / sha256

    def has(self, sha256: str, size: int) -> bool:
        """Whether the file is there with its size, as a plain file and in this folder."""
        try:
            there = self.path(sha256).lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(there.st_mode) and there.st_size == size and self._is_inside(sha256)

    def open(self, sha256: str) -> BinaryIO:
        """The file, for reading; a removal does not take it away any more. FileNotFoundError where it is not."""
        if not self._is_inside(sha256):
            raise FileNotFoundError(self.path(sha256))
        try:
            descriptor = os.open(self.path(sha256), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):  # not there, or a link
                raise FileNotFoundError(self.path(sha256)) from error
            raise StoreError(f"{sha256} cannot be opened: {error}") from error
        return os.fdopen(descriptor, "rb", buffering=0)

    def received(self, run_id: str, sha256: str) -> tuple[int, bool]:
        """How many bytes of a file that this run is uploading are here, and whether somebody is sending more."""
        return uploads.received(self.folder, run_id, sha256)

    async def on_disk(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs what waits for a disk in a thread, to its end also when this is cancelled."""
        return await _run(self._disk, work, *args, **kwargs)

    async def put(
        self, run_id: str, sha256: str, size: int, chunks: AsyncIterator[bytes], offset: int | None = None
    ) -> int:
        """Receives a file, or from `offset` on a part of one, and answers how many bytes are on disk: `size`, if it is
        stored.

        WrongContentError if size or hash differ, NoSpaceError if the disk has no room; nothing stays then.
        UploadOffsetError or UploadBusyError if it cannot go on there. What came before an interruption stays.
        """
        upload = await self.on_disk(uploads.begin, self.folder, run_id, sha256, size, offset or 0)
        try:
            try:
                await self._receive(upload, size, chunks)
                if upload.received == size:
                    await self._check(upload, sha256)
                    await self.on_disk(self._keep, upload, sha256)
                elif offset is None:
                    raise WrongContentError(f"{upload.received} bytes came, {size} were announced")
                else:
                    await self.on_disk(upload.sync)
            except (WrongContentError, NoSpaceError):
                await self.on_disk(upload.discard)
                raise
            return upload.received
        finally:
            upload.close()

    async def _receive(self, upload: Upload, size: int, chunks: AsyncIterator[bytes]) -> None:
        parts: list[bytes] = []
        waiting = 0
        try:
            async for chunk in chunks:
                if upload.received + waiting + len(chunk) > size:
                    raise WrongContentError(f"more than the announced {size} bytes came")
                parts.append(chunk)
                waiting += len(chunk)
                if waiting >= CHUNK:
                    data, parts, waiting = b"".join(parts), [], 0
                    await self.on_disk(upload.write, data)
        finally:
            if parts:  # what came before the client broke off counts too
                await self.on_disk(upload.write, b"".join(parts))

    async def _check(self, upload: Upload, sha256: str) -> None:
        await self.on_disk(upload.sync)
        found = upload.hexdigest()
        if found is None:
            found, _ = await self.digest(functools.partial(_opened, upload.path))
        if found != sha256:
            raise WrongContentError(f"the bytes have sha256 {found}, {sha256} was announced")

    def _keep(self, upload: Upload, sha256: str) -> None:
        """Gives a whole file its name, so that it is there after a crash."""
        target = self.path(sha256)
        target.parent.mkdir(exist_ok=True)
        if not self._is_inside(sha256):
            raise NoSpaceError(f"{target.parent} leads out of the artifact store")
        upload.rename(target)
        for folder in (target.parent, self.folder):
            sync_folder(folder)

    async def digest(
        self, opened: Callable[[], BinaryIO], advanced: Callable[[int], None] = lambda _: None, *, remote: bool = False
    ) -> tuple[str, int]:
        """The sha256 and the length of a file, read piece by piece, in turns with everybody else who reads.

        `advanced` is told the bytes of each piece; `remote` ones, which may hang, hold up none of this store. Raises
        what opening and reading raise.
        """
        threads = self._remote if remote else self._hashing
        digest, length = hashlib.sha256(), 0
        file = await _run(threads, opened)
        try:
            while True:
                count = await _run(threads, _hash_piece, file, digest)
                if not count:
                    return digest.hexdigest(), length
                length += count
                advanced(count)
        finally:
            with contextlib.suppress(OSError):  # it was only read
                file.close()

    async def is_intact(self, sha256: str, size: int, advanced: Callable[[int], None] = lambda _: None) -> bool:
        """Reads the whole file again and compares. A damaged one is taken out, so that it can be uploaded again."""
        try:
            found: tuple[str, int] | None
            inode = (await self.on_disk(self.path(sha256).lstat)).st_ino
            found = await self.digest(functools.partial(self.open, sha256), advanced)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.error("%s cannot be read: %s", sha256, error)
            found = None
        if found is not None and found[0] == sha256:
            return found[1] == size  # a manifest with another size is wrong, not the file
        log.error("%s is damaged, and is taken out of the artifact store", sha256)
        await self.on_disk(self._take_out, sha256, inode)
        return False

    def _take_out(self, sha256: str, inode: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.path(sha256).lstat().st_ino == inode:  # and not one that was just uploaded in its place
                self.path(sha256).unlink()

    def remove(self, sha256: str) -> None:
        """Takes the file out, at once and however large it is; `tidy` frees its space. Blocks."""
        try:
            self.path(sha256).rename(self.folder / f"removed-{sha256}-{secrets.token_hex(4)}")
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"{sha256} cannot be removed: {error}") from error

    def _is_inside(self, sha256: str) -> bool:
        """Whether the file's folder is this store's own, and no link to elsewhere."""
        return not self.path(sha256).parent.is_symlink()


async def _run(executor: Executor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    # To the end also when cancelled: nobody closes or removes a file that a thread still writes to.
    future = asyncio.get_running_loop().run_in_executor(executor, functools.partial(work, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from future.exception()
    return future.result()


def _opened(path: Path) -> BinaryIO:
    return path.open("rb", buffering=0)


def _hash_piece(file: BinaryIO, digest: hashlib._Hash) -> int:
    piece = file.read(HASH_BYTES)
    digest.update(piece)
    return len(piece)


def sync_folder(folder: Path) -> None:
    """Makes durable what was put into the folder or renamed there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
