"""The fleet in memory: one run's versions, workers and activations in plain Python, for the service to be held against.

It is meant to be read and believed. Nothing here knows SQL or locks: a call is a method, a refusal is `Refused`, and
whether a version may become active is what the rule `activate_policy_version` says. Times are ticks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.rules.activation import activate_policy_version
from coordinator.wire.runs import RunSettings
from tests.model.ledger import Answer, Refused

ENDED = ("abandoned", "withdrawn")


@dataclass(frozen=True)
class Digest:
    """What an engine says of the weights in its memory."""

    layout: str
    registered: str
    active: str | None

    def same_weights(self, other: Digest) -> bool:
        """Nothing that both tell differs."""
        told = self.active is not None and other.active is not None
        return self.registered == other.registered and (not told or self.active == other.active)

    def shares_weights(self, other: Digest) -> bool:
        """Something that both tell is the same."""
        return self.registered == other.registered or (self.active is not None and self.active == other.active)


@dataclass
class Version:
    parent: int | None
    clock: int
    artifact_hash: str
    kind: str
    digests: dict[str, str] = field(default_factory=dict)
    state: str = "prepared"
    was_committed: bool = False


@dataclass
class Worker:
    incarnation: str
    draining: bool = False
    deregistered: bool = False
    heard: bool = True
    asleep: bool = False
    fenced: bool = False
    fenced_at: int = 0
    must_ack_active: bool = False
    """It was dropped from an activation, and may serve anything."""

    @property
    def lost(self) -> bool:
        return not self.heard and not self.asleep

    @property
    def state(self) -> str:
        if self.deregistered:
            return "deregistered"
        return "lost" if self.lost else "draining" if self.draining else "asleep" if self.asleep else "live"


@dataclass(frozen=True)
class Ack:
    """The last word of one incarnation about one version."""

    artifact_hash: str
    matching: bool
    digest: Digest | None
    activation: str | None
    """The activation of the version that was open when it was given."""
    at: int


@dataclass
class Activation:
    name: str
    version: int
    asked: tuple[str, ...] | None
    state: str = "waiting"
    required: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    """Who left, and in a word why."""
    reason: str | None = None
    overdue: bool = False


@dataclass
class Rollout:
    version: int
    state: str
    reason: str | None
    judged: int
    """The active version when it arrived."""
    revision: int


class Fleet:
    """One run. Its calls have the names and the order of refusals of the service's."""

    def __init__(self, settings: RunSettings, first_hash: str) -> None:
        self.settings = settings
        self.versions = {0: Version(None, 0, first_hash, "base", state="active", was_committed=True)}
        self.active = 0
        self.stored: set[str] = set()
        """Artifacts whose files were uploaded."""
        self.workers: dict[str, Worker] = {}
        self.lives: set[tuple[str, str]] = set()
        self.acks: dict[tuple[str, str, int], Ack] = {}
        self.activations: dict[str, Activation] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.rollbacks: dict[str, tuple[int, Answer]] = {}
        self.withdrawals: dict[int, Answer] = {}
        self.told: Counter[tuple[str, str]] = Counter()
        """What the journal says of versions and activations."""
        self.switches: list[int] = []
        self.now = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def tell(self, event: str, subject: object) -> None:
        self.told[event, str(subject)] += 1

    # policy versions

    def version(self, number: int) -> Version:
        if number not in self.versions:
            raise Refused("policy_version_unknown")
        return self.versions[number]

    def prepare(
        self, number: int, parent: int, kind: str, artifact_hash: str, digests: dict[str, str]
    ) -> Answer:  # fmt: skip
        known = self.versions.get(number)
        if known is not None:
            if (known.artifact_hash, known.parent, known.digests) != (artifact_hash, parent, digests):
                raise Refused("policy_conflict")
            return known.state, known.clock
        if number <= max(self.versions):
            raise Refused("non_monotonic_version")
        if self.version(parent).state == "withdrawn":
            raise Refused("policy_withdrawn")
        clock = self.versions[parent].clock + number - parent
        self.versions[number] = Version(parent, clock, artifact_hash, kind, digests)
        self.tell("policy.prepared", number)
        return "prepared", clock

    def upload(self, number: int) -> Answer:
        version = self.version(number)
        if version.kind in ("base", "stream"):
            raise Refused("artifact_file_unknown")
        if version.state in ENDED:
            raise Refused("policy_state")
        self.stored.add(version.artifact_hash)
        return ("stored",)

    def commit(self, number: int) -> Answer:
        version = self.version(number)
        if version.state in ENDED:
            raise Refused("policy_state")
        if version.state == "prepared":
            if version.kind in ("lora", "full") and version.artifact_hash not in self.stored:
                raise Refused("artifact_incomplete")
            version.state, version.was_committed = "committed", True
            self.tell("policy.committed", number)
            self._switch_if_ready(number)
        return (version.state,)

    # activations

    def the(self, state: str) -> Activation | None:
        """The one that is open, or that waits."""
        return next((a for a in self.activations.values() if a.state == state), None)

    def _freeze(self, asked: tuple[str, ...] | None) -> list[str]:
        """Those that are named, else whoever can be expected to load and confirm."""
        return sorted(
            name
            for name, w in self.workers.items()
            if not w.deregistered and (name in asked if asked is not None else not (w.draining or w.fenced or w.lost))
        )

    def open_activation(self, name: str, number: int, asked: tuple[str, ...] | None, supersede: bool) -> Answer:
        asked = None if asked is None else tuple(sorted(set(asked)))
        known = self.activations.get(name)
        if known is not None:
            if (known.version, known.asked) != (number, asked):
                raise Refused("activation_conflict")
            return known.state, tuple(known.required)
        if self.version(number).state not in ("prepared", "committed"):
            raise Refused("policy_state")
        if number <= self.active:
            raise Refused("non_monotonic_version")
        opened, waiting = self.the("open"), self.the("waiting")
        if any(other is not None and number <= other.version for other in (opened, waiting)):
            raise Refused("activation_open")
        if any(worker not in self.workers or self.workers[worker].deregistered for worker in asked or ()):
            raise Refused("worker_unknown")
        waits = opened is not None and not supersede
        if not waits and not self._freeze(asked):
            raise Refused("no_required_workers")
        for other in (waiting, opened if supersede else None):
            if other is not None:
                self._end(other, "superseded")
                self._abandon(other.version)
        self.activations[name] = activation = Activation(name, number, asked)
        if waits:
            self.tell("activation.waiting", name)
        else:
            self._begin(activation)
        return activation.state, tuple(activation.required)

    def _begin(self, activation: Activation) -> bool:
        activation.required = self._freeze(activation.asked)
        if activation.required:
            activation.state = "open"
            self.tell("activation.opened", activation.name)
        return bool(activation.required)

    def _open_waiting(self) -> None:
        """The set is that of the moment at which its turn comes."""
        waiting = self.the("waiting")
        if waiting is not None and not self._begin(waiting):
            self._end(waiting, "failed", "no_required_workers")

    def _abandon(self, number: int) -> None:
        if self.versions[number].state in ("prepared", "committed"):
            self.versions[number].state = "abandoned"

    def _end(self, activation: Activation, state: str, reason: str | None = None) -> int:
        """Without the switch: what was made with the candidate is quarantined. How many rollouts."""
        activation.state, activation.reason = state, reason
        self.tell(f"activation.{state}", activation.name)
        return self._quarantine([activation.version], "candidate_not_activated")

    def _fail(self, activation: Activation, reason: str) -> int:
        quarantined = self._end(activation, "failed", reason)
        self._open_waiting()
        return quarantined

    def said(self, activation: Activation, worker: str) -> str:
        """What a required worker said to this activation: in this life, and not before it was fenced."""
        w = self.workers[worker]
        ack = self.acks.get((worker, w.incarnation, activation.version))
        if ack is None or ack.activation != activation.name:
            return "missing"
        if not ack.matching:
            return "mismatched"
        return "missing" if w.fenced or ack.at < w.fenced_at else "matching"

    def _verdict(self, activation: Activation) -> tuple[bool, str, tuple[str, ...], tuple[str, ...]]:
        version = self.versions[activation.version]
        states = {
            "missing": None,
            "mismatched": {"version": activation.version},
            "matching": {"version": activation.version, "artifact_hash": version.artifact_hash},
        }
        decided = activate_policy_version(
            {"version": self.active, "artifact_hash": self.versions[self.active].artifact_hash},
            {
                "version": activation.version,
                "artifact_hash": version.artifact_hash,
                "committed": version.state == "committed",
            },
            {worker: states[self.said(activation, worker)] for worker in activation.required},
            activation.required,
        )
        missing, mismatched = decided["missing_workers"], decided["mismatched_workers"]
        return decided["activated"], decided["reason"], tuple(missing), tuple(mismatched)

    def _switch(self, activation: Activation) -> None:
        if self.versions[self.active].state == "active":
            self.versions[self.active].state = "retired"
        self.active = activation.version
        self.versions[self.active].state = "active"
        activation.state = "succeeded"
        self.switches.append(self.active)
        self._open_waiting()

    def _switch_if_ready(self, number: int) -> Answer | None:
        """(activated, reason, waits for hand, missing, mismatched, active) if an activation of the version is open."""
        activation = self.the("open")
        if activation is None or activation.version != number:
            return None
        ready, reason, missing, mismatched = self._verdict(activation)
        by_hand = self.settings.activation == "by_hand"
        if ready and not by_hand:
            self._switch(activation)
        return ready and not by_hand, reason, ready and by_hand, missing, mismatched, self.active

    def activate(self, number: int) -> Answer:
        found = [a for a in self.activations.values() if a.version == number]
        if not found:
            raise Refused("activation_unknown")
        activation = next((a for a in found if a.state in ("open", "waiting")), found[-1])
        if activation.state == "succeeded":
            return True, "activated", False, (), (), self.active
        if activation.state != "open":
            raise Refused("activation_open" if activation.state == "waiting" else "activation_ended")
        ready, reason, missing, mismatched = self._verdict(activation)
        if ready:
            self._switch(activation)
        return ready, reason, False, missing, mismatched, self.active

    def give_up(self, name: str) -> Answer:
        if name not in self.activations:
            raise Refused("activation_unknown")
        activation = self.activations[name]
        if activation.state != "given_up":
            if activation.state not in ("open", "waiting"):
                raise Refused("activation_ended")
            self._end(activation, "given_up")
            self._abandon(activation.version)
            self._open_waiting()
        return (activation.state,)

    # workers

    def worker(self, name: str, incarnation: str | None = None) -> Worker:
        """The worker; where an incarnation speaks, only the live one."""
        if name not in self.workers:
            raise Refused("worker_unknown")
        worker = self.workers[name]
        if incarnation is not None and worker.incarnation != incarnation:
            raise Refused("incarnation_superseded")
        if incarnation is not None and worker.deregistered:
            raise Refused("incarnation_unknown")
        return worker

    def seen(self, name: str) -> Answer:
        return self.workers[name].state, self.workers[name].fenced

    def register(self, name: str, incarnation: str) -> Answer:
        """An incarnation begins once, with nothing acked; one that was superseded or left does not come back."""
        if (name, incarnation) in self.lives:
            self.worker(name, incarnation)
        else:
            self.lives.add((name, incarnation))
            self.workers[name] = Worker(incarnation)
        return self.seen(name)

    def beat(self, name: str, incarnation: str, asleep: bool) -> Answer:
        worker = self.worker(name, incarnation)
        worker.heard, worker.asleep = True, asleep
        return ()

    def drain(self, name: str, incarnation: str) -> Answer:
        worker = self.worker(name, incarnation)
        if not worker.draining:
            worker.draining = True
            self._leave(name, "draining")
        return self.seen(name)

    def deregister(self, name: str, incarnation: str) -> Answer:
        worker = self.worker(name)
        if not (worker.deregistered and worker.incarnation == incarnation):
            self.worker(name, incarnation)
            worker.deregistered = worker.draining = True
            self._leave(name, "deregistered")
        return self.seen(name)

    def _drop(self, activation: Activation, name: str, why: str) -> None:
        activation.required.remove(name)
        activation.dropped[name] = why
        self.tell("activation.dropped", activation.name)

    def _leave(self, name: str, why: str) -> None:
        activation = self.the("open")
        if activation is None or name not in activation.required:
            return
        self._drop(activation, name, why)
        if activation.required:
            self._switch_if_ready(activation.version)
        else:
            self._fail(activation, "no_required_workers")

    def _fence(self, name: str) -> None:
        self.workers[name].fenced, self.workers[name].fenced_at = True, self.tick()

    def fence(self, name: str) -> Answer:
        self.worker(name)
        self._fence(name)
        return self.seen(name)

    def fail_load(self, name: str, incarnation: str, number: int) -> Answer:
        self.worker(name, incarnation)
        self.version(number)
        self._fence(name)
        return self.seen(name)

    def ack(
        self, name: str, incarnation: str, number: int, artifact_hash: str, digest: Digest | None, caches: Sequence[str]
    ) -> Answer:
        worker = self.worker(name, incarnation)
        version = self.version(number)
        if version.artifact_hash != artifact_hash:
            reason = "worker_mismatch"
        elif version.state in ENDED:
            reason = "policy_withdrawn" if version.state == "withdrawn" else "worker_mismatch"
        elif not set(self.settings.required_caches) <= set(caches):
            reason = "caches_not_reset"
        else:
            contradicted = digest is not None and self._contradicted(name, incarnation, version, digest)
            reason = "worker_mismatch" if contradicted else "ok"
        opened = self.the("open")
        given_to = opened.name if opened is not None and opened.version == number else None
        self.acks[name, incarnation, number] = Ack(artifact_hash, reason == "ok", digest, given_to, self.tick())
        if reason in ("worker_mismatch", "caches_not_reset"):
            self._fence(name)
        lifted = reason == "ok" and worker.fenced and (number == self.active or not worker.must_ack_active)
        if lifted:
            worker.fenced = worker.must_ack_active = False
        verdict = self._switch_if_ready(number)
        if lifted and opened is not None and opened.version != number:
            self._switch_if_ready(opened.version)  # what it had said to the open activation counts now
        return reason == "ok", reason, verdict

    def _contradicted(self, name: str, incarnation: str, version: Version, digest: Digest) -> bool:
        """By what the learner stated, by another engine of the same layout, or by what it held before."""
        stated = version.digests.get(digest.layout)
        if stated is not None and digest.registered != stated:
            return True
        for (worker, life, _), ack in self.acks.items():
            if not ack.matching or ack.digest is None or ack.digest.layout != digest.layout:
                continue
            mine = (worker, life) == (name, incarnation)
            same_artifact = ack.artifact_hash == version.artifact_hash
            if same_artifact and not mine and not digest.same_weights(ack.digest):
                return True
            if not same_artifact and mine and stated is None and digest.shares_weights(ack.digest):
                return True
        return False

    # the clock

    def silence(self, name: str) -> None:
        self.workers[name].heard = False

    def sleep_ends(self, name: str) -> None:
        self.workers[name].asleep = False

    def deadline_passes(self) -> None:
        activation = self.the("open")
        assert activation is not None
        activation.overdue = True

    def tend(self) -> None:
        """Drops who cannot or did not confirm, where the run says so and enough are left; at the deadline it ends."""
        activation = self.the("open")
        if activation is None:
            return
        least, dropping = self.settings.min_workers, self.settings.on_lost == "drop"
        if dropping:
            absent = [w for w in activation.required if self.workers[w].fenced or self.workers[w].lost]
            leaving = absent[: max(0, len(activation.required) - least)]
            for name in leaving:
                self._drop_and_fence(activation, name, "fenced" if self.workers[name].fenced else "lost")
            if leaving:
                self._switch_if_ready(activation.version)
        if activation.state != "open" or not activation.overdue:
            return
        silent = [w for w in activation.required if self.said(activation, w) != "matching"]
        acked = len(activation.required) - len(silent)
        committed = self.versions[activation.version].state == "committed"
        if dropping and silent and acked >= least and committed and self.settings.activation == "last_ack":
            for name in silent:
                self._drop_and_fence(activation, name, "no matching ack in time")
            self._switch(activation)
        else:
            self._fail(activation, "deadline")

    def _drop_and_fence(self, activation: Activation, name: str, why: str) -> None:
        self._drop(activation, name, why)
        self._fence(name)
        self.workers[name].must_ack_active = True

    # rollouts

    def submit(self, rollout_id: str, name: str, incarnation: str, number: int, artifact_hash: str) -> Answer:
        if rollout_id in self.rollouts:
            known = self.rollouts[rollout_id]
            return "duplicate", known.state, known.revision, None
        reason = self._judge(name, incarnation, number, artifact_hash)
        stale = reason == "stale_policy"
        state = "generated" if reason is None else self.settings.stale_to if stale else "quarantined"
        rollout = Rollout(number, state, reason, self.active, 0 if reason is None else 1)
        self.rollouts[rollout_id] = rollout
        return "accepted", state, rollout.revision, reason

    def _judge(self, name: str, incarnation: str, number: int, artifact_hash: str) -> str | None:
        """The arrival checks, the first that holds."""
        version, active = self.versions.get(number), self.versions[self.active]
        if version is None:
            return "policy_unknown"
        if version.artifact_hash != artifact_hash:
            return "policy_identity_conflict"
        if version.state == "withdrawn":
            return "policy_withdrawn"
        ack = self.acks.get((name, incarnation, number))
        if ack is None or not ack.matching:
            return "worker_not_acked"
        opened = self.the("open")
        candidate = opened is not None and opened.version == number
        tried = any(a.version == number and a.state == "failed" for a in self.activations.values())
        pending = version.state in ("prepared", "committed") and not candidate
        if version.state == "abandoned" or (pending and (tried or number < self.active)):
            return "candidate_not_activated"
        if version.clock > active.clock and not candidate:
            return "future_policy"
        return "stale_policy" if active.clock - version.clock > self.settings.max_lag else None

    def _quarantine(self, numbers: Iterable[int], reason: str) -> int:
        numbers = set(numbers)
        found = [r for r in self.rollouts.values() if r.state == "generated" and r.version in numbers]
        for rollout in found:
            rollout.state, rollout.reason, rollout.revision = "quarantined", reason, rollout.revision + 1
        return len(found)

    # withdrawal and rollback

    def ancestors(self, number: int) -> list[int]:
        """Nearest first; the version itself is the first of them."""
        line: list[int] = []
        at: int | None = number
        while at is not None:
            line.append(at)
            at = self.versions[at].parent
        return line

    def _undo(self, withdrawn: list[int]) -> tuple[int, int]:
        """(released, quarantined): what a withdrawn version had made stale comes back, what was made with one goes."""
        quarantined = 0
        for state in ("waiting", "open"):  # the one that waits must not open meanwhile
            activation = self.the(state)
            if activation is not None and activation.version in withdrawn:
                quarantined += self._fail(activation, "policy_withdrawn")
        for number in withdrawn:
            self.versions[number].state = "withdrawn"
            self.tell("policy.withdrawn", number)
        back = [r for r in self.rollouts.values() if r.reason == "stale_policy" and r.judged in withdrawn]
        for rollout in back:
            rollout.state, rollout.reason, rollout.revision = "generated", None, rollout.revision + 1
        return len(back), quarantined + self._quarantine(withdrawn, "policy_withdrawn")

    def _restore(self, of: int) -> int:
        restored, number = self.versions[of], max(self.versions) + 1
        self.versions[number] = Version(of, restored.clock, restored.artifact_hash, restored.kind, restored.digests)
        self.tell("policy.prepared", number)
        return number

    def withdraw(self, number: int) -> Answer:
        if self.version(number).state == "abandoned":
            raise Refused("policy_state")
        if number in self.withdrawals:
            return self.withdrawals[number]
        withdrawn = [n for n, v in self.versions.items() if number in self.ancestors(n) and v.state not in ENDED]
        released, quarantined = self._undo(withdrawn)
        restoring: int | None = None
        usable = self.versions[self.active].state == "active" or any(
            n > self.active and v.state in ("prepared", "committed") for n, v in self.versions.items()
        )
        needed = self.active in withdrawn or not usable
        if needed:
            bad = self.versions[number].artifact_hash
            durable = [
                n
                for n in self.ancestors(self.active)
                if (v := self.versions[n]).kind != "stream" and v.was_committed and v.state not in ENDED
                if v.artifact_hash != bad
            ]
            restoring = self._restore(durable[0]) if durable else None
        self.tell("policy.withdrawal", number)
        if restoring is not None:
            self.commit(restoring)
        answer = (tuple(withdrawn), released, quarantined, restoring, needed and restoring is None)
        self.withdrawals[number] = answer
        return answer

    def roll_back(self, name: str, to: int, opening: str | None) -> Answer:
        if name in self.rollbacks:
            if self.rollbacks[name][0] != to or opening not in (None, self.rollbacks[name][1][4]):
                raise Refused("rollback_conflict")
            return self.rollbacks[name][1]
        version = self.version(to)
        if version.kind == "stream":
            raise Refused("policy_not_durable")
        if version.state in ("prepared", *ENDED) or to >= self.active:
            raise Refused("policy_state")
        if opening in self.activations:
            raise Refused("activation_conflict")
        if opening is not None and not self._freeze(None):
            raise Refused("no_required_workers")
        kept = self.ancestors(to)
        withdrawn = [n for n, v in self.versions.items() if n not in kept and v.state not in ENDED]
        released, quarantined = self._undo(withdrawn)
        restoring = self._restore(to)
        if opening is not None:
            self.open_activation(opening, restoring, None, True)
        self.tell("policy.rolled_back", restoring)
        self.commit(restoring)
        answer = (tuple(withdrawn), released, quarantined, restoring, opening)
        self.rollbacks[name] = to, answer
        return answer
