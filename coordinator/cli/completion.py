"""What a shell completes beside commands and options."""

from __future__ import annotations

import os


def run_ids(incomplete: str) -> list[str]:
    """Ids of runs that begin so; none where the coordinator of the environment does not answer at once."""
    from coordinator.client import Coordinator, CoordinatorError

    try:
        with Coordinator(os.environ.get("COORDINATOR_URL"), timeout_seconds=1, retry_seconds=0) as coordinator:
            return [run.run_id for run in coordinator.runs() if run.run_id.startswith(incomplete)]
    except CoordinatorError:
        return []  # a shell that completes has no place for the reason
