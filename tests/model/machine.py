"""Random sequences of calls, made to the service and to the ledger in memory; after each the two must agree.

Most calls are those of a training that goes well, so that it gets somewhere; any of them may be odd in one way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from coordinator.wire.runs import RunSettings
from tests.model.agreeing import AgreeingMachine
from tests.model.ledger import Item, Ledger, Reward, Span, Wanted
from tests.model.service import END_HOLD, KEEP_FOR_EVER, LAPSE, PASS_DEADLINE, WORKERS, Service

EVIDENCE_BYTES = 6 * (4 + 1 + 4)
SHIFTS = [0.1, 0.2, 0.3, -0.5]
TINY = 0.000001
"""A retention time that everything has outlived."""

SETTINGS = st.fixed_dictionaries(
    {
        "group_size": st.sampled_from([2, 3, 3, 1, None]),
        "min_usable": st.sampled_from([None, 1, "all"]),
        "max_attempts": st.sampled_from([1, 1, 2, 3]),
        "max_lag": st.sampled_from([4, 1, 0]),
        "lag_gate": st.sampled_from(["enforce", "enforce", "observe"]),
        "drift_gate": st.sampled_from(["enforce", "enforce", "observe", "off"]),
        "stale_to": st.sampled_from(["offline", "quarantined"]),
        "on_expiry": st.sampled_from(["release", "quarantine"]),
        "other_contract": st.sampled_from(["reject", "reject", "keep_apart"]),
        "mix_rulesets": st.sampled_from([True, True, False]),
        "evidence_retention_seconds": st.sampled_from([TINY, None]),
        "rollout_retention_seconds": st.sampled_from([TINY, None]),
        "rewind_commits": st.sampled_from([100, 1, 0, 2]),
    }
)


Method = Callable[["LedgerMachine", st.DataObject], None]
CALLS: list[tuple[int, Callable[[LedgerMachine], object], Method]] = []


def often(weight: int, when: Callable[[LedgerMachine], object] = lambda self: True) -> Callable[[Method], Method]:
    """Among what a step may draw, this many times as often as what has weight 1, and only when it makes sense."""

    def taken(method: Method) -> Method:
        CALLS.append((weight, when, method))
        return method

    return taken


class LedgerMachine(AgreeingMachine):
    """One run from its creation on; `service` is set by whoever runs the machine.

    It has one rule, which draws among all calls: of many rules Hypothesis switches about half off in each example, and
    a training that lacks half of its calls gets nowhere.
    """

    service: ClassVar[Service]

    @initialize(settings=SETTINGS)
    def begin(self, settings: dict[str, Any]) -> None:
        self.service.create(settings)
        self.twin = self.ledger = Ledger(RunSettings.model_validate(settings), self.service.hashes[0], WORKERS)
        self.compare()

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        calls = [method for weight, when, method in CALLS if when(self) for _ in range(weight)]
        data.draw(st.sampled_from(calls), label="step")(self, data)

    def compare(self) -> None:
        seen, ledger = self.service.seen(), self.ledger
        states = [r.state for r in ledger.rollouts.values()]
        counts = {state: states.count(state) for state in set(states)}
        if size := EVIDENCE_BYTES * sum(r.tokens for r in ledger.rollouts.values()):
            counts["evidence_bytes"] = size
        expected = {
            "rollouts": {
                i: [r.state, r.reason, r.revision, r.update, r.reward and r.reward.status, r.reward and r.reward.value]
                for i, r in ledger.rollouts.items()
            },
            "tombstones": {i: [r.state, r.revision] for i, r in ledger.tombstones.items()},
            "groups": {key: group.state for key, group in ledger.groups.items()},
            "updates": {i: [u.seen, u.version, u.after, u.commit_no] for i, u in ledger.updates.items()},
            "versions": {str(n): [v.state, v.clock] for n, v in ledger.versions.items()},
            "counts": counts,
            "line": [ledger.active, ledger.commits, ledger.last_commit],
        }
        for name, value in expected.items():
            differing = (
                {
                    k: (seen[name].get(k), value.get(k))
                    for k in {*seen[name], *value}
                    if seen[name].get(k) != value.get(k)
                }
                if isinstance(value, dict)
                else (seen[name], value)
                if seen[name] != value
                else None
            )
            assert not differing, f"{name} (service, ledger): {differing}"
        self.agreed = True

    def teardown(self) -> None:
        if not self.agreed:
            return
        self.service.execute(KEEP_FOR_EVER)
        ledger = self.ledger
        everything = sorted({**ledger.tombstones, **ledger.rollouts}.items())
        audit = [
            (i, c.event, c.origin, c.state, c.reason, c.update, c.judged) for i, r in everything for c in r.changes
        ]
        assert self.service.audit() == audit
        assert self.service.views() == {
            "rollouts": {i: [r.state, r.reason, r.revision, r.update] for i, r in ledger.rollouts.items()},
            "updates": {i: ledger.view(i) for i in ledger.updates},
            "counts": {
                s: [r.state for r in ledger.rollouts.values()].count(s)
                for s in {r.state for r in ledger.rollouts.values()}
            },
            "versions": {n: v.state for n, v in ledger.versions.items()},
            "line": ledger.last_commit,
        }
        assert self.service.breaches() == []

    # what is drawn; the simplest choice is the usual one

    def maybe(self, data: st.DataObject, what: str, one_in: int) -> bool:
        return data.draw(st.sampled_from([False] * (one_in - 1) + [True]), label=what)

    def spans(self, data: st.DataObject) -> tuple[Span, ...]:
        """Mostly of the active version; at times of another one, known or not, or of two."""
        usual = [self.ledger.active] * 4
        if self.ledger.candidate is not None:
            usual += [self.ledger.candidate] * 2
        if self.maybe(data, "other versions", 3):
            usual = [*self.ledger.versions, max(self.ledger.versions) + 1]
        chosen = data.draw(st.lists(st.sampled_from(usual), min_size=1, max_size=2, unique=True), label="versions")
        first_acts = len(chosen) == 1 or not self.maybe(data, "the first is masked", 2)
        wrong = self.maybe(data, "wrong hash", 30)
        return tuple(
            Span(v, "0" * 64 if wrong else self.service.hash_of(v), first_acts or n > 0) for n, v in enumerate(chosen)
        )

    def item(self, data: st.DataObject, group: str, index: int, attempt: int, spans: tuple[Span, ...]) -> Item:
        usual = Item(f"{group}.{index}.{attempt}", group, index, attempt, spans, contract=self.contract(group, spans))
        if not self.maybe(data, "an odd item", 10):
            return usual
        odd: list[dict[str, Any]] = [{"rollout_id": "stray"}, {"worker": "slow"}]
        if spans:
            odd += [{"variant": 1}, {"fault": "log_prob_not_finite"}]
            if group in self.ledger.groups:
                odd += [{"contract": 1 - usual.contract}]
        return replace(usual, **data.draw(st.sampled_from(odd), label="odd"))

    def contract(self, group: str, spans: tuple[Span, ...]) -> int:
        """Every third group's is another one, where the run keeps these apart."""
        return int(bool(spans) and self.ledger.settings.other_contract == "keep_apart" and int(group[1:]) % 3 == 2)

    def any_item(self, data: st.DataObject, spans: tuple[Span, ...]) -> Item:
        """Of the groups that are there, or one that is new."""
        groups = [*self.ledger.groups] if self.ledger.settings.group_size is not None else []
        group = data.draw(st.sampled_from([*groups, *self.new_groups(1)]), label="group")
        index = data.draw(st.integers(0, self.ledger.size - (not self.maybe(data, "index", 20))), label="index")
        last = self.ledger.settings.max_attempts - (not self.maybe(data, "attempt", 20))
        return self.item(data, group, index, data.draw(st.integers(0, last), label="attempt"), spans)

    def new_groups(self, count: int) -> list[str]:
        taken = {r.item.group_id for r in {**self.ledger.tombstones, **self.ledger.rollouts}.values()}
        return [name for n in range(len(taken) + count) if (name := f"g{n}") not in taken][:count]

    def known(self, data: st.DataObject) -> str:
        gone = [*self.ledger.tombstones, "nobody"] if self.maybe(data, "gone", 15) else []
        return data.draw(st.sampled_from([*self.ledger.rollouts, *gone] or ["nobody"]), label="rollout")

    def an_update(self, data: st.DataObject) -> tuple[str, str]:
        """One that is open and its owner, mostly."""
        live = [i for i, u in self.ledger.updates.items() if u.seen == "open"]
        if not live or self.maybe(data, "another update", 8):
            live = [*self.ledger.updates, "u0"]
        update = data.draw(st.sampled_from(live), label="update")
        owner = self.ledger.updates[update].owner if update in self.ledger.updates else "t"
        return update, "thief" if self.maybe(data, "another owner", 30) else owner

    def after(self, data: st.DataObject) -> int:
        last = self.ledger.last_commit
        return data.draw(st.sampled_from([0, last + 1]), label="after") if self.maybe(data, "line", 30) else last

    def shift(self, data: st.DataObject) -> float:
        return data.draw(st.sampled_from(SHIFTS), label="shift") if self.maybe(data, "drift", 5) else 0.0

    def revision(self, rollout_id: str) -> int:
        rollout = self.ledger.rollouts.get(rollout_id)
        return 0 if rollout is None else rollout.revision

    # arrival and rewards

    @often(3)
    def submit(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 4), label="items")
        self.both("submit", [self.any_item(data, self.spans(data)) for _ in range(count)])

    @often(5)
    def groups_arrive(self, data: st.DataObject) -> None:
        """New ones, with rewards: whole and good mostly."""
        spans = self.spans(data)
        groups = self.new_groups(data.draw(st.integers(1, 3), label="groups"))
        items = [
            self.item(data, group, index, 0, spans)
            for group in groups
            for index in range(self.ledger.size)
            if not self.maybe(data, "late", 10)
        ]
        if items:
            self.both("submit", items)
            self.both("submit_rewards", [self.reward(data, item.rollout_id) for item in items])

    def free_places(self) -> list[tuple[str, int, int]]:
        """Members of spent groups, and attempts at them, that have not come yet."""
        settings = self.ledger.settings
        if settings.group_size is None:
            return []
        there = {
            (r.item.group_id, r.item.index, r.item.attempt)
            for r in {**self.ledger.tombstones, **self.ledger.rollouts}.values()
        }
        return [
            place
            for key, group in self.ledger.groups.items()
            if group.state == "spent"
            for index in range(settings.group_size)
            for attempt in range(settings.max_attempts)
            if (place := (key, index, attempt)) not in there
        ]

    @often(3, lambda self: self.free_places())
    def a_latecomer(self, data: st.DataObject) -> None:
        """Too late for its group, unless a rewind opens that again."""
        group, index, attempt = data.draw(st.sampled_from(self.free_places()), label="place")
        self.both("submit", [self.item(data, group, index, attempt, self.spans(data))])

    @often(1)
    def fail_generation(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 3), label="items")
        self.both("fail_generation", [self.any_item(data, ()) for _ in range(count)])

    def reward(self, data: st.DataObject, rollout_id: str) -> Reward:
        ruleset = "S" if self.maybe(data, "another ruleset", 15) else "R"
        if self.maybe(data, "a failure", 12):
            return Reward(rollout_id, data.draw(st.sampled_from(["timeout", "error"]), label="status"), None, ruleset)
        return Reward(rollout_id, "ok", data.draw(st.sampled_from([1.0, 0.0]), label="value"), ruleset)

    @often(3, lambda self: self.ledger.rollouts)
    def submit_rewards(self, data: st.DataObject) -> None:
        waiting = [i for i, r in self.ledger.rollouts.items() if r.state in ("generated", "reward_failed")]
        count = data.draw(st.integers(1, 4), label="rewards")
        named = [
            data.draw(st.sampled_from(waiting), label="rollout")
            if waiting and not self.maybe(data, "any", 4)
            else self.known(data)
            for _ in range(count)
        ]
        self.both("submit_rewards", [self.reward(data, rollout_id) for rollout_id in named])

    @often(1, lambda self: self.ledger.groups)
    def rescore(self, data: st.DataObject) -> None:
        keys = [*(k for k in self.ledger.groups if self.ledger.members(k, "rewarded")), *self.ledger.groups, "nobody"]
        key = data.draw(st.sampled_from(keys), label="group")
        named = [r.item.rollout_id for r in self.ledger.members(key, "rewarded")]
        if not named or self.maybe(data, "odd", 10):
            named = sorted({*named[1:], self.known(data)})
        values = {i: data.draw(st.sampled_from([0.0, 1.0, 2.0]), label="value") for i in named}
        self.both("rescore", key, data.draw(st.sampled_from("RS"), label="ruleset"), values)

    def out(self) -> list[str]:
        return [i for i, r in self.ledger.rollouts.items() if r.state in ("quarantined", "offline")]

    @often(2, lambda self: self.out())
    def release(self, data: st.DataObject) -> None:
        by = [
            (r.changes[-1].update, r.reason)
            for r in self.ledger.rollouts.values()
            if r.state == "quarantined" and r.changes[-1].update
        ]
        if by and self.maybe(data, "by update", 2):
            self.both("release", None, *data.draw(st.sampled_from(by), label="update"))
        else:
            names = st.lists(st.sampled_from(self.out()), min_size=1, max_size=3)
            extra = [self.known(data)] if self.maybe(data, "any", 10) else []
            self.both("release", [*data.draw(names, label="rollouts"), *extra])

    # updates

    @often(1)
    def open_update(self, data: st.DataObject) -> None:
        """Another one, of the active version mostly; or one that is there, by its owner or somebody else."""
        versions = [self.ledger.active]
        if self.maybe(data, "another version", 5) or self.ledger.versions[self.ledger.active].state == "withdrawn":
            versions = [*self.ledger.versions]
        update, owner = f"u{len(self.ledger.updates)}", "t"
        if self.ledger.updates and self.maybe(data, "one that is there", 4):
            update, owner = self.an_update(data)
        self.both("open_update", update, owner, data.draw(st.sampled_from(versions), label="version"))

    @often(8, lambda self: any(r.state == "rewarded" for r in self.ledger.rollouts.values()))
    def train(self, data: st.DataObject) -> None:
        """Open, candidates, reserve, and mostly commit."""
        if not any(u.seen == "open" for u in self.ledger.updates.values()):
            self.open_update(data)
            if not self.ledger.updates:
                return
        update, count = self.an_update(data), data.draw(st.integers(1, 4), label="groups")
        if self.ledger.settings.drift_gate == "off" and self.maybe(data, "take", 2):
            self.both("take", *update, count, self.after(data))
        else:
            offered = self.both("candidates", *update, count)
            if isinstance(offered, str) or not offered or not offered[1]:
                return
            common = self.shift(data)
            wanted = [Wanted(i, revision, common or self.shift(data)) for i, revision, *_ in offered[1]]
            self.both("reserve", *update, self.after(data), wanted, self.maybe(data, "confirm", 2))
        if not self.maybe(data, "no commit", 3):
            self.both("commit", *update, self.ledger.last_commit, self.discards(data, update[0]))

    def discards(self, data: st.DataObject, update: str) -> list[str]:
        held = [i for i, r in self.ledger.rollouts.items() if r.update == update]
        if not held or not self.maybe(data, "discards", 4):
            return []
        extra = [self.known(data)] if self.maybe(data, "foreign", 10) else []
        return data.draw(st.lists(st.sampled_from([*held, *extra]), min_size=1, max_size=2, unique=True))

    @often(3, lambda self: self.ledger.updates and self.ledger.rollouts)
    def reserve(self, data: st.DataObject) -> None:
        """Whole groups, whoever holds them; or anything: in part, at another revision."""
        keys = sorted({self.ledger.key(r.item) for r in self.ledger.rollouts.values() if r.state == "rewarded"})
        if keys and not self.maybe(data, "anything", 3):
            picked = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True), label="groups")
            named = [r.item.rollout_id for key in picked for r in self.ledger.members(key, "rewarded")]
        else:
            named = [self.known(data) for _ in range(data.draw(st.integers(1, 4), label="rollouts"))]
        wanted = []
        for rollout_id in dict.fromkeys(named):
            off = data.draw(st.sampled_from([-1, 1]), label="off by") if self.maybe(data, "revision", 10) else 0
            wanted.append(Wanted(rollout_id, max(0, self.revision(rollout_id) + off), self.shift(data)))
        self.both("reserve", *self.an_update(data), self.after(data), wanted, self.maybe(data, "confirm", 2))

    @often(2, lambda self: self.ledger.updates)
    def commit(self, data: st.DataObject) -> None:
        update, owner = self.an_update(data)
        self.both("commit", update, owner, self.after(data), self.discards(data, update))

    @often(1, lambda self: self.ledger.updates)
    def abort_or_renew(self, data: st.DataObject) -> None:
        if self.maybe(data, "renew", 3):
            self.both("renew", *self.an_update(data))
        else:
            self.both("abort", *self.an_update(data), self.maybe(data, "quarantine", 2))

    @often(1, lambda self: any(u.seen == "open" for u in self.ledger.updates.values()))
    def a_lease_ends(self, data: st.DataObject) -> None:
        live = [i for i, u in self.ledger.updates.items() if u.seen == "open"]
        update = data.draw(st.sampled_from(live), label="update")
        note(f"the lease of {update} ends")
        self.service.execute(LAPSE, update_id=update)
        self.ledger.updates[update].lapsed = True
        self.compare()
        if self.maybe(data, "sweep", 2):
            self.both("expire", retry=False)

    @often(1, lambda self: any(g.state == "open" for g in self.ledger.groups.values()))
    def a_clock_runs_out(self, data: st.DataObject) -> None:
        """A group's deadline, or somebody's hold on it."""
        key = data.draw(st.sampled_from([k for k, g in self.ledger.groups.items() if g.state == "open"]), label="group")
        if self.ledger.groups[key].holder is not None and self.maybe(data, "hold", 2):
            note(f"the hold of {key} ends")
            self.service.execute(END_HOLD, key=key)
            self.ledger.groups[key].held = False
        else:
            note(f"the deadline of {key} passes")
            self.service.execute(PASS_DEADLINE, key=key)
            self.ledger.groups[key].overdue = True

    # policy versions

    def waiting(self) -> list[int]:
        """Versions that can still become active."""
        return [n for n, v in self.ledger.versions.items() if v.state == "committed" and n > self.ledger.active]

    @often(2, lambda self: self.ledger.candidate is None and len(self.ledger.versions) < 9)
    def publish(self, data: st.DataObject) -> None:
        """A version, or the one that waits already, becomes active, or opens: one worker serves it, one not yet."""
        ledger = self.ledger
        if not self.waiting() or self.maybe(data, "another", 3):
            standing = [n for n, v in ledger.versions.items() if v.state not in ("withdrawn", "abandoned")][-1:]
            if self.maybe(data, "another parent", 6):
                standing = [*ledger.versions]
            made = [i for i, u in ledger.updates.items() if u.state == "committed"]
            if self.maybe(data, "rewound too", 20):
                made = [*ledger.updates]
            version, updates = (
                max(ledger.versions) + 1,
                st.lists(st.sampled_from(made or ["u0"]), max_size=2, unique=True),
            )
            parent, named = data.draw(st.sampled_from(standing), label="parent"), data.draw(updates, label="updates")
            self.both("publish", version, parent, named if made else [], self.service.hash_of(version), retry=False)
        if self.waiting():
            self.both("open_activation", self.waiting()[-1], WORKERS[:1], retry=False)
            if not self.maybe(data, "wait", 3):
                self.both("switch", WORKERS[1:], retry=False)

    @often(2, lambda self: self.ledger.candidate is not None)
    def end_activation(self, data: st.DataObject) -> None:
        if self.maybe(data, "give up", 2):
            self.both("give_up", retry=False)
        else:
            self.both("switch", WORKERS[1:], retry=False)

    # the line goes back, retention, retries

    @often(2, lambda self: self.ledger.updates)
    def rewind(self, data: st.DataObject) -> None:
        on_line = sorted(u.commit_no or 0 for u in self.ledger.updates.values() if u.state == "committed")
        numbers = [0, *on_line]
        if self.maybe(data, "off the line", 10):
            numbers = [u.commit_no or 0 for u in self.ledger.updates.values()] + [9]
        name = "r0" if self.maybe(data, "the same", 10) else f"r{len(self.ledger.rewinds)}"
        consumed = "spent" if self.maybe(data, "spent", 3) else "release"
        self.both("rewind", name, data.draw(st.sampled_from(numbers[-3:]), label="to"), consumed)

    @often(2, lambda self: self.out() or self.ledger.commits)
    def retention(self, data: st.DataObject) -> None:
        self.both("retain", retry=False)

    @often(2, lambda self: self.calls)
    def again(self, data: st.DataObject) -> None:
        """The same call once more, as a client sends it whose answer was lost; one of the last mostly."""
        calls = self.calls if self.maybe(data, "long ago", 3) else self.calls[-4:]
        name, args = data.draw(st.sampled_from(calls), label="call")
        self.both(name, *args, retry=False)
