"""The coordinator that a command speaks to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.cli.faults import Failure
from coordinator.cli.output import patience
from coordinator.client import Coordinator, NotConfigured

RETRY_SECONDS = 10.0
"""For so long a call that gets no answer is sent again: a restart of the coordinator is lived through."""
LIVED_THROUGH_SECONDS = 60.0
"""The same for what takes long anyway."""


def coordinator_at(
    data: Path, url: str | None, token: str | None, *, retry_seconds: float | None = None
) -> Coordinator:
    """The coordinator at this address, or the one whose data folder this is."""
    retry_seconds = RETRY_SECONDS if retry_seconds is None else retry_seconds
    os.environ["COORDINATOR_DATA"] = str(data)  # where the client looks for what is not given
    try:
        return Coordinator(url, token, retry_seconds=retry_seconds)
    except NotConfigured as error:
        raise Failure(
            str(error),
            "Give --url and --token, or set COORDINATOR_URL and COORDINATOR_TOKEN; on the coordinator's own machine "
            "--data, or COORDINATOR_DATA, names the folder that has both.",
        ) from error


@contextmanager
def connected(data: Path, url: str | None, token: str | None) -> Iterator[Coordinator]:
    """The coordinator, for calls that are answered soon; it is said if one is not."""
    with coordinator_at(data, url, token) as coordinator, patience(f"waiting for {coordinator.url}"):
        yield coordinator
