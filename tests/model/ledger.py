"""The ledger in memory: one run's rules in plain Python, for the service to be held against.

It is meant to be read and believed. Nothing here knows SQL, batches of columns or locks: a call is a method, a refusal
is `Refused`, an answer is a tuple, and a revision is the number of changes that a rollout has seen. Times are ticks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.rules.freshness import assess_policy_compatibility
from coordinator.rules.lifecycle import sources, state_for_reward, targets
from coordinator.rules.reservation import RESERVE_REASONS, first_reason
from coordinator.wire.runs import RunSettings

ACTIONS, BEHAVIOR = 3, -0.5
"""Every rollout has three action tokens, with this log-prob."""
SUSPECT_SAMPLE = 8
TAKEN = ("reserved", "idempotent_retry")


class Refused(Exception):
    """The whole call is refused with this problem code, and nothing changed."""


@dataclass(frozen=True)
class Span:
    version: int
    artifact_hash: str
    acts: bool = True
    """Whether it has action tokens."""

    def __repr__(self) -> str:
        return f"{self.version}:{self.artifact_hash[:4]}{'' if self.acts else ' masked'}"


@dataclass(frozen=True)
class Item:
    """A rollout as it is sent. Two are the same content when they are equal."""

    rollout_id: str
    group_id: str
    index: int
    attempt: int
    spans: tuple[Span, ...] = ()
    """Empty: the attempt failed and gave no tokens."""
    worker: str = "w"
    contract: int = 0
    """0 is the run's own."""
    variant: int = 0
    """Other tokens."""
    fault: str | None = None
    """Why the item is not whole."""

    @property
    def member(self) -> tuple[str, int, int]:
        return self.group_id, self.index, self.attempt


@dataclass(frozen=True)
class Reward:
    rollout_id: str
    status: str
    value: float | None
    ruleset: str


@dataclass(frozen=True)
class Wanted:
    """One rollout of a reserve call: the revision seen, and how far the current log-probs lie from the stored ones."""

    rollout_id: str
    revision: int
    shift: float = 0.0


@dataclass(frozen=True)
class Change:
    event: str
    origin: str | None
    state: str
    reason: str | None
    update: str | None
    judged: int | None
    """The version against which a gate judged, if that is why."""
    at: int


@dataclass
class Rollout:
    item: Item
    state: str = ""
    reason: str | None = None
    update: str | None = None
    reward: Reward | None = None
    """The good one, else the last failure."""
    tokens: bool = True
    oldest: int | None = None
    newest: int | None = None
    newest_version: int | None = None
    changes: list[Change] = field(default_factory=list)

    @property
    def revision(self) -> int:
        """Every event adds one."""
        return len(self.changes) - 1


@dataclass
class Group:
    at: int
    state: str = "open"
    ruleset: str | None = None
    contract: int | None = None
    overdue: bool = False
    holder: str | None = None
    held: bool = False


@dataclass
class Update:
    owner: str
    version: int
    state: str = "open"
    lapsed: bool = False
    """Its lease has ended; whoever comes by next ends the update."""
    after: int | None = None
    commit_no: int | None = None
    committed_at: int = 0
    contract: int | None = None
    refused: dict[tuple[str, int], str] = field(default_factory=dict)
    """The refusals that moved a rollout, by it and the revision at which it was named."""

    @property
    def seen(self) -> str:
        return "expired" if self.lapsed and self.state == "open" else self.state


@dataclass
class Version:
    parent: int | None
    clock: int
    artifact_hash: str
    updates: tuple[str, ...] = ()
    state: str = "committed"
    acked: set[str] = field(default_factory=set)
    restores: bool = False
    failed: bool = False
    """Whether an activation of it failed."""


Answer = tuple[Any, ...]


class Ledger:
    """One run. Its calls have the names and the order of refusals of the service's."""

    def __init__(self, settings: RunSettings, first_hash: str, workers: Iterable[str]) -> None:
        self.settings = settings
        self.size = settings.group_size or 1
        least = settings.min_usable if settings.min_usable is not None else min(2, self.size)
        self.least = self.size if least == "all" else int(least)
        self.versions = {0: Version(None, 0, first_hash, state="active", acked=set(workers))}
        self.active = 0
        self.candidate: int | None = None
        """The version whose activation is open."""
        self.rollouts: dict[str, Rollout] = {}
        self.tombstones: dict[str, Rollout] = {}
        self.groups: dict[str, Group] = {}
        self.updates: dict[str, Update] = {}
        self.rewinds: dict[str, tuple[int, str, Answer]] = {}
        self.commits = self.last_commit = self.now = 0

    # what a rollout and a group are

    def tick(self) -> int:
        self.now += 1
        return self.now

    def move(
        self, rollout: Rollout, event: str, state: str, reason: str | None = None, update: str | None = None,
        judged: int | None = None,
    ) -> None:  # fmt: skip
        """One event: only what the lifecycle allows. A reason stays with what may not be used."""
        origin = rollout.state or None
        assert state in targets(origin, event), (origin, event, state)
        rollout.state = state
        rollout.reason = reason if state in ("quarantined", "offline") else None
        rollout.update = update if state in ("reserved", "consumed") else None
        rollout.changes.append(Change(event, origin, state, reason, update, judged, self.tick()))

    def key(self, item: Item) -> str:
        """Without a group size every rollout is its own group."""
        return item.group_id if self.settings.group_size is not None else item.rollout_id

    def members(self, key: str, *states: str) -> list[Rollout]:
        found = [r for r in self.rollouts.values() if self.key(r.item) == key and (not states or r.state in states)]
        return sorted(found, key=lambda r: (r.item.index, r.item.attempt))

    def standing(self, key: str) -> list[tuple[bool, bool]]:
        """(usable, may still become so) of each member that has a rollout; a member may have several attempts."""
        attempts: defaultdict[int, list[Rollout]] = defaultdict(list)
        for rollout in self.members(key):
            attempts[rollout.item.index].append(rollout)
        return [
            (
                any(r.state in ("rewarded", "reserved", "consumed") for r in found),
                any(r.state == "generated" for r in found)
                or (
                    found[-1].state in ("reward_failed", "generation_failed")
                    and found[-1].item.attempt + 1 < self.settings.max_attempts
                ),
            )
            for found in attempts.values()
        ]

    def settled(self, key: str) -> bool:
        """Every member is usable, or will not become so any more."""
        return sum(usable or not pending for usable, pending in self.standing(key)) >= self.size

    def recount(self, keys: Iterable[str], update: str | None = None) -> None:
        """A group that cannot have enough usable members any more is refused: what is left of it goes offline."""
        for key in sorted(keys):
            lost = sum(not usable and not pending for usable, pending in self.standing(key))
            if self.groups[key].state == "open" and lost > self.size - self.least:
                self.groups[key].state = "refused"
            if self.groups[key].state == "refused":
                for rollout in self.members(key, "generated", "rewarded", "reward_failed"):
                    self.move(rollout, "set_aside", "offline", "group_refused", update)

    # arrival, rewards, release

    def judge(self, item: Item) -> str | None:
        """The arrival checks, the first that holds."""
        known = {s.version: self.versions.get(s.version) for s in item.spans}
        versions = [v for v in known.values() if v is not None]
        if None in known.values():
            return "policy_unknown"
        if any(self.versions[s.version].artifact_hash != s.artifact_hash for s in item.spans):
            return "policy_identity_conflict"
        if any(v.state == "withdrawn" for v in versions):
            return "policy_withdrawn"
        if any(item.worker not in v.acked for v in versions):
            return "worker_not_acked"
        if any(self._not_activated(s.version) for s in item.spans):
            return "candidate_not_activated"
        oldest, newest, newest_version = self.clocks(item)
        active = self.versions[self.active].clock
        if newest is not None and newest > active and newest_version != self.candidate:
            return "future_policy"
        if self.settings.lag_gate == "enforce" and oldest is not None and active - oldest > self.settings.max_lag:
            return "stale_policy"
        return None

    def _not_activated(self, number: int) -> bool:
        """Given up, or not the candidate any more: its activation failed, or a greater number became active."""
        version = self.versions[number]
        waiting = version.state in ("prepared", "committed") and number != self.candidate
        return version.state == "abandoned" or (waiting and (version.failed or number < self.active))

    def clocks(self, item: Item) -> tuple[int | None, int | None, int | None]:
        """The lag clocks of its oldest and newest action token, and the version of the newest."""
        acting = [(v.clock, s.version) for s in item.spans if s.acts and (v := self.versions.get(s.version))]
        return (min(acting)[0], max(acting)[0], max(acting)[1]) if acting else (None, None, None)

    def member_fault(self, item: Item) -> str | None:
        if self.settings.group_size is not None and item.index >= self.size:
            return "sample_index_out_of_range"
        return "attempt_out_of_range" if item.attempt >= self.settings.max_attempts else None

    def submit(self, items: Sequence[Item]) -> Answer:
        """Each is answered by itself. Within a batch the first of an id, or of a member and attempt, wins."""
        apart = self.settings.other_contract == "keep_apart"
        answers: dict[int, Answer] = {}
        stored: list[tuple[int, Item]] = []
        good: dict[int, Item] = {}
        for place, item in enumerate(items):
            fault = self.member_fault(item) or ("contract_mismatch" if item.contract and not apart else item.fault)
            if fault is not None:
                answers[place] = ("rejected", None, None, fault)
            else:
                good[place] = item
        contracts = {key: group.contract for key, group in self.groups.items()}
        seen: dict[Any, Item] = {}
        same: dict[int, str] = {}
        for place, item in good.items():
            key = self.key(item)
            if contracts.get(key) not in (None, item.contract):
                answers[place] = ("rejected", None, None, "contract_mismatch")
                continue
            verdict = self._met(item, seen)
            if verdict is None:
                contracts[key] = item.contract
                stored.append((place, item))
            elif verdict == "duplicate":
                same[place] = item.rollout_id
            else:
                answers[place] = (verdict, None, None, None)
        touched = self._store([item for _, item in stored])
        for key in touched:
            self.groups[key].contract = contracts[key]
        self.recount(touched)
        for place, item in stored:
            rollout = self.rollouts[item.rollout_id]
            answers[place] = ("accepted", rollout.state, rollout.revision, rollout.reason)
        for place, rollout_id in same.items():
            rollout = self.rollouts.get(rollout_id) or self.tombstones[rollout_id]
            answers[place] = ("duplicate", rollout.state, rollout.revision, None)
        return tuple(answers[place] for place in range(len(items)))

    def _met(self, item: Item, seen: dict[Any, Item]) -> str | None:
        """`duplicate` or `conflict` with what is stored, was stored or came earlier in the batch; None: it is new."""
        everything = {**self.tombstones, **self.rollouts}
        earlier = [r.item for r in everything.values()] + list(seen.values())
        met = [i for i in earlier if i.rollout_id == item.rollout_id or i.member == item.member]
        if not met:
            seen[item.rollout_id] = item
            return None
        return "duplicate" if met == [item] else "conflict"

    def _store(self, items: Sequence[Item]) -> set[str]:
        """Revision 0 is the arrival; a gate that refuses is a further one. Latecomers to a group that has ended too."""
        touched = {self.key(item) for item in items}
        for key in sorted(touched - self.groups.keys()):
            self.groups[key] = Group(self.tick())
        for item in items:
            rollout = self.rollouts[item.rollout_id] = Rollout(item)
            if not item.spans:
                rollout.tokens = False
                self.move(rollout, "generation_fail", "generation_failed", "error")
                continue
            rollout.oldest, rollout.newest, rollout.newest_version = self.clocks(item)
            self.move(rollout, "arrive", "generated")
            reason = self.judge(item)
            ended = self.groups[self.key(item)].state
            if reason == "stale_policy":
                event = "set_aside" if self.settings.stale_to == "offline" else "quarantine"
                self.move(rollout, event, self.settings.stale_to, reason, judged=self.active)
            elif reason is not None:
                self.move(rollout, "quarantine", "quarantined", reason)
            elif ended != "open":
                self.move(rollout, "set_aside", "offline", f"group_{ended}")
        return touched

    def fail_generation(self, items: Sequence[Item]) -> Answer:
        """Attempts that gave no tokens; each is a rollout of its own, at its end."""
        answers: list[Answer] = []
        stored: list[Item] = []
        seen: dict[Any, Item] = {}
        for item in items:
            if (fault := self.member_fault(item)) is not None:
                answers.append(("rejected", None, None, fault))
                continue
            verdict = self._met(item, seen)
            if verdict is None:
                stored.append(item)
            answers.append((verdict or "accepted", *((None, None) if verdict == "conflict" else ("generation_failed", 0)), None))  # fmt: skip  # noqa: E501
        self.recount(self._store(stored))
        return tuple(answers)

    def submit_rewards(self, rewards: Sequence[Reward]) -> Answer:
        """The first good reward of a rollout stands; the group's first pins its ruleset. A failure is never a value."""
        answers: list[Answer] = []
        for reward in rewards:
            rollout = self.rollouts.get(reward.rollout_id)
            if rollout is None:
                answers.append(("missing_rollout", None, None))
                continue
            answers.append((self._reward(rollout, reward), rollout.state, rollout.revision))
        before = {id(r): r.revision for r in self.rollouts.values()}
        named = [r for reward in rewards if (r := self.rollouts.get(reward.rollout_id)) is not None]
        self.recount({self.key(r.item) for r in named})
        for place, reward in enumerate(rewards):
            rollout = self.rollouts.get(reward.rollout_id)
            if rollout is not None and rollout.revision != before[id(rollout)]:  # it fell with its group
                answers[place] = (answers[place][0], rollout.state, rollout.revision)
        return tuple(answers)

    def _reward(self, rollout: Rollout, reward: Reward) -> str:
        group = self.groups[self.key(rollout.item)]
        stored = rollout.reward if rollout.reward is not None and rollout.reward.status == "ok" else None
        if rollout.state == "generation_failed":
            return "rejected"
        if reward.status != "ok":
            rollout.reward = stored or reward
            if rollout.state == "generated":
                self.move(rollout, "reward_fail", "reward_failed", f"reward_{reward.status}")
            return "recorded_failure"
        if stored is not None:
            return "duplicate" if stored == reward else "conflict"
        if group.ruleset not in (None, reward.ruleset):
            return "ruleset_conflict"
        group.ruleset, rollout.reward = reward.ruleset, reward
        if rollout.state in ("generated", "reward_failed"):
            self.move(rollout, "reward_ready", "rewarded")
        return "stored"

    def rescore(self, key: str, ruleset: str, values: dict[str, float]) -> Answer:
        """Replaces the good rewards of a whole group that no update holds or consumed, also of members in quarantine.

        What is rewarded and differs gets a revision.
        """
        if key not in self.groups:
            raise Refused("group_unknown")
        if self.members(key, "reserved", "consumed"):
            raise Refused("group_held")
        good = [r for r in self.rollouts.values() if self.key(r.item) == key and r.reward and r.reward.status == "ok"]
        if {r.item.rollout_id for r in good} != values.keys():
            raise Refused("partial_group")
        self.groups[key].ruleset = ruleset
        answers = []
        for rollout_id, value in values.items():
            rollout, reward = self.rollouts[rollout_id], Reward(rollout_id, "ok", value, ruleset)
            changed = rollout.reward != reward
            if changed:
                rollout.reward = reward
                if rollout.state == "rewarded":
                    self.move(rollout, "rescore", "rewarded", "rescored")
            answers.append(("rescored" if changed else "duplicate", rollout.state, rollout.revision))
        return tuple(answers)

    def _comes_out(self, rollout_id: str) -> bool:
        rollout = self.rollouts.get(rollout_id)
        if rollout is None or not rollout.tokens or self.judge(rollout.item) is not None:
            return False
        return rollout.state == "quarantined" or (rollout.state, rollout.reason) == ("offline", "group_refused")

    def release(
        self, rollout_ids: Sequence[str] | None = None, update: str | None = None, reason: str | None = None
    ) -> Answer:
        """An operator's: repeats the arrival checks. Siblings that fell with a refused group come with it."""
        if rollout_ids is None:
            rollout_ids = [
                rollout_id
                for rollout_id, r in self.rollouts.items()
                if (r.state, r.reason, r.changes[-1].update) == ("quarantined", reason, update)
            ]
        keys = {self.key(r.item) for i in rollout_ids if (r := self.rollouts.get(i)) is not None}
        accompanied = {self.key(self.rollouts[i].item) for i in rollout_ids if self._comes_out(i)}
        fallen = {
            r.item.rollout_id
            for key in accompanied
            if self.groups[key].state == "refused"
            for r in self.members(key, "offline")
            if r.reason == "group_refused"
        }
        asked = sorted({*rollout_ids, *fallen})
        verdicts: dict[str, tuple[str, str | None]] = {}
        for rollout_id in asked:
            rollout = self.rollouts.get(rollout_id)
            if rollout is None:
                verdicts[rollout_id] = ("missing_rollout", None)
                continue
            spent = self.groups[self.key(rollout.item)].state == "spent"
            stays = self.judge(rollout.item) if rollout.tokens else "beyond_retention"
            if not (rollout.state == "quarantined" or (rollout.state, rollout.reason) == ("offline", "group_refused")):
                verdicts[rollout_id] = ("not_releasable", rollout.reason)
            elif stays is not None or (spent and rollout.state == "offline"):
                verdicts[rollout_id] = ("stays", stays)
            else:
                rollout.oldest, rollout.newest, rollout.newest_version = self.clocks(rollout.item)
                if spent:
                    self.move(rollout, "set_aside", "offline", "group_spent")
                else:
                    self.move(rollout, "release", self._by_reward(rollout))
                verdicts[rollout_id] = ("released", None)
        for rollout_id, (verdict, _) in verdicts.items():
            if verdict == "released" and self.groups[key := self.key(self.rollouts[rollout_id].item)].state != "spent":
                self.groups[key].state = "open"
        self.recount(keys)
        answers = []
        for rollout_id, (verdict, why) in verdicts.items():
            now = self.rollouts.get(rollout_id)
            if verdict == "released" and now is not None:
                verdict, why = "set_aside" if now.state == "offline" else "released", now.reason
            answers.append((rollout_id, verdict, *((now.state, now.revision) if now else (None, None)), why))
        return tuple(answers)

    def _by_reward(self, rollout: Rollout) -> str:
        return state_for_reward(rollout.reward.status if rollout.reward is not None else None)

    # policy versions

    def publish(self, version: int, parent: int, updates: Sequence[str], artifact_hash: str) -> None:
        """Prepared and committed. Only of a parent that stands, by updates on the line."""
        if self.versions[parent].state == "withdrawn":
            raise Refused("policy_withdrawn")
        if any(u not in self.updates or self.updates[u].state != "committed" for u in updates):
            raise Refused("update_not_committed")
        clock = self.versions[parent].clock + version - parent
        self.versions[version] = Version(parent, clock, artifact_hash, tuple(updates))

    def open_activation(self, version: int, workers: Iterable[str]) -> None:
        """Some of the required workers serve the candidate already, others do not yet."""
        self.candidate = version
        self.versions[version].acked |= set(workers)

    def switch(self, workers: Iterable[str]) -> None:
        """The last required worker confirms the candidate: it becomes active, the old version retires."""
        assert self.candidate is not None
        self.versions[self.candidate].acked |= set(workers)
        if self.versions[self.active].state == "active":
            self.versions[self.active].state = "retired"
        self.versions[self.candidate].state = "active"
        self.active, self.candidate = self.candidate, None

    def give_up(self) -> None:
        """Abandons the candidate; what was made with it is quarantined."""
        assert self.candidate is not None
        self.versions[self.candidate].state = "abandoned"
        self._fail_activation()

    def _fail_activation(self) -> int:
        assert self.candidate is not None
        version, self.candidate = self.candidate, None
        self.versions[version].failed = True
        return self._quarantine_of([version], "candidate_not_activated")

    def _quarantine_of(self, versions: Sequence[int], reason: str) -> int:
        """Whatever has tokens of these versions and is neither held nor consumed. How many there were."""
        found = [
            r
            for r in self.rollouts.values()
            if r.state in ("generated", "rewarded", "reward_failed")
            and any(s.version in versions for s in r.item.spans)
        ]
        for rollout in found:
            self.move(rollout, "quarantine", "quarantined", reason)
        self.recount({self.key(r.item) for r in found})
        return len(found)

    # updates

    def _live(self, update_id: str, owner: str) -> Update:
        update = self._own(update_id, owner)
        if update.seen != "open":
            raise Refused("lease_expired" if update.seen == "expired" else "update_fenced")
        return update

    def _own(self, update_id: str, owner: str) -> Update:
        if update_id not in self.updates:
            raise Refused("update_unknown")
        if self.updates[update_id].owner != owner:
            raise Refused("update_owned")
        return self.updates[update_id]

    def _holds(self, update_id: str) -> list[Rollout]:
        return [r for r in self.rollouts.values() if (r.state, r.update) == ("reserved", update_id)]

    def open_update(self, update_id: str, owner: str, version: int) -> Answer:
        """Restatable until its first reservation."""
        if version not in self.versions:
            raise Refused("policy_version_unknown")
        if self.versions[version].state in ("withdrawn", "abandoned"):
            raise Refused("policy_withdrawn")
        if update_id not in self.updates:
            self.updates[update_id] = Update(owner, version)
        elif self._own(update_id, owner).version != version:
            update = self._live(update_id, owner)
            if update.after is not None:
                raise Refused("update_conflict")
            update.version = version
        return self.view(update_id)

    def view(self, update_id: str) -> Answer:
        update = self.updates[update_id]
        return (update.seen, update.version, update.after, update.commit_no, len(self._holds(update_id)))

    def renew(self, update_id: str, owner: str) -> Answer:
        self._live(update_id, owner)
        return self.view(update_id)

    def offered(self, update_id: str) -> list[str]:
        """Groups that this update may be offered: its own holds first, then the oldest.

        A group is whole when every member is settled, or at its deadline. A hold hides it from others while the
        holder lives; so does a reservation of members, until it ends.
        """
        current, found = self.versions[self.updates[update_id].version].clock, []
        for key, group in self.groups.items():
            rewarded = self.members(key, "rewarded")
            if group.state != "open" or len(rewarded) < max(1, self.least) or self.members(key, "reserved"):
                continue
            if not (self.settled(key) or group.overdue):
                continue
            clocks = [r.oldest for r in rewarded if r.oldest is not None]
            if max(r.newest for r in rewarded if r.newest is not None) > current:
                continue
            if self.settings.lag_gate == "enforce" and max(clocks) < current - self.settings.max_lag:
                continue
            other = self.updates.get(group.holder or "")
            if group.holder not in (None, update_id) and group.held and other is not None and other.seen == "open":
                continue
            found.append((group.holder != update_id, min(clocks), group.at, key))
        return [key for *_, key in sorted(found)]

    def _pick(self, update_id: str, count: int) -> list[str]:
        """The next groups for an answer, held; it keeps to one contract and, where rulesets do not mix, to one."""
        update, offered = self.updates[update_id], self.offered(update_id)
        bound = [r.reward.ruleset for r in self._holds(update_id) if r.reward is not None]
        if offered and self.settings.other_contract == "keep_apart":
            contract = self.groups[offered[0]].contract if update.contract is None else update.contract
        else:
            contract = None
        ruleset = None
        if offered and not self.settings.mix_rulesets:
            ruleset = bound[0] if bound else self.groups[offered[0]].ruleset
        picked = [
            key
            for key in offered
            if contract in (None, self.groups[key].contract) and ruleset in (None, self.groups[key].ruleset)
        ][:count]
        for key in picked:
            self.groups[key].holder, self.groups[key].held = update_id, True
        return sorted(
            picked, key=lambda k: (min(r.oldest or 0 for r in self.members(k, "rewarded")), self.groups[k].at)
        )

    def candidates(self, update_id: str, owner: str, count: int) -> Answer:
        self.expire()
        current = self.versions[self._live(update_id, owner).version].clock
        picked = self._pick(update_id, count)
        rows = [r for key in picked for r in self.members(key, "rewarded")]
        return (
            tuple(picked),
            tuple((r.item.rollout_id, r.revision, self._lag(r, current), r.reward and r.reward.value) for r in rows),
        )

    def _lag(self, rollout: Rollout, current: int) -> int | None:
        return None if rollout.oldest is None else current - rollout.oldest

    def take(self, update_id: str, owner: str, count: int, after: int) -> Answer:
        """Candidates that are bound in the same call; what the update holds already comes first and counts."""
        self.expire()
        self._live(update_id, owner)
        if self.settings.drift_gate != "off":
            raise Refused("invalid_request")
        own = {self.key(r.item) for r in self._holds(update_id)}
        if own or self.offered(update_id):
            self._on_line(self.updates[update_id], after)
        picked = self._pick(update_id, count - len(own)) if count > len(own) else []
        rows = [
            r
            for key in sorted({*own, *picked})
            for r in self.members(key, "rewarded", "reserved")
            if r.state == "rewarded" or r.update == update_id
        ]
        verdicts: Answer = ()
        if rows:
            wanted = [Wanted(r.item.rollout_id, r.revision) for r in rows]
            verdicts = self.reserve(update_id, owner, after, wanted)[0]
        return tuple(sorted({*own, *picked})), tuple(sorted(verdicts))

    def _on_line(self, update: Update, after: int) -> None:
        """The weights must contain the last commit of the surviving line, the same one from reserve to commit."""
        if after != self.last_commit or update.after not in (None, after):
            raise Refused("line_conflict")

    def reserve(
        self, update_id: str, owner: str, after: int, wanted: Sequence[Wanted], confirm: bool = False
    ) -> Answer:
        """Binds what is rewarded, at that revision, within lag and drift; else the first reason that holds."""
        self.expire()
        update, live = self._own(update_id, owner), self._own(update_id, owner).seen == "open"
        if live:
            self._on_line(update, after)
        verdicts = self._verdicts(update_id, wanted, live)
        named = [w.rollout_id for w in wanted]
        groups: dict[str, list[str]] = {}
        for rollout_id in named:
            if rollout_id in self.rollouts:
                groups.setdefault(self.key(self.rollouts[rollout_id].item), []).append(rollout_id)
        if live:
            self._whole(update_id, groups, verdicts, named)
            checked = [i for i in named if verdicts[i] in ("reserved", "policy_drift", "group_refused")]
            if self.settings.drift_gate == "enforce" and not confirm and len(checked) >= SUSPECT_SAMPLE:
                over: defaultdict[str, list[bool]] = defaultdict(list)
                for rollout_id in checked:
                    over[self.rollouts[rollout_id].item.worker].append(verdicts[rollout_id] == "policy_drift")
                if all(sum(drifted) * 2 > len(drifted) for drifted in over.values()):
                    raise Refused("drift_suspect")
            bound = [i for i in named if verdicts[i] == "reserved"]
            holds = self._holds(update_id) + [self.rollouts[i] for i in bound]
            if bound and not self.settings.mix_rulesets and len({r.reward and r.reward.ruleset for r in holds}) > 1:
                raise Refused("ruleset_conflict")
            update.after = after
            if bound and self.settings.other_contract == "keep_apart" and update.contract is None:
                update.contract = self.rollouts[bound[0]].item.contract
            self._bind(update_id, wanted, verdicts, groups)
        current = self.versions[update.version].clock
        answers: list[Answer] = []
        for w in wanted:
            rollout = self.rollouts.get(w.rollout_id)
            if rollout is None:
                answers.append((w.rollout_id, verdicts[w.rollout_id], None, None, None))
            else:
                lag = self._lag(rollout, current)
                answers.append((w.rollout_id, verdicts[w.rollout_id], rollout.state, rollout.revision, lag))
        told = []
        for key, ids in groups.items():
            left = {i: r.value for i in ids if verdicts[i] not in TAKEN and (r := self.rollouts[i].reward) is not None}
            told.append((key, sum(verdicts[i] in TAKEN for i in ids), {i: v for i, v in left.items() if v is not None}))
        return tuple(answers), tuple(told)

    def _verdicts(self, update_id: str, wanted: Sequence[Wanted], live: bool) -> dict[str, str]:
        update = self.updates[update_id]
        current = self.versions[update.version].clock
        contract = update.contract if self.settings.other_contract == "keep_apart" else 0
        verdicts: dict[str, str] = {}
        for w in wanted:
            rollout = self.rollouts.get(w.rollout_id)
            if rollout is None:
                verdicts[w.rollout_id] = "missing_rollout"
                continue
            if contract is None and (rollout.state, rollout.revision) == ("rewarded", w.revision):
                contract = rollout.item.contract
            former = update.refused.get((w.rollout_id, w.revision))
            mine = (rollout.state, rollout.update) == ("reserved", update_id)
            if live and not mine and former is not None:  # a retry replays it, in this place
                verdicts[w.rollout_id] = former
                continue
            gate = self._gate(rollout, w.shift, current)
            made = [v for s in rollout.item.spans if (v := self.versions.get(s.version)) is not None]
            newest = None if rollout.newest_version is None else self.versions[rollout.newest_version].state
            holds = {
                "idempotent_retry": live and mine,
                "update_fenced": not live,
                "revision_conflict": rollout.revision != w.revision,
                "not_rewarded": rollout.state != "rewarded",
                "contract_mismatch": contract not in (None, rollout.item.contract),
                "policy_withdrawn": any(v.state == "withdrawn" for v in made),
                "candidate_not_active": newest in ("prepared", "committed"),
                "future_policy": rollout.newest is not None and rollout.newest > current,
                "stale_policy": gate == "stale_policy" and self.settings.lag_gate == "enforce",
                "policy_drift": gate == "policy_drift" and self.settings.drift_gate == "enforce",
            }
            verdicts[w.rollout_id] = str(first_reason({k: np.array([v]) for k, v in holds.items()}, RESERVE_REASONS)[0])
        return verdicts

    def _gate(self, rollout: Rollout, shift: float, current: int) -> str:
        """Lag by the oldest action token, then the drift; a gate that only observes lets the next one look."""
        max_lag = self.settings.max_lag if self.settings.lag_gate == "enforce" else 1_000_000
        log_probs = [BEHAVIOR] * ACTIONS
        moved = [BEHAVIOR + shift] * ACTIONS
        clock = current if rollout.oldest is None else min(rollout.oldest, current)
        return str(
            assess_policy_compatibility(
                log_probs, moved, [True] * ACTIONS, clock, current, max_lag, self.settings.max_drift
            )["reason"]
        )

    def _whole(self, update_id: str, groups: dict[str, list[str]], verdicts: dict[str, str], named: list[str]) -> None:
        """A call names all rewarded members of its groups. A group that another update has members of, or that has
        too few usable ones, is not bound at all."""
        for key, ids in groups.items():
            former = [i for i in ids if verdicts[i] == "idempotent_retry" or self._replayed(update_id, i, verdicts)]
            if former != ids and any(r.item.rollout_id not in named for r in self.members(key, "rewarded")):
                raise Refused("partial_group")
            elsewhere = any(r.update != update_id for r in self.members(key, "reserved"))
            if elsewhere or sum(verdicts[i] in TAKEN for i in ids) < self.least:
                verdicts.update({i: "group_refused" for i in ids if verdicts[i] == "reserved"})

    def _replayed(self, update_id: str, rollout_id: str, verdicts: dict[str, str]) -> bool:
        rollout = self.rollouts[rollout_id]
        return rollout.state != "rewarded" and verdicts[rollout_id] in (
            v for (i, _), v in self.updates[update_id].refused.items() if i == rollout_id
        )

    def _bind(
        self, update_id: str, wanted: Sequence[Wanted], verdicts: dict[str, str], groups: dict[str, list[str]]
    ) -> None:
        update = self.updates[update_id]
        seen = {w.rollout_id: w.revision for w in wanted}
        fresh = [i for ids in groups.values() for i in ids if self._open_to(i, seen[i])]
        for rollout_id in fresh:
            rollout, verdict = self.rollouts[rollout_id], verdicts[rollout_id]
            if verdict == "reserved":
                self.move(rollout, "reserve", "reserved", None, update_id)
                continue
            if verdict == "stale_policy":
                event = "set_aside" if self.settings.stale_to == "offline" else "quarantine"
                self.move(rollout, event, self.settings.stale_to, verdict, update_id, update.version)
            elif verdict in ("policy_drift", "policy_withdrawn"):
                self.move(rollout, "quarantine", "quarantined", verdict, update_id, update.version)
            else:
                continue
            update.refused[rollout_id, seen[rollout_id]] = verdict
        self.recount(groups, update_id)
        for rollout_id in fresh:
            if verdicts[rollout_id] == "group_refused" and self.rollouts[rollout_id].state == "offline":
                update.refused[rollout_id, seen[rollout_id]] = "group_refused"

    def _open_to(self, rollout_id: str, revision: int) -> bool:
        rollout = self.rollouts[rollout_id]
        return (rollout.state, rollout.revision) == ("rewarded", revision)

    def commit(self, update_id: str, owner: str, after: int, discards: Sequence[str] = ()) -> Answer:
        """Consumes all that the update holds, once. Its groups are spent; what is left of them goes offline."""
        update = self._own(update_id, owner)
        if update.state in ("committed", "rewound"):
            return self.view(update_id)
        self._live(update_id, owner)
        self._on_line(update, after)
        held = self._holds(update_id)
        versions = {update.version, *(s.version for r in held for s in r.item.spans)}
        if any(self.versions[v].state == "withdrawn" for v in versions):
            raise Refused("policy_withdrawn")
        if set(discards) - {r.item.rollout_id for r in held}:
            raise Refused("invalid_request")
        self.commits = self.last_commit = update.commit_no = self.commits + 1
        update.state, update.after, update.committed_at = "committed", after, self.tick()
        for rollout in held:
            if rollout.item.rollout_id in discards:
                self.move(rollout, "discard", "offline", "no advantage", update_id)
            else:
                self.move(rollout, "commit", "consumed", None, update_id)
        for key in {self.key(r.item) for r in held}:
            self.groups[key].state, self.groups[key].holder = "spent", None
            for rollout in self.members(key, *sources("set_aside")):
                self.move(rollout, "set_aside", "offline", "group_spent", update_id)
        return self.view(update_id)

    def abort(self, update_id: str, owner: str, quarantine: bool) -> Answer:
        if self._own(update_id, owner).state != "aborted":
            self._live(update_id, owner)
            self._end(update_id, "aborted", quarantine)
        return self.view(update_id)

    def _end(self, update_id: str, state: str, quarantine: bool) -> None:
        """Without a commit: what it held is rewarded again, or quarantined."""
        held = self._holds(update_id)
        for rollout in held:
            event, to = ("quarantine", "quarantined") if quarantine else ("abort", "rewarded")
            self.move(rollout, event, to, f"update_{state}", update_id)
        self.updates[update_id].state = state
        self.recount({self.key(r.item) for r in held}, update_id)

    def expire(self) -> None:
        """Ends every update that outlived its lease, by the run's rule."""
        for update_id in sorted(u for u, update in self.updates.items() if update.seen != update.state):
            self._end(update_id, "expired", self.settings.on_expiry == "quarantine")

    # the line goes back, and retention

    def rewind(self, rewind_id: str, to: int, consumed: str) -> Answer:
        """The line goes back to a commit. What came after it is undone, once."""
        if rewind_id in self.rewinds:
            if self.rewinds[rewind_id][:2] != (to, consumed):
                raise Refused("rewind_conflict")
            return self.rewinds[rewind_id][2]
        if to > self.commits:
            raise Refused("commit_unknown")
        if to and (to, "committed") not in {(u.commit_no, u.state) for u in self.updates.values()}:
            raise Refused("commit_rewound")
        if self.commits - to > self.settings.rewind_commits:
            raise Refused("beyond_retention")
        self.expire()
        fenced = sorted(i for i, u in self.updates.items() if u.state == "open")
        rewound = sorted(i for i, u in self.updates.items() if u.state == "committed" and (u.commit_no or 0) > to)
        withdrawn, quarantined = self._withdraw(rewound)
        for update_id in fenced:
            self._end(update_id, "fenced", False)
        for update_id in rewound:
            self.updates[update_id].state = "rewound"
        self.last_commit = to
        released = self._bring_back(rewind_id, rewound if consumed == "release" else [], rewound + fenced, withdrawn)
        quarantined += self._quarantine_of(withdrawn, "policy_withdrawn")
        answer = (tuple(rewound), tuple(fenced), tuple(withdrawn), released, quarantined, self._restore())
        self.rewinds[rewind_id] = (to, consumed, answer)
        return answer

    def _withdraw(self, updates: Sequence[str]) -> tuple[list[int], int]:
        """The versions that these updates made, and all that came of those. An open activation of one fails.

        Second: how many rollouts that quarantined.
        """
        made: set[int] = set()
        for number, version in sorted(self.versions.items()):
            if version.parent in made or set(version.updates) & set(updates):
                made.add(number)
        withdrawn = sorted(n for n in made if self.versions[n].state not in ("withdrawn", "abandoned"))
        quarantined = self._fail_activation() if self.candidate in withdrawn else 0
        for number in withdrawn:
            self.versions[number].state = "withdrawn"
        return withdrawn, quarantined

    def _bring_back(self, rewind_id: str, given_up: list[str], undone: list[str], withdrawn: list[int]) -> int:
        """What undone updates consumed, and what they, or gates judging by withdrawn versions, set aside.

        The groups of these are open again, unless somebody else's consumed members stay in them; then who fell with
        such a group, or came too late for it, comes back as well. What retention took the tokens of stays.
        """

        def caused(change: Change) -> bool:
            if change.state == "consumed":
                return change.update in given_up
            return change.update in undone or change.judged in withdrawn

        def comes(rollout: Rollout) -> bool:
            if rollout.state not in sources("rewind") or rollout.reason == "policy_withdrawn" or not rollout.tokens:
                return False
            last = rollout.changes[-1]
            was_out = last.event == "set_aside" and last.origin == "quarantined"
            return caused(last) and (not was_out or caused(rollout.changes[-2]))

        coming = [r for r in self.rollouts.values() if comes(r)]
        keys = {self.key(r.item) for r in coming}
        keys -= {k for k in keys if any(r not in coming for r in self.members(k, "consumed"))}
        back = [r for r in coming if self.key(r.item) in keys]
        back += [
            r
            for key in keys
            for r in self.members(key, "offline")
            if r not in coming
            and r.tokens
            and (r.reason == "group_refused" or (r.reason == "group_spent" and r.changes[-1].origin != "quarantined"))
        ]
        for rollout in back:
            self.move(rollout, "rewind", self._by_reward(rollout), f"rewind {rewind_id}")
        for key in keys:
            self.groups[key].state, self.groups[key].holder = "open", None
        self.recount(keys)
        return len(back)

    def _restore(self) -> int | None:
        """When the active version is withdrawn and none that restores one is left: its nearest ancestor that stands."""
        waiting = [v for v in self.versions.values() if v.restores and v.state in ("prepared", "committed")]
        if self.versions[self.active].state != "withdrawn" or waiting:
            return None
        ancestor = self.active
        while self.versions[ancestor].state in ("withdrawn", "abandoned"):
            ancestor = self.versions[ancestor].parent or 0
        old, number = self.versions[ancestor], max(self.versions) + 1
        self.versions[number] = Version(ancestor, old.clock, old.artifact_hash, restores=True)
        return number

    def retain(self) -> int:
        """Retention with no age at all: tokens go where nothing can bring a rollout back, rows once its group ended."""
        count = 0
        for rollout in [r for r in self.rollouts.values() if self._over(r)]:
            if self.settings.evidence_retention_seconds is not None:
                count += rollout.tokens
                rollout.tokens = False
            ended = self.groups[self.key(rollout.item)].state != "open"
            if self.settings.rollout_retention_seconds is not None and ended:
                count += 1
                rollout.tokens = False
                self.tombstones[rollout.item.rollout_id] = self.rollouts.pop(rollout.item.rollout_id)
        return count

    def _over(self, rollout: Rollout) -> bool:
        """What the last `rewind_commits` commits touched is kept whole, and so is what an open update put aside."""
        if rollout.state not in ("consumed", "quarantined", "offline"):
            return False
        last, horizon = rollout.changes[-1], self.commits - self.settings.rewind_commits
        by = self.updates.get(last.update or "")
        if by is not None and (by.state == "open" or (by.commit_no or 0) > horizon):
            return False
        if by is not None and by.commit_no is not None:
            return True
        of_itself = by is None and last.judged is None and rollout.reason not in ("group_refused", "group_spent")
        reach = [u.committed_at for u in self.updates.values() if u.commit_no == horizon]
        return of_itself or any(last.at <= at for at in reach)
