"""Where the experiment's models are, and how one that is missing is fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

from worker_agent.closure.profile import ClosureError, Profile
from worker_agent.models import ModelError, smollm2, smollm2_folder

_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")


def find(profile: Profile) -> Path | None:
    """The model's folder, None while it is not in the cache. Asks no other machine."""
    if profile.repository is None:
        folder = smollm2_folder()
        return folder if folder.is_dir() else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                profile.repository, revision=profile.revision, allow_patterns=list(_FILES), local_files_only=True
            )
        )
    except LocalEntryNotFoundError:
        return None
    # Of a download that broke off there are the small files already.
    return folder if any(folder.glob("*.safetensors")) else None


def fetch(profile: Profile, progress: Callable[[str], None]) -> Path:
    """Bring the pinned model into the cache and return its folder. Raises `ClosureError` where that fails."""
    try:
        if profile.repository is None:
            return smollm2(progress)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        progress(f"fetches {profile.repository} at {profile.revision}")
        try:
            return Path(snapshot_download(profile.repository, revision=profile.revision, allow_patterns=list(_FILES)))
        except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
            raise ClosureError(f"{profile.repository} cannot be fetched: {error}") from error
    except ModelError as error:
        raise ClosureError(str(error)) from error
