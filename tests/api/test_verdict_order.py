"""The statement that reserves gives, for any facts at all, the verdict that the rules give."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from coordinator.rollouts.queries import for_run
from coordinator.rules.lifecycle import OUTCOME_TRANSITIONS, State
from coordinator.rules.reservation import MOVES_NOTHING, REFUSAL_STATES, RESERVE_REASONS, first_reason
from coordinator.updates import queries
from tests.api.ledger import H, Ledger, ok

GROUPS = 300
SIZE = 3
CURRENT = 4
"""The lag clock of the update. Version n has lag clock n."""
VERSION_STATES = ("retired", "withdrawn", "retired", "retired", "retired", "active", "committed", "prepared")
REPLAYED = ("stale_policy", "policy_drift", "policy_withdrawn", "group_refused")

INSERT_VERSIONS = text("""
    INSERT INTO policy_versions (run_no, version, artifact_hash, kind, state, lag_clock, base_model, files, updates,
                                 activated_at, ended_at)
    SELECT :run_no, v.version, :hash, 'full', v.state, v.version, '{}', '[]', '{}', now(), now()
    FROM unnest(CAST(:versions AS int[]), CAST(:states AS text[])) AS v (version, state)
    ON CONFLICT (run_no, version) DO UPDATE SET state = excluded.state
""")
INSERT_ROLLOUTS = text("""
    INSERT INTO rollouts (run_no, rollout_id, group_id, sample_index, attempt, state, revision, reason, update_id,
                          worker_id, incarnation, contract_no, versions, oldest_clock, newest_clock, newest_version,
                          reward, reward_status, content_hash)
    SELECT :run_no, f.rollout_id, f.group_id, f.sample_index, 0, f.state, f.revision,
           CASE WHEN f.state IN ('quarantined', 'offline') THEN 'test' END, f.update_id, 'w', 'w-1',
           CASE WHEN f.state <> 'generation_failed' THEN f.contract_no END,
           ARRAY[f.oldest, f.newest], f.oldest, f.newest, f.newest,
           CASE WHEN f.state IN ('rewarded', 'reserved', 'consumed') THEN 1.0 END,
           CASE WHEN f.state IN ('rewarded', 'reserved', 'consumed') THEN 'ok'
                WHEN f.state = 'reward_failed' THEN 'error' END, '\\x00'
    FROM unnest(CAST(:rollout_id AS text[]), CAST(:group_id AS text[]), CAST(:sample_index AS int[]),
                CAST(:state AS text[]), CAST(:revision AS int[]), CAST(:update_id AS text[]), CAST(:oldest AS int[]),
                CAST(:newest AS int[]), CAST(:contract_no AS int[]))
        AS f (rollout_id, group_id, sample_index, state, revision, update_id, oldest, newest, contract_no)
""")
INSERT_CONTRACT = text("""
    INSERT INTO contracts (run_no, contract_hash, contract) VALUES (:run_no, :hash, '{}') RETURNING contract_no
""")
INSERT_EARLIER = text("""
    INSERT INTO update_members (run_no, update_id, rollout_id, revision, verdict, group_id, versions)
    SELECT :run_no, 'u', f.rollout_id, f.seen, f.verdict, f.rollout_id, '{}'
    FROM unnest(CAST(:rollout_id AS text[]), CAST(:seen AS int[]), CAST(:verdict AS text[]))
        AS f (rollout_id, seen, verdict)
""")


@dataclass(frozen=True)
class Gates:
    """What holds for a whole call."""

    live: bool = True
    gate_lag: bool = True
    gate_drift: bool = True
    usable_needed: int = 2
    stale_to: str = "offline"
    max_lag: int = 2
    max_drift: float = 0.25
    pinned: bool | None = True
    """Whether the update holds the run's own contract, the other one (False), or none yet."""


@dataclass(frozen=True)
class Fact:
    """One rollout as the ledger has it, and what a trainer says of it. `earlier`: this update's verdict at `seen`."""

    rollout_id: str
    group_id: str
    sample_index: int
    exists: bool
    state: str
    revision: int
    update_id: str | None
    oldest: int
    newest: int
    seen: int
    drift: float | None
    earlier: str | None
    own_contract: bool


def draw(rng: random.Random) -> list[Fact]:
    """Any mixture of facts, leaning to those that let a rollout come far down the order."""
    facts = []
    for group in range(GROUPS):
        own_contract = rng.random() < 0.8
        for index in range(SIZE):
            state = rng.choice([*State, *["rewarded"] * 16])
            revision = rng.randrange(4)
            seen = revision if rng.random() < 0.8 else rng.randrange(4)
            oldest, newest = sorted(rng.choice([0, 1, 2, 2, 3, 3, 4, 4, 4, 5, 6, 7]) for _ in range(2))
            bound = state in ("reserved", "consumed")
            # A rollout that an update once judged at a revision is no longer rewarded at that revision.
            judged = not (state == "rewarded" and seen == revision) and rng.random() < 0.4
            facts.append(
                Fact(
                    f"g{group}:{index}", f"g{group}", index, rng.random() < 0.95, str(state), revision,
                    rng.choice(["u", "v"]) if bound else None, oldest, newest, seen,
                    rng.choice([0.0, 0.1, 0.25, 0.25, 0.2500001, 3.0, None]),
                    rng.choice([*REPLAYED, "reserved"]) if judged else None, own_contract,
                )
            )  # fmt: skip
    rng.shuffle(facts)
    return facts


def expected(facts: list[Fact], gates: Gates) -> list[str]:
    """What the rules say. The verdict of a group is known only once each of its members has one."""

    def column(values: list[bool]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return np.array(values, dtype=np.bool_)

    pinned = gates.pinned
    if pinned is None:  # the first that could be bound decides
        fitting = [f for f in facts if f.exists and f.state == "rewarded" and f.revision == f.seen]
        pinned = fitting[0].own_contract
    drifted = [f.drift is None or f.drift > gates.max_drift for f in facts]
    conditions = {
        "missing_rollout": column([not f.exists for f in facts]),
        "idempotent_retry": column([gates.live and f.state == "reserved" and f.update_id == "u" for f in facts]),
        "update_fenced": column([not gates.live] * len(facts)),
        "revision_conflict": column([f.revision != f.seen for f in facts]),
        "not_rewarded": column([f.state != "rewarded" for f in facts]),
        "contract_mismatch": column([f.own_contract != pinned for f in facts]),
        "policy_withdrawn": column(["withdrawn" in {VERSION_STATES[v] for v in (f.oldest, f.newest)} for f in facts]),
        "candidate_not_active": column([VERSION_STATES[f.newest] in ("prepared", "committed") for f in facts]),
        "future_policy": column([f.newest > CURRENT for f in facts]),
        "stale_policy": column([gates.gate_lag and CURRENT - f.oldest > gates.max_lag for f in facts]),
        "policy_drift": column([gates.gate_drift and over for over in drifted]),
    }
    alone = [str(reason) for reason in first_reason(conditions)]
    for n, fact in enumerate(facts):  # what moved a rollout before is said again, in the place of idempotent_retry
        first = alone[n] in ("missing_rollout", "idempotent_retry")
        if gates.live and not first and fact.earlier in REPLAYED:
            alone[n] = fact.earlier
    usable = Counter(f.group_id for f, v in zip(facts, alone, strict=True) if v in ("reserved", "idempotent_retry"))
    return [
        "group_refused" if v == "reserved" and usable[f.group_id] < gates.usable_needed else v
        for f, v in zip(facts, alone, strict=True)
    ]


async def decide(ledger: Ledger, facts: list[Fact], gates: Gates) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """The statement's answer, the rollouts after it, and the audit that it wrote. Nothing is kept."""
    async with ledger.api.database.engine.connect() as connection:
        run_no = await connection.scalar(text("SELECT run_no FROM runs WHERE run_id = 'run'"))
        await connection.execute(text("UPDATE policy_versions SET state = 'retired'"))
        await connection.execute(
            INSERT_VERSIONS,
            {"run_no": run_no, "hash": H, "versions": list(range(len(VERSION_STATES))), "states": VERSION_STATES},
        )
        stored = [f for f in facts if f.exists]
        names = ("rollout_id", "group_id", "sample_index", "state", "revision", "update_id", "oldest", "newest")
        columns = {name: [getattr(f, name) for f in stored] for name in names}
        own_no = await connection.scalar(text("SELECT contract_no FROM contracts WHERE run_no = :n"), {"n": run_no})
        other_no = await connection.scalar(INSERT_CONTRACT, {"run_no": run_no, "hash": H})
        columns["contract_no"] = [own_no if f.own_contract else other_no for f in stored]
        await connection.execute(INSERT_ROLLOUTS, {"run_no": run_no} | columns)
        judged = [f for f in stored if f.earlier is not None]
        await connection.execute(
            INSERT_EARLIER,
            {
                "run_no": run_no,
                "rollout_id": [f.rollout_id for f in judged],
                "seen": [f.seen for f in judged],
                "verdict": [f.earlier for f in judged],
            },
        )
        drifts = [f.drift for f in facts]
        rows = (
            await connection.execute(
                for_run(queries.RESERVE, "group_id"),
                {
                    "run_no": run_no, "update_id": "u", "actor": "trainer:test", "live": gates.live,
                    "lag_clock": CURRENT, "gate_lag": gates.gate_lag, "max_lag": gates.max_lag,
                    "gate_drift": gates.gate_drift, "max_drift": gates.max_drift, "stale_to": gates.stale_to,
                    "usable_needed": gates.usable_needed, "policy_version": CURRENT,
                    "contract_no": {True: own_no, False: other_no, None: None}[gates.pinned],
                    "rollout_ids": [f.rollout_id for f in facts], "revisions": [f.seen for f in facts],
                    "uses": [None] * len(facts), "drifts": drifts, "drift_max": drifts, "drift_k3": drifts,
                    "drift_outside": drifts, "drift_sample_size": drifts,
                },
            )
        ).all()  # fmt: skip
        after = await connection.execute(text("SELECT rollout_id, state, revision, update_id FROM rollouts"))
        audit = await connection.execute(
            text("SELECT rollout_id, revision, event, from_state, to_state FROM rollout_audit")
        )
        return list(rows), {row.rollout_id: row for row in after}, list(audit)


@pytest.mark.parametrize(
    "gates",
    [
        Gates(),
        Gates(live=False),
        Gates(gate_lag=False, gate_drift=False),
        Gates(usable_needed=3, stale_to="quarantined", max_lag=0, max_drift=0.0),
        Gates(usable_needed=1, max_lag=4),
        Gates(pinned=False),
        Gates(pinned=None),
    ],
)
async def test_the_statement_decides_as_the_rules_do(ledger: Ledger, gates: Gates) -> None:
    ok(await ledger.open())
    for seed in range(3):
        facts = draw(random.Random(seed))
        rows, after, audit = await decide(ledger, facts, gates)
        verdicts = [row.verdict for row in rows]
        wanted = expected(facts, gates)
        assert [row.rollout_id for row in rows] == [f.rollout_id for f in facts]
        wrong = [(f, got, want) for f, got, want in zip(facts, verdicts, wanted, strict=True) if got != want]
        assert not wrong, wrong[:3]

        moved = {}
        for fact, verdict in zip(facts, wanted, strict=True):
            fits = fact.exists and fact.state == "rewarded" and fact.revision == fact.seen
            if fits and verdict not in MOVES_NOTHING and verdict != "group_refused":  # a group falls when it is counted
                stale = gates.stale_to if verdict == "stale_policy" else None
                moved[fact.rollout_id] = stale or {"reserved": "reserved", **REFUSAL_STATES}[verdict]
        for fact in facts:
            if fact.exists:
                row = after[fact.rollout_id]
                if fact.rollout_id in moved:
                    bound = "u" if moved[fact.rollout_id] == "reserved" else None
                    assert tuple(row)[1:] == (moved[fact.rollout_id], fact.revision + 1, bound)
                else:
                    assert tuple(row)[1:] == (fact.state, fact.revision, fact.update_id)
        assert {a.rollout_id: (a.revision, a.to_state) for a in audit} == {
            f.rollout_id: (f.revision + 1, moved[f.rollout_id]) for f in facts if f.rollout_id in moved
        }
        assert all((a.from_state, a.event, a.to_state) in OUTCOME_TRANSITIONS or a.event == "reserve" for a in audit)


def test_the_facts_reach_every_verdict() -> None:
    """Otherwise the test above would prove less than it says."""
    seen: Counter[str] = Counter()
    for gates in (Gates(), Gates(live=False)):
        for seed in range(3):
            seen.update(expected(draw(random.Random(seed)), gates))
    assert {reason for reason, n in seen.items() if n >= 10} == set(RESERVE_REASONS), seen
