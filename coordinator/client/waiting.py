"""What an activation waits for, in words, and how often a waiting caller says so in the log."""

from __future__ import annotations

import logging

from coordinator.wire.policies import ActivationView

_FIRST_SECONDS = 2.0
_EVERY_SECONDS = 10.0

_log = logging.getLogger("coordinator.client")


def unconfirmed(activation: ActivationView) -> str:
    """The required workers without a matching ack, each with what it said; empty when all have confirmed."""
    said = {"missing": "no ack yet", "mismatched": "mismatched ack"}
    return ", ".join(
        f"{worker.worker_id} ({': '.join(filter(None, (said[worker.ack], worker.detail)))})"
        for worker in activation.required
        if worker.ack != "matching"
    )


def waits_for(activation: ActivationView) -> str:
    """What an activation that has not ended waits for."""
    if activation.state == "waiting":
        return "the activation that is open before it"
    return unconfirmed(activation) or "the artifact's commit, or the switch by hand: every worker has confirmed"


class Waiting:
    """Logs at INFO what one activation waits for: after 2 s, then when it changes, and every 10 s.

    `now` is a monotonic clock's seconds, as is what `next_at` answers.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._said: str | None = None
        self.next_at = now + _FIRST_SECONDS

    def look(self, activation: ActivationView, now: float) -> None:
        """Say it if it is time to."""
        words = waits_for(activation)
        if now < self.next_at and words == (self._said or words):
            return
        self._said = words
        self.next_at = now + _EVERY_SECONDS
        # One that waits for its turn has no deadline yet.
        deadline = activation.deadline_at and f"; its deadline is {activation.deadline_at:%H:%M:%S} UTC"
        _log.info(
            "activation %s of version %d waits for %s (%.0f s so far%s)",
            activation.activation_id,
            activation.version,
            words,
            now - self._began,
            deadline or "",
        )
