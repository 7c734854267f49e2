"""The artifact store: files under their sha256, so that the same bytes are kept once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

CHUNK = 1 << 20
SPARE_BYTES = 64 << 20
"""Room that an upload must leave on the disk."""

ABANDONED_SECONDS = 3600
"""An upload that wrote nothing for so long was cut off by a kill; another replica's live one is never that old."""


class WrongContentError(ValueError):
    """The bytes are not the ones that were announced."""


class NoSpaceError(OSError):
    """The disk has no room for the file."""


class ArtifactStore:
    """A folder of files named by their sha256. A file is there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        for partial in self.folder.glob("upload-*"):
            with contextlib.suppress(FileNotFoundError):  # another replica starts too
                if partial.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                    partial.unlink()

    def path(self, sha256: str) -> Path:
        """Where a file with this hash is, if it is there."""
        return self.folder / sha256[:2] / sha256

    def has(self, sha256: str, size: int) -> bool:
        """Whether the file is there with its size."""
        try:
            return self.path(sha256).stat().st_size == size
        except FileNotFoundError:
            return False

    def is_intact(self, sha256: str) -> bool:
        """Reads the whole file again and compares. Blocks: run it in a thread."""
        try:
            with self.path(sha256).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == sha256
        except FileNotFoundError:
            return False

    async def put(self, sha256: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        """Stores a file as it streams in, synced to disk before this returns.

        WrongContentError if size or hash differ, NoSpaceError if the disk has no room; nothing stays then.
        """
        if shutil.disk_usage(self.folder).free < size + SPARE_BYTES:
            raise NoSpaceError(f"{size} bytes do not fit on the disk of the artifact store")
        digest, received = hashlib.sha256(), 0
        handle, name = tempfile.mkstemp(prefix="upload-", dir=self.folder)
        partial = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                async for chunk in chunks:
                    received += len(chunk)
                    if received > size:
                        raise WrongContentError(f"more than the announced {size} bytes came")
                    digest.update(chunk)
                    await asyncio.to_thread(file.write, chunk)
                if received != size:
                    raise WrongContentError(f"{received} bytes came, {size} were announced")
                if digest.hexdigest() != sha256:
                    raise WrongContentError(f"the bytes have sha256 {digest.hexdigest()}, {sha256} was announced")
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            await asyncio.to_thread(self._keep, partial, sha256)
        finally:
            await asyncio.to_thread(partial.unlink, missing_ok=True)

    def _keep(self, partial: Path, sha256: str) -> None:
        """Gives a whole file its name, so that it is there after a crash."""
        target = self.path(sha256)
        target.parent.mkdir(exist_ok=True)
        partial.replace(target)
        for folder in (target.parent, self.folder):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
