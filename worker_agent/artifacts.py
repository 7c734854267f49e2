"""Artifacts on this machine: one folder per artifact hash, verified each time before an engine reads it."""

from __future__ import annotations

import shutil
from collections.abc import Set
from pathlib import Path

from coordinator.client import ArtifactCorrupt, Run
from coordinator.client.artifacts import verify
from coordinator.wire.policies import PolicyView
from worker_agent.logs import event


class ArtifactCache:
    """The artifacts below `folder`, which belongs to one worker. Folders are never changed once they are
    there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*"):  # of a download that a crash cut off
            shutil.rmtree(left)

    def fetch(self, run: Run, policy: PolicyView) -> Path:
        """The folder with the verified files of `policy`, downloaded unless they are there.

        Raises `ArtifactCorrupt`, or what the client raises when it cannot download.
        """
        folder = self._folder / policy.artifact_hash
        if folder.is_dir():
            try:
                verify(folder, policy)
            except ArtifactCorrupt as error:
                event("artifact_damaged_on_disk", artifact_hash=policy.artifact_hash, error=str(error))
                shutil.rmtree(folder)
            else:
                return folder
        run.download(policy.version, folder, artifact_hash=policy.artifact_hash)
        return folder

    def keep_only(self, hashes: Set[str]) -> None:
        """Remove the folders of all other artifacts."""
        for folder in self._folder.iterdir():
            if folder.name not in hashes:
                shutil.rmtree(folder)
