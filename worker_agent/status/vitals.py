"""What a worker has done and does now, written down by those who do it and read by those who ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.wire.rollouts import Rollout

VERDICTS = ("accepted", "duplicate", "conflict", "rejected", "refused")
"""What the coordinator may answer for a rollout; `refused`: its call was, with that rollout alone in it."""
LOADS = (
    "confirmed",
    "ack_mismatched",
    "policy_download_failed",
    "policy_verify_failed",
    "policy_load_failed",
    "artifact_not_there_yet",
    "coordinator_unreachable",
)
"""How an attempt to take up a policy may end."""
_FENCING = frozenset({"ack_mismatched", "policy_download_failed", "policy_verify_failed", "policy_load_failed"})


@dataclass
class Loads:
    """Attempts to take up a policy that ended in one way, and the seconds that they took together."""

    count: int = 0
    seconds: float = 0.0


@dataclass
class Vitals:
    """Totals since the start of the process, and the present. Times are on the monotonic clock, None: not yet.

    Any thread may write; each value is read by itself.
    """

    rollouts_generated: int = 0
    tokens_generated: int = 0
    rollouts_spooled: int = 0
    rollouts_delivered: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VERDICTS, 0))
    rollouts_rejected: int = 0
    loads: dict[str, Loads] = field(default_factory=lambda: {result: Loads() for result in LOADS})

    groups_in_flight: int = 0
    served_version: int | None = None
    """The active version, once the engine has it and the coordinator has taken the ack."""
    registered: bool = False
    lost_after_seconds: float = 0.0
    """Silence after which the coordinator counts this worker as lost."""
    heard_at: float | None = None
    """When the coordinator last answered a heartbeat."""
    fenced: bool = False
    leaving: bool = False
    engine_up: bool = False
    """Whether the engine is there and its last call did not fail."""
    asleep_until: float = 0.0
    turned_at: float = field(default_factory=time.monotonic)
    """When the agent's loop last began anew."""
    in_engine_since: float | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def in_engine(self) -> Iterator[None]:
        """Around what uses the engine, which may take its time."""
        outer, self.in_engine_since = self.in_engine_since, self.in_engine_since or time.monotonic()
        try:
            yield
        finally:
            self.in_engine_since = outer
            self.turned_at = time.monotonic()

    def turned(self, served_version: int | None) -> None:
        """The loop begins anew; `served_version` is the active one if it is loaded and confirmed."""
        self.turned_at = time.monotonic()
        self.served_version = served_version

    def register(self, lost_after_seconds: float) -> None:
        """The coordinator has taken this process for the worker."""
        self.lost_after_seconds = lost_after_seconds
        self.heard()
        self.registered = True

    def heard(self) -> None:
        """The coordinator answered a heartbeat."""
        self.heard_at = time.monotonic()

    def generated(self, rollouts: Sequence[Rollout]) -> None:
        """The engine made these."""
        with self._lock:
            self.rollouts_generated += len(rollouts)
            self.tokens_generated += sum(sum(rollout.action_mask) for rollout in rollouts)

    def spooled(self, rollouts: int) -> None:
        """So many are on disk."""
        with self._lock:
            self.rollouts_spooled += rollouts

    def delivered(self, verdicts: Mapping[str, int]) -> None:
        """The coordinator answered for so many, by verdict."""
        with self._lock:
            for verdict, count in verdicts.items():
                self.rollouts_delivered[verdict] = self.rollouts_delivered.get(verdict, 0) + count

    def rejected(self) -> None:
        """One was put aside."""
        with self._lock:
            self.rollouts_rejected += 1

    def load_ended(self, result: str, seconds: float) -> None:
        """An attempt to take up a policy ended after `seconds` with `result`, one of `LOADS`."""
        with self._lock:
            # Set, not looked up: a worker is not to end over a name that is missing above.
            ended = self.loads.setdefault(result, Loads())
            ended.count += 1
            ended.seconds += seconds
        if result == "confirmed":
            self.fenced, self.engine_up = False, True
        elif result in _FENCING:
            self.fenced = True

    def silence_seconds(self) -> float | None:
        """Since the coordinator last answered a heartbeat."""
        return None if self.heard_at is None else time.monotonic() - self.heard_at

    def asleep_seconds(self) -> float:
        """How long the engine still sleeps, 0 when it is awake."""
        return max(0.0, self.asleep_until - time.monotonic())
