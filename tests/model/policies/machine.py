"""Random sequences of calls, made to the service and to the fleet in memory; after each the two must agree.

Most calls are those of a fleet that takes up version after version; any of them may be odd in one way.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, ClassVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from coordinator.wire.runs import RunSettings
from tests.model.agreeing import AgreeingMachine
from tests.model.policies.fleet import Digest, Fleet
from tests.model.policies.service import Service, sha256

NAMES = ("a", "b", "c")
LAYOUT = "vllm/float32"

SETTINGS = st.fixed_dictionaries(
    {
        "activation": st.sampled_from(["last_ack", "last_ack", "by_hand"]),
        "on_lost": st.sampled_from(["drop", "drop", "block"]),
        "min_workers": st.sampled_from([1, 1, 2]),
        "required_caches": st.sampled_from([[], ["prefix"]]),
        "max_lag": st.sampled_from([4, 1, 0]),
        "lag_gate": st.just("enforce"),
        "stale_to": st.sampled_from(["offline", "quarantined"]),
    }
)

Method = Callable[["FleetMachine", st.DataObject], None]
STEPS: list[tuple[int, Callable[[FleetMachine], object], Method]] = []


def often(weight: int, when: Callable[[FleetMachine], object] = lambda self: True) -> Callable[[Method], Method]:
    """Among what a step may draw, this many times as often as what has weight 1, and only when it makes sense."""

    def taken(method: Method) -> Method:
        STEPS.append((weight, when, method))
        return method

    return taken


class FleetMachine(AgreeingMachine):
    """One run from its creation on; `service` is set by whoever runs the machine. It has one rule, as `LedgerMachine`
    has, and for the same reason."""

    service: ClassVar[Service]
    place = 0

    @initialize(settings=SETTINGS, count=st.sampled_from([3, 3, 2]))
    def begin(self, settings: dict[str, Any], count: int) -> None:
        self.service.create(settings)
        self.twin = self.fleet = Fleet(RunSettings.model_validate(settings), self.service.hashes[0])
        for name in NAMES[:count]:
            self.both("register", name, "1")
            self.both("ack", name, "1", 0, self.service.hashes[0], None, self.caches)

    @property
    def caches(self) -> list[str]:
        return list(self.fleet.settings.required_caches)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Drawn with its place mixed in: Hypothesis repeats its own draws within an example, and would repeat steps."""
        steps = [method for weight, when, method in STEPS if when(self) for _ in range(weight)]
        method = Random(1_000_003 * self.place + data.draw(st.integers(0, 2**20), label="step")).choice(steps)
        self.place += 1
        note(method.__name__)
        method(self, data)

    def compare(self) -> None:
        fleet = self.fleet
        opened = fleet.the("open")
        expected: dict[str, dict[Any, Any]] = {
            "versions": {n: [v.state, v.clock] for n, v in fleet.versions.items()},
            "activations": {
                name: [
                    a.version,
                    a.state,
                    [[w, fleet.said(a, w) if a.state == "open" else None] for w in a.required],
                    a.dropped,
                    a.reason,
                ]
                for name, a in fleet.activations.items()
            },
            "workers": {name: [w.incarnation, w.state, w.fenced] for name, w in fleet.workers.items()},
            "rollouts": {i: [r.state, r.reason, r.revision] for i, r in fleet.rollouts.items()},
            "pointer": {"active": fleet.active, "candidate": opened and opened.name},
        }
        seen = self.service.now()
        for name, value in expected.items():
            differing = {
                key: (seen[name].get(key), value.get(key))
                for key in {*seen[name], *value}
                if seen[name].get(key) != value.get(key)
            }
            assert not differing, f"{name} (service, fleet): {differing}"
        self.agreed = True

    def teardown(self) -> None:
        if self.agreed:
            assert self.service.told() == (self.fleet.told, self.fleet.switches)
            assert self.service.breaches() == []

    # what is drawn; the simplest choice is the usual one

    def maybe(self, data: st.DataObject, what: str, one_in: int) -> bool:
        return data.draw(st.sampled_from([False] * (one_in - 1) + [True]), label=what)

    def any_version(self, data: st.DataObject) -> int:
        return data.draw(
            st.sampled_from([*reversed(self.fleet.versions), max(self.fleet.versions) + 1]), label="version"
        )

    def hash_of(self, number: int) -> str:
        return self.fleet.versions[number].artifact_hash if number in self.fleet.versions else "0" * 64

    def a_worker(self, data: st.DataObject) -> tuple[str, str]:
        """Of the fleet with its live incarnation, mostly."""
        present = [name for name, w in self.fleet.workers.items() if not w.deregistered]
        if not present or self.maybe(data, "anybody", 15):
            present = [*self.fleet.workers, "nobody"]
        name = data.draw(st.sampled_from(present), label="worker")
        worker = self.fleet.workers.get(name)
        incarnation = worker.incarnation if worker is not None else "1"
        return name, str(int(incarnation) - 1) if self.maybe(data, "an old incarnation", 12) else incarnation

    # policy versions

    @often(2, lambda self: len(self.openable()) < 2 and len(self.fleet.versions) < 12)
    def publish(self, data: st.DataObject) -> None:
        """The next version, whole mostly."""
        fleet = self.fleet
        standing = [n for n, v in fleet.versions.items() if v.state not in ("withdrawn", "abandoned")] or [0]
        parent = standing[-1] if fleet.versions[fleet.active].state == "withdrawn" else max(standing[-1], fleet.active)
        if self.maybe(data, "another parent", 5):
            parent = self.any_version(data)
        number = max(fleet.versions) + (2 if self.maybe(data, "a gap", 8) else 1)
        self.prepare(data, number, parent, 0)
        if number in fleet.versions and not self.maybe(data, "no files yet", 5):
            if fleet.versions[number].kind != "stream":
                self.both("upload", number)
            self.both("commit", number)

    def prepare(self, data: st.DataObject, number: int, parent: int, variant: int) -> None:
        kind = data.draw(st.sampled_from(["lora", "lora", "full", "stream"]), label="kind")
        named = self.service.named(kind, number, variant)
        stated = self.maybe(data, "the learner states a digest", 3)
        self.both("prepare", number, parent, kind, named, {LAYOUT: self.weights(named)} if stated else {})

    @often(1, lambda self: self.fleet.the("open"))
    def prepare_oddly(self, data: st.DataObject) -> None:
        """One that is there or was passed over: with other bytes, another parent, too small a number."""
        number = data.draw(st.integers(0, max(self.fleet.versions)), label="version")
        self.prepare(data, number, self.any_version(data), data.draw(st.integers(0, 1), label="variant"))

    @often(2, lambda self: any(v.state == "prepared" for v in self.fleet.versions.values()))
    def go_on_with_files(self, data: st.DataObject) -> None:
        number = next(n for n, v in self.fleet.versions.items() if v.state == "prepared")
        if self.maybe(data, "any", 5):
            number = self.any_version(data)
        if not self.maybe(data, "no upload", 3):
            self.both("upload", number)
        self.both("commit", number)

    # activations

    def openable(self) -> list[int]:
        found = [n for n, v in self.fleet.versions.items() if v.state in ("prepared", "committed")]
        under_way = [a.version for a in self.fleet.activations.values() if a.state in ("open", "waiting")]
        return [n for n in found if n > max([self.fleet.active, *under_way])]

    @often(8, lambda self: self.fleet.the("open") is None)
    def take_up(self, data: st.DataObject) -> None:
        """A version is there, opens, and some confirm it."""
        if not self.openable():
            self.publish(data)
        if self.openable():
            self.open_the_newest(data)
        for _ in range(data.draw(st.integers(0, 3), label="acks")):
            if self.fleet.the("open") is not None:
                self.ack_the_candidate(data)

    @often(4, lambda self: self.openable())
    def open_the_newest(self, data: st.DataObject) -> None:
        asked = None
        if self.maybe(data, "by name", 4):
            names = [*self.fleet.workers, "nobody"] if self.maybe(data, "unknown", 5) else [*self.fleet.workers]
            asked = tuple(data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3), label="named"))
        number = data.draw(st.sampled_from(self.openable()[::-1]), label="version")
        name = f"a{len(self.fleet.activations)}"
        self.both("open_activation", name, number, asked, self.maybe(data, "supersede", 2))

    @often(1, lambda self: self.fleet.activations)
    def open_oddly(self, data: st.DataObject) -> None:
        """Any version, or an id that was used."""
        names = [f"a{len(self.fleet.activations)}", *self.fleet.activations]
        name = data.draw(st.sampled_from(names), label="activation")
        self.both("open_activation", name, self.any_version(data), None, self.maybe(data, "supersede", 3))

    @often(1, lambda self: self.fleet.the("open"))
    def give_up(self, data: st.DataObject) -> None:
        names = [a.name for a in self.fleet.activations.values() if a.state in ("open", "waiting")]
        if self.maybe(data, "any", 6):
            names = [*self.fleet.activations, "nothing"]
        self.both("give_up", data.draw(st.sampled_from(names), label="activation"))

    @often(2, lambda self: self.fleet.the("open"))
    def activate(self, data: st.DataObject) -> None:
        opened = self.fleet.the("open")
        assert opened is not None
        self.both("activate", self.any_version(data) if self.maybe(data, "any", 3) else opened.version)

    # acks

    def weights(self, artifact_hash: str, part: str = "registered") -> str:
        """What an engine holds that loaded this artifact whole."""
        return sha256(f"{part} {artifact_hash}")

    def digest(self, data: st.DataObject, number: int) -> Digest | None:
        """Right, or none; at times one that contradicts another."""
        if self.maybe(data, "a digest", 2):
            held = self.hash_of(number)
            if self.maybe(data, "the weights of another version", 6):
                held = self.hash_of(self.any_version(data))
            tells = not self.maybe(data, "only the registered weights", 3)
            active = self.hash_of(0) if self.maybe(data, "the old weights are multiplied with", 10) else held
            layout = "vllm/float32/tp2" if self.maybe(data, "another layout", 6) else LAYOUT
            return Digest(layout, self.weights(held), self.weights(active, "active") if tells else None)
        return None

    @often(10, lambda self: self.fleet.the("open"))
    def ack_the_candidate(self, data: st.DataObject) -> None:
        """By one that is waited for."""
        opened = self.fleet.the("open")
        assert opened is not None
        silent = [w for w in opened.required if self.fleet.said(opened, w) != "matching"] or opened.required
        name = data.draw(st.sampled_from(silent), label="worker")
        self.ack(data, name, self.fleet.workers[name].incarnation, opened.version)

    @often(2)
    def ack_anything(self, data: st.DataObject) -> None:
        number = self.fleet.active if self.maybe(data, "the active", 2) else self.any_version(data)
        self.ack(data, *self.a_worker(data), number)

    def ack(self, data: st.DataObject, name: str, incarnation: str, number: int) -> None:
        named = "f" * 64 if self.maybe(data, "wrong hash", 12) else self.hash_of(number)
        caches = [] if self.maybe(data, "no caches", 12) else self.caches
        self.both("ack", name, incarnation, number, named, self.digest(data, number), caches)

    # workers

    @often(1)
    def a_life_begins(self, data: st.DataObject) -> None:
        """A joiner, a restart, or one that comes back too late; it serves the active version at once, mostly."""
        name = data.draw(st.sampled_from(NAMES), label="worker")
        lives = [int(life) for worker, life in self.fleet.lives if worker == name]
        incarnation = str(max(lives, default=0) + (0 if lives and self.maybe(data, "not a new one", 5) else 1))
        self.both("register", name, incarnation)
        if not self.maybe(data, "silent", 3):
            self.ack(data, name, incarnation, self.fleet.active)

    @often(1)
    def leave(self, data: st.DataObject) -> None:
        how = data.draw(st.sampled_from(["drain", "deregister"]), label="how")
        self.both(how, *self.a_worker(data))

    @often(1)
    def beat(self, data: st.DataObject) -> None:
        self.both("beat", *self.a_worker(data), self.maybe(data, "asleep", 2))

    @often(3, lambda self: self.fleet.the("open"))
    def fence(self, data: st.DataObject) -> None:
        """It may have confirmed the candidate before, and may serve the active version again at once."""
        name, incarnation = self.a_worker(data)
        if self.maybe(data, "by itself", 2):
            self.both("fail_load", name, incarnation, self.any_version(data))
        else:
            self.both("fence", name)
        if not self.maybe(data, "it stays fenced", 2):
            self.ack(data, name, incarnation, self.fleet.active)

    # the clock

    @often(2, lambda self: self.fleet.the("open"))
    def silence(self, data: st.DataObject) -> None:
        """Of one that is waited for, mostly."""
        opened = self.fleet.the("open")
        assert opened is not None
        names = [*self.fleet.workers] if self.maybe(data, "any", 4) else opened.required
        name = data.draw(st.sampled_from(names), label="worker")
        self.both("silence", name, retry=False)
        if self.maybe(data, "its sleep is over", 2):
            self.both("sleep_ends", name, retry=False)
        if not self.maybe(data, "not swept", 3):
            self.both("tend", retry=False)

    @often(4, lambda self: self.fleet.the("open"))
    def tend(self, data: st.DataObject) -> None:
        if self.maybe(data, "too late", 2):
            self.both("deadline_passes", retry=False)
        self.both("tend", retry=False)

    @often(4, lambda self: self.fleet.the("waiting"))
    def its_turn_comes(self, data: st.DataObject) -> None:
        """Of the activation that waits: the fleet is another one by then."""
        changes = [self.a_life_begins, self.leave, self.fence, self.silence]
        data.draw(st.sampled_from(changes), label="change")(data)
        opened = self.fleet.the("open")
        if opened is not None:
            self.both("give_up", opened.name)

    # rollouts, withdrawal, rollback, retries

    @often(3)
    def submit(self, data: st.DataObject) -> None:
        """Of what this life serves, mostly."""
        name, incarnation = self.a_worker(data)
        served = [n for worker, life, n in self.fleet.acks if (worker, life) == (name, incarnation)]
        number = self.any_version(data)
        if served and not self.maybe(data, "any version", 3):
            number = data.draw(st.sampled_from(served[::-1]), label="served")
        named = "f" * 64 if self.maybe(data, "wrong hash", 20) else self.hash_of(number)
        self.both("submit", f"r{len(self.fleet.rollouts)}", name, incarnation, number, named)

    @often(1, lambda self: len(self.fleet.versions) > 2)
    def withdraw(self, data: st.DataObject) -> None:
        number = self.fleet.active if self.maybe(data, "the active", 3) else self.any_version(data)
        self.both("withdraw", number)

    @often(2, lambda self: self.fleet.active > 0)
    def roll_back(self, data: st.DataObject) -> None:
        names = [f"b{len(self.fleet.rollbacks)}", *self.fleet.rollbacks]
        name = names[0] if not self.maybe(data, "the same", 6) else data.draw(st.sampled_from(names), label="rollback")
        earlier = [n for n, v in self.fleet.versions.items() if v.state == "retired" and n < self.fleet.active]
        to = self.any_version(data) if not earlier or self.maybe(data, "any", 6) else earlier[-1]
        opening = f"a{len(self.fleet.activations)}" if self.maybe(data, "opening too", 2) else None
        if opening is not None and self.maybe(data, "an id that was used", 8):
            opening = data.draw(st.sampled_from([opening, *self.fleet.activations]), label="activation")
        self.both("roll_back", name, to, opening)

    @often(2, lambda self: self.calls)
    def again(self, data: st.DataObject) -> None:
        """The same call once more, as a client sends it whose answer was lost; one of the last mostly."""
        calls = self.calls if self.maybe(data, "long ago", 3) else self.calls[-4:]
        name, args = data.draw(st.sampled_from(calls), label="call")
        self.both(name, *args, retry=False)
