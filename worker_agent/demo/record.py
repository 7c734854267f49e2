"""What the coordinator says happened in a run, read over its API once everything is over, and what that proves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from coordinator.client import Run
from coordinator.wire.policies import ActivationView, PolicyView
from coordinator.wire.rollouts import RolloutView, Transition
from coordinator.wire.runs import FailureView, JournalEntry, RunView
from coordinator.wire.updates import Lineage, LineageMember
from worker_agent.demo.faults import PROBE, Sent, is_copy


@dataclass(frozen=True)
class Record:
    """A run as its coordinator tells it. Lineages are of the committed updates, in the order of their commits."""

    view: RunView
    rollouts: dict[str, RolloutView]
    histories: dict[str, list[Transition]]
    lineages: list[Lineage]
    policies: list[PolicyView]
    activations: list[ActivationView]
    journal: list[JournalEntry]
    failures: list[FailureView]


@dataclass(frozen=True)
class Claim:
    """Something that the demo says happened, whether the record bears it out, and the facts."""

    title: str
    holds: bool
    facts: str


def read_record(run: Run) -> Record:
    """Everything about a run."""
    rollouts = {rollout.rollout_id: rollout for rollout in run.rollouts()}
    committed = sorted((u for u in run.updates() if u.commit_no is not None), key=lambda u: u.commit_no or 0)
    return Record(
        view=run.view(),
        rollouts=rollouts,
        histories={rollout_id: run.history(rollout_id).transitions for rollout_id in rollouts},
        lineages=[run.lineage(update.update_id) for update in committed],
        policies=run.policies(),
        activations=run.activations(),
        journal=list(run.journal()),
        failures=list(run.failures()),
    )


def promises(record: Record, workers: tuple[str, ...], updates: int) -> list[Claim]:
    """What must hold of every run."""
    return [
        _updates(record, updates),
        _once(record),
        _admissible(record),
        _confirmed(record, workers),
        _without_advantage(record),
    ]


def mishaps(record: Record, workers: tuple[str, ...], sent: Sent, hung_group: str) -> list[Claim]:
    """What was done wrong on purpose, and what became of it."""
    return [
        _tolerated(record),
        _refused(record, "a rollout that is too old", sent.stale, "offline", "stale_policy"),
        _drifted(record, sent),
        _sent_twice(record, sent),
        _timed_out(record, hung_group),
        _held_back(record, workers),
        _refused(record, "a version that its worker never acked", sent.never_acked, "quarantined", "worker_not_acked"),
    ]


def acks(record: Record, version: int) -> Iterator[JournalEntry]:
    """The acks of a version, oldest first; the worker is the entry's subject."""
    return (e for e in record.journal if e.event == "worker.acked" and e.detail["version"] == version)


def activated_at(record: Record, version: int) -> JournalEntry | None:
    """The switch to a version."""
    return next((e for e in record.journal if e.event == "policy.activated" and e.subject == str(version)), None)


def members(lineage: Lineage) -> dict[str, list[LineageMember]]:
    """The members that an update held, by group."""
    groups: dict[str, list[LineageMember]] = {}
    for member in lineage.members:
        groups.setdefault(member.group_id, []).append(member)
    return groups


def reason_of(record: Record, rollout_id: str) -> str:
    """Why the rollout last changed its state, where there was a reason."""
    return next((t.reason for t in reversed(record.histories[rollout_id]) if t.reason), "")


def _updates(record: Record, wanted: int) -> Claim:
    numbers = [lineage.update.commit_no for lineage in record.lineages]
    stepped = [line for line in record.lineages if any(m.outcome == "consumed" for m in line.members)]
    made = [version for lineage in record.lineages for version in lineage.made_versions]
    switched = [version for version in made if activated_at(record, version)]
    return Claim(
        f"{wanted} updates that consumed rollouts, each committed once, each the maker of a version that became active",
        len(stepped) >= wanted
        and numbers == list(range(1, len(numbers) + 1))
        and all(len(line.made_versions) == (line in stepped) for line in record.lineages)
        and switched == made,
        f"commits {_list(numbers)}; versions {_list(made)}, active in turn: {_list(switched)}",
    )


def _once(record: Record) -> Claim:
    commits = [sum(t.event == "commit" for t in history) for history in record.histories.values()]
    consumed = {m.rollout_id for lineage in record.lineages for m in lineage.members if m.outcome == "consumed"}
    states = {r.rollout_id for r in record.rollouts.values() if r.state == "consumed"}
    return Claim(
        "no rollout consumed twice",
        max(commits, default=0) == 1 and sum(commits) == len(consumed) and consumed == states,
        f"{sum(commits)} commits of {len(consumed)} rollouts, of {len(record.rollouts)} that arrived",
    )


def _admissible(record: Record) -> Claim:
    settings = record.view.settings
    reserved = [t for history in record.histories.values() for t in history if t.event == "reserve"]
    within = [
        t.lag is not None and t.drift is not None and 0 <= t.lag <= settings.max_lag and t.drift <= settings.max_drift
        for t in reserved
    ]
    largest = max((t.drift or 0.0 for t in reserved), default=0.0)
    return Claim(
        f"every reservation within lag {settings.max_lag} and drift {settings.max_drift}",
        bool(reserved) and all(within),
        f"{len(reserved)} reservations, largest drift {largest:.3f}",
    )


def _confirmed(record: Record, workers: tuple[str, ...]) -> Claim:
    holds, facts = True, []
    for activation in record.activations:
        asked = {worker.worker_id for worker in activation.required}
        switch = activated_at(record, activation.version)
        words = {e.subject: e for e in acks(record, activation.version) if e.detail["matching"]}
        stated = next(policy.digests for policy in record.policies if policy.version == activation.version)
        holds &= (
            switch is not None
            and set(workers) <= asked <= words.keys()
            and all(words[worker].event_no < switch.event_no for worker in asked)
            and all(_holds_what_was_stated(words[worker], stated) for worker in workers)
        )
        facts.append(f"version {activation.version}: {len(asked)} of {len(asked)} acked" if asked <= words.keys()
                     else f"version {activation.version}: acks missing")  # fmt: skip
    return Claim(
        "each version active only after every required worker had acked it, and the weights that the workers found "
        "in their engines, as loaded and as multiplied with, have the digest that the trainer stated",
        bool(record.activations) and holds,
        "; ".join(facts),
    )


def _holds_what_was_stated(ack: JournalEntry, stated: Mapping[str, str]) -> bool:
    digest = ack.detail["digest"]
    return digest is not None and digest["registered"] == digest["active"] == stated.get(digest["layout"])


def _without_advantage(record: Record) -> Claim:
    holds, discarded, groups = True, 0, 0
    for lineage in record.lineages:
        for group_id, held in members(lineage).items():
            if is_copy(group_id):
                holds &= all(m.outcome == "discarded" and reason_of(record, m.rollout_id) == "copy" for m in held)
            elif len({m.reward for m in held}) == 1:
                groups += 1
                discarded += len(held)
                holds &= all(
                    m.outcome == "discarded" and reason_of(record, m.rollout_id) == "zero_advantage" for m in held
                )
            else:
                holds &= all(m.outcome == "consumed" for m in held)
    return Claim(
        "groups whose rewards are all equal discarded at commit, with that reason",
        holds,
        f"{groups} groups, {discarded} rollouts; the probe's copies are discarded as copies",
    )


def _tolerated(record: Record) -> Claim:
    old = [(line.update, m) for line in record.lineages for m in line.members if m.lag == 1 and m.outcome == "consumed"]
    where = sorted({update.update_id for update, _ in old})
    return Claim(
        "a rollout of the version before: tolerated",
        bool(old),
        f"{len(old)} consumed at lag 1, in {', '.join(where)}; e.g. {old[0][1].rollout_id}" if old else "none",
    )


def _refused(record: Record, title: str, rollout_id: str, state: str, reason: str) -> Claim:
    rollout = record.rollouts.get(rollout_id)
    if rollout is None:
        return Claim(f"{title}: refused", False, "it never arrived")
    stamped = f"stamped version {rollout.spans[0].version}"
    return Claim(
        f"{title}: refused",
        (rollout.state, rollout.reason) == (state, reason),
        f"{rollout_id}, {stamped}: {rollout.state}, {rollout.reason}",
    )


def _drifted(record: Record, sent: Sent) -> Claim:
    title = "log-probs that were disturbed: refused for drift"
    refusals = [(line.update, r) for line in record.lineages for r in line.refusals if r.rollout_id == sent.disturbed]
    events = [(t.event, t.reason) for t in record.histories.get(sent.disturbed, [])]
    if not refusals:
        return Claim(title, False, f"{sent.disturbed}: no update asked for it")
    update, refusal = refusals[0]
    # Once its group is spent it goes from quarantine to offline, so the state alone does not tell.
    return Claim(
        title,
        refusal.verdict == "policy_drift"
        and ("quarantine", "policy_drift") in events
        and all(event != "reserve" for event, _ in events),
        f"{sent.disturbed}: {refusal.verdict} in {update.update_id}, drift {refusal.drift:.3f} against "
        f"{record.view.settings.max_drift}; quarantined",
    )


def _sent_twice(record: Record, sent: Sent) -> Claim:
    there = [record.rollouts[rollout_id] for rollout_id in sent.copies if rollout_id in record.rollouts]
    arrivals = [t for rollout in there for t in record.histories[rollout.rollout_id] if t.event == "arrive"]
    verdicts = {answer.verdict for answer in sent.second_answers}
    return Claim(
        "a batch sent twice: counted once",
        bool(there) and verdicts == {"duplicate"} and len(arrivals) == len(there) == len(sent.copies),
        f"{len(sent.copies)} sent, again answered {', '.join(sorted(verdicts))}; {len(arrivals)} arrivals on record",
    )


def _timed_out(record: Record, group_id: str) -> Claim:
    member = next((r for r in record.rollouts.values() if (r.group_id, r.sample_index) == (group_id, 0)), None)
    if member is None:
        return Claim("a reward that timed out: stays unrewarded", False, f"no rollout of {group_id}")
    failures = [f for f in record.failures if (f.rollout_id, f.stage) == (member.rollout_id, "reward")]
    events = [t.event for t in record.histories[member.rollout_id]]
    return Claim(
        "a reward that timed out: stays unrewarded",
        member.reward is None
        and member.reward_status == "timeout"
        and "reward_fail" in events
        and "reward_ready" not in events
        and {f.kind for f in failures} == {"timeout"},
        f"{member.rollout_id}: reward {member.reward}, {len(failures)} recorded failure; now {member.state}"
        + (f", {member.reason}" if member.reason else ""),
    )


def _held_back(record: Record, workers: tuple[str, ...]) -> Claim:
    title = "an ack with a wrong hash: held the switch back until it was right"
    version = next((activation.version for activation in record.activations), None)
    if version is None:
        return Claim(title, False, "no activation")
    words = list(acks(record, version))
    wrong = [e for e in words if e.subject == PROBE and not e.detail["matching"]]
    right = [e for e in words if e.subject == PROBE and e.detail["matching"]]
    others = [e for e in words if e.subject in workers and e.detail["matching"]]
    fenced = [e for e in record.journal if e.event == "worker.fenced" and e.subject == PROBE]
    switch = activated_at(record, version)
    if not (wrong and right and others and fenced and switch):
        return Claim(title, False, f"version {version}: {len(wrong)} wrong and {len(right)} right acks of {PROBE}")
    last = max(e.event_no for e in others)
    held = (switch.at - max(others, key=lambda e: e.event_no).at).total_seconds()
    return Claim(
        title,
        wrong[0].event_no < fenced[0].event_no < right[0].event_no < switch.event_no
        and {e.subject for e in others} == set(workers)
        and last < right[0].event_no,
        f"version {version}: {PROBE} fenced (event {fenced[0].event_no}), all others acked by event {last}, right ack "
        f"{right[0].event_no}, switch {switch.event_no}; held {held:.1f} s",
    )


def _list(numbers: list[int | None] | list[int]) -> str:
    return ", ".join(str(number) for number in numbers) or "none"
