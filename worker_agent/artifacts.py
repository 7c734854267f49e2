"""Artifacts on this machine: one folder per artifact hash, verified each time before an engine reads it."""

from __future__ import annotations

import shutil
from collections.abc import Set
from pathlib import Path

from coordinator.client import ArtifactCorrupt, Run
from coordinator.client.artifacts import verify
from coordinator.wire.policies import PolicyView


class ArtifactCache:
    """The artifacts below `folder`, which belongs to one worker. Folders are never changed once they are
    there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*"):  # of a download that a crash cut off
            shutil.rmtree(left)

    def holds(self, policy: PolicyView) -> bool:
        """Whether there is a folder for `policy`; what is in it, `verified` tells."""
        return self._folder_of(policy).is_dir()

    def download(self, run: Run, policy: PolicyView) -> None:
        """Make the folder for `policy`, which appears whole or not at all.

        Raises `ArtifactCorrupt`, or what the client raises when it cannot download.
        """
        run.download(policy.version, self._folder_of(policy), artifact_hash=policy.artifact_hash)

    def verified(self, policy: PolicyView) -> Path:
        """The folder for `policy`, of which every byte was read and agrees with the manifest.

        Raises `ArtifactCorrupt`, naming the file; the folder is gone then, and may be downloaded anew.
        """
        folder = self._folder_of(policy)
        try:
            verify(folder, policy)
        except ArtifactCorrupt:
            shutil.rmtree(folder)
            raise
        except OSError as error:  # a disk that cannot read it back
            shutil.rmtree(folder)
            raise ArtifactCorrupt(f"{folder} cannot be read: {error}") from error
        return folder

    def _folder_of(self, policy: PolicyView) -> Path:
        return self._folder / policy.artifact_hash

    def keep_only(self, hashes: Set[str]) -> None:
        """Remove the folders of all other artifacts."""
        for folder in self._folder.iterdir():
            if folder.name not in hashes:
                shutil.rmtree(folder)
