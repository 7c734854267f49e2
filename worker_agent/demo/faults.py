"""What the demo does wrong on purpose, through the plain client: a worker of its own that has no engine.

It copies rollouts of the real workers and sends them as they must not be sent, and it confirms a version with a
wrong hash. Everything it sends is named as a copy, and the trainer never trains on those.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.client import Run, Worker
from coordinator.wire.policies import PolicyRef, Watch
from coordinator.wire.rollouts import ArrivalVerdict, Generation, Rollout, RolloutView, Span

PROBE = "probe"
SHIFT = -1.0  # of the log-probs of the disturbed copy, natural log
WRONG_HASH = hashlib.sha256(b"not the weights that were asked for").hexdigest()
_COPIES, _LATE = "copies-disturbed", "copies-late"
_BEAT_SECONDS = 0.5
_HOLD_SECONDS = 1.0  # between the last ack of the others and the right one, to show that nothing moves


class Stopped(Exception):
    """The demo ends before the probe was through."""


def is_copy(group_id: str) -> bool:
    """Whether the probe made this group."""
    return group_id in (_COPIES, _LATE)


@dataclass
class Sent:
    """What the probe sent, for the summary to look up: ids, and the coordinator's answers to the second sending."""

    copies: list[str] = field(default_factory=list)
    disturbed: str = ""
    second_answers: list[ArrivalVerdict] = field(default_factory=list)
    stale: str = ""
    never_acked: str = ""


class Probe:
    """The worker without an engine. `workers` are the real ones; `say` gets a line for each thing done."""

    def __init__(self, run: Run, workers: Sequence[str], say: Callable[[str], None]) -> None:
        self.sent = Sent()
        self._run = run
        self._workers = frozenset(workers)
        self._say = say
        self._stopping = threading.Event()
        self._worker: Worker = run.worker(PROBE, f"{PROBE}-{run.id}")
        self._contract = run.view().contract

    def register(self) -> None:
        """Become a worker that activations wait for, confirm the first version, and take a ticket for one group.

        The ticket makes room for the copies among the groups that the next two updates take.
        """
        self._worker.register("none", "0")
        active = self._run.view().active
        self._worker.ack(active.version, active.artifact_hash)
        self._worker.tickets([_COPIES])

    def stop(self) -> None:
        """Make `play` raise `Stopped` at its next look."""
        self._stopping.set()

    def play(self) -> None:
        """All of it, in order; returns when the last of it was refused. After `register`."""
        originals = self._whole_group()
        self._disturb_and_repeat(originals)
        first = self._wrong_ack()
        self._worker.drain()
        self._say(f"probe: drains, so that no later activation waits for it; it never acks version {first.version + 1}")
        self._too_late(originals, first.version + 1)
        self._worker.deregister()

    def _disturb_and_repeat(self, originals: list[RolloutView]) -> None:
        copies = [self._copy(original, _COPIES) for original in originals]
        shifted = [p if p is None else p + SHIFT for p in copies[0].behavior_log_probs]
        copies[0] = copies[0].model_copy(update={"behavior_log_probs": shifted})
        self.sent.copies = [copy.rollout_id for copy in copies]
        self.sent.disturbed = copies[0].rollout_id
        self._run.submit(copies)
        self.sent.second_answers = self._run.submit(copies).verdicts
        self._say(f"probe: sent copies of {originals[0].group_id} twice, one with its log-probs shifted by {SHIFT}")

    def _wrong_ack(self) -> PolicyRef:
        """Confirm the first candidate with a wrong hash, and rightly once everybody else has confirmed it."""
        candidate = self._beat_until(lambda watch: watch.candidate is not None).candidate
        assert candidate is not None
        self._worker.ack(candidate.version, WRONG_HASH)
        self._say(f"probe: acked version {candidate.version} with a wrong hash; it cannot become active now")
        self._beat_until(lambda _: self._others_confirmed(candidate.activation_id))
        self._stopping.wait(_HOLD_SECONDS)
        held = self._run.activation(candidate.activation_id)
        self._say(f"probe: the others have acked, activation {held.activation_id} is still {held.state}; acks rightly")
        self._worker.ack(candidate.version, candidate.artifact_hash)
        return PolicyRef(version=candidate.version, artifact_hash=candidate.artifact_hash)

    def _others_confirmed(self, activation_id: str) -> bool:
        required = self._run.activation(activation_id).required
        return all(worker.ack == "matching" for worker in required if worker.worker_id != PROBE)

    def _too_late(self, originals: list[RolloutView], version: int) -> None:
        """Once `version` is active: one rollout of the first version, and one stamped with `version` itself."""
        active = self._beat_until(lambda watch: watch.active.version >= version).active
        stale = self._copy(originals[0], _LATE)
        never_acked = self._copy(originals[1], _LATE, active)
        self.sent.stale, self.sent.never_acked = stale.rollout_id, never_acked.rollout_id
        self._run.submit([stale, never_acked])
        self._say(f"probe: under version {active.version}, sent a rollout of version {stale.spans[0].version} "
                  f"and one stamped {active.version}, which it never acked")  # fmt: skip

    def _whole_group(self) -> list[RolloutView]:
        """The first group of a real worker whose members all have a reward, by sample index."""
        found: list[RolloutView] = []

        def look(_: Watch) -> bool:
            groups: defaultdict[str, list[RolloutView]] = defaultdict(list)
            for rollout in self._run.rollouts(state="rewarded"):
                if rollout.worker_id in self._workers:
                    groups[rollout.group_id].append(rollout)
            size = self._run.view().settings.group_size
            found[:] = next((members for members in groups.values() if len(members) == size), [])
            return bool(found)

        self._beat_until(look)
        return sorted(found, key=lambda rollout: rollout.sample_index)

    def _copy(self, original: RolloutView, group_id: str, policy: PolicyRef | None = None) -> Rollout:
        """The tokens of `original` as this worker's own, stamped with its policy or another."""
        evidence = self._run.evidence(original.rollout_id)
        spans = original.spans
        if policy is not None:
            spans = tuple(
                Span(version=policy.version, artifact_hash=policy.artifact_hash, start=span.start, end=span.end)
                for span in spans
            )
        return Rollout(
            rollout_id=f"{group_id}:{original.sample_index}.0",
            task_id=original.task_id,
            task_source=original.task_source,
            group_id=group_id,
            sample_index=original.sample_index,
            spans=spans,
            span_source="dispatch",
            worker_id=PROBE,
            incarnation=self._worker.incarnation,
            contract=self._contract,
            generation=Generation(engine="none"),
            token_ids=evidence.token_ids,
            action_mask=evidence.action_mask,
            behavior_log_probs=evidence.behavior_log_probs,
        )

    def _beat_until(self, holds: Callable[[Watch], bool]) -> Watch:
        """Heartbeats, until what the coordinator says satisfies `holds`."""
        while not self._stopping.is_set():
            watch = self._worker.heartbeat()
            if holds(watch):
                return watch
            self._stopping.wait(_BEAT_SECONDS)
        raise Stopped
