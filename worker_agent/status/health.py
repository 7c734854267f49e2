"""Whether a worker lives and whether it works, and in words what is missing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from worker_agent.status.vitals import Vitals

LONGEST_TURN_SECONDS = 300.0
"""More than any turn of the loop takes outside the engine, calls to a coordinator that is away included."""


@dataclass(frozen=True)
class Health:
    """`missing` is empty when all is well."""

    missing: tuple[str, ...]

    @property
    def well(self) -> bool:
        return not self.missing


def alive(vitals: Vitals) -> Health:
    """The loop turned lately, or is inside the engine. Not so: the process hangs and is to be started again."""
    turned = time.monotonic() - vitals.turned_at
    if vitals.in_engine_since is not None or turned <= LONGEST_TURN_SECONDS:
        return Health(())
    return Health(
        (f"the loop has not turned for {turned:.0f} s and is not inside the engine: start this worker again",)
    )


def ready(vitals: Vitals) -> Health:
    """It may generate: registered, the active policy confirmed, the coordinator heard lately, not about to leave."""
    missing: list[str] = []
    if vitals.leaving:
        missing.append("it was told to stop: it hands in what it has, and leaves")
    if not vitals.registered:
        missing.append(
            "not registered with the coordinator yet: it is away, or the engine still starts"
            if vitals.engine_up
            else "not registered with the coordinator yet: the engine still starts"
        )
    else:
        missing += _registered(vitals)
    return Health(tuple(missing))


def _registered(vitals: Vitals) -> list[str]:
    missing: list[str] = []
    if vitals.fenced:
        missing.append("the coordinator has fenced it until it loads and confirms the active version whole")
    if vitals.served_version is None:
        missing.append("the active version is not loaded and confirmed yet")
    silence = vitals.silence_seconds()
    if silence is None or silence > vitals.lost_after_seconds:
        missing.append(
            f"the coordinator has answered no heartbeat for {silence or 0:.0f} s; after "
            f"{vitals.lost_after_seconds:g} s it counts this worker as lost"
        )
    return missing
