"""Each kind of fault is found by its own statement when it is planted into a sound ledger, and none before."""

from __future__ import annotations

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from tests.api.ledger import Ledger
from tests.ledger_checker import Acknowledged, check
from tests.operations.ledgers import DROP, TO_THE_JOURNAL, UNGUARDED, execute, rewound, two_commits

# The ledger has group a consumed by u1 (commit 1), c by u2 (commit 2, rewound) and again by u3 (commit 3), and b,
# which is rewarded. Per fault: the statements that it contradicts, all of them, and the SQL that plants it.
PLANTED: dict[str, tuple[set[int], list[str]]] = {
    "a skipped revision": (
        {1},
        [
            "UPDATE rollout_audit SET revision = 2 WHERE rollout_id = 'b:0' AND revision = 1",
            "UPDATE rollouts SET revision = 2 WHERE rollout_id = 'b:0'",
        ],
    ),
    "a revision that leaves another state than the one before led to": (
        {1},
        [
            "UPDATE rollout_audit SET from_state = 'reward_failed' WHERE rollout_id = 'a:0' AND revision = 1",
        ],
    ),
    "a step that the machine does not have": (
        {1},
        ["UPDATE rollout_audit SET event = 'rescore' WHERE rollout_id = 'b:0' AND revision = 1"],
    ),
    "a row that its audit does not tell": (
        {1},
        ["UPDATE rollouts SET state = 'offline', reason = 'x' WHERE rollout_id = 'b:0'"],
    ),
    "a row bound to another update": ({1}, ["UPDATE rollouts SET update_id = 'u3' WHERE rollout_id = 'a:1'"]),
    "a row without an audit": (
        {1},
        [
            "INSERT INTO rollouts SELECT (jsonb_populate_record(r, jsonb_build_object("
            " 'rollout_id', 'x', 'group_id', 'x', 'state', 'offline', 'reason', 'x', 'reward', NULL,"
            " 'reward_status', NULL))).* FROM rollouts r WHERE rollout_id = 'b:0'"
        ],
    ),
    "a tombstone that its audit does not tell": (
        {1},
        [
            *(s.format(rollout_id="a:0") for s in DROP),
            "UPDATE tombstones SET state = 'offline'",
        ],
    ),
    "a double consumption": (
        {1, 2, 3},
        [
            "INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, actor, update_id)"
            " SELECT run_no, rollout_id, 4, 'commit', 'consumed', 'consumed', actor, 'u3' FROM rollout_audit"
            " WHERE rollout_id = 'a:0' AND revision = 3",
            "UPDATE rollouts SET revision = 4, update_id = 'u3' WHERE rollout_id = 'a:0'",
        ],
    ),
    "a rewind of what was not consumed": (
        {1, 2},
        [
            "UPDATE rollout_audit SET event = 'rewind', from_state = 'consumed', to_state = 'rewarded'"
            " WHERE rollout_id = 'b:0' AND revision = 1",
        ],
    ),
    "a commit without a reserve": (
        {1, 2},
        [
            "DELETE FROM rollout_audit WHERE rollout_id = 'a:0' AND revision = 2",
            "UPDATE rollout_audit SET revision = 2, from_state = 'rewarded' WHERE rollout_id = 'a:0' AND revision = 3",
            "UPDATE rollouts SET revision = 2 WHERE rollout_id = 'a:0'",
            "DELETE FROM update_members WHERE rollout_id = 'a:0'",
        ],
    ),
    "a commit of what another update held": (
        {2},
        [
            "UPDATE rollout_audit SET update_id = 'u3', lag = 2 WHERE rollout_id = 'a:0' AND event = 'reserve'",
            "UPDATE update_members SET update_id = 'u3' WHERE rollout_id = 'a:0'",
        ],
    ),
    "a commit by an update that did not commit": (
        {2, 3},
        [
            "UPDATE updates SET state = 'aborted', commit_no = NULL WHERE update_id = 'u2'",
        ],
    ),
    "a member that was never reserved": (
        {2},
        ["UPDATE update_members SET rollout_id = 'b:0' WHERE rollout_id = 'a:0'"],
    ),
    "a reserve after the end": (
        {2},
        ["UPDATE rollout_audit SET at = at + interval '1 day' WHERE rollout_id = 'a:0' AND event = 'reserve'"],
    ),
    "a rollout that a rewind left consumed": (
        {2},
        [
            "DELETE FROM rollout_audit WHERE rollout_id = 'c:0' AND revision > 3",
            "DELETE FROM update_members WHERE rollout_id = 'c:0' AND update_id = 'u3'",
            "UPDATE rollouts SET revision = 3, update_id = 'u2' WHERE rollout_id = 'c:0'",
        ],
    ),
    "a hole in the commit numbers": (
        {3},
        [
            "UPDATE updates SET commit_no = 4 WHERE update_id = 'u3'",
            "UPDATE runs SET commits = 4, last_commit_no = 4",
            "UPDATE journal SET detail = detail || '{\"commit_no\": 4}'"
            " WHERE event = 'update.committed' AND subject = 'u3'",
        ],
    ),
    "a commit number that only the row has": ({3}, ["UPDATE updates SET commit_no = 7 WHERE update_id = 'u2'"]),
    "a commit after one that was rewound": (
        {3},
        [
            "UPDATE updates SET after_commit_no = 2 WHERE update_id = 'u3'",
            "UPDATE journal SET detail = detail || '{\"after_commit_no\": 2}'"
            " WHERE event = 'update.committed' AND subject = 'u3'",
        ],
    ),
    "a broken after_commit_no": ({3}, ["UPDATE updates SET after_commit_no = 0 WHERE update_id = 'u3'"]),
    "a line that ends elsewhere": ({3}, ["UPDATE runs SET last_commit_no = 2"]),
    "an update that was rewound by nobody": ({3}, ["UPDATE updates SET state = 'rewound' WHERE update_id = 'u1'"]),
    "an update that a rewind forgot": ({3}, ["UPDATE updates SET state = 'committed' WHERE update_id = 'u2'"]),
    "a rewind that the journal has otherwise": ({3}, ["UPDATE rewinds SET to_commit_no = 0"]),
    "a rewind that the journal has twice": (
        {3},
        [
            TO_THE_JOURNAL.format(
                event="line.rewound",
                subject="back",
                detail='{"rewind_id": "back", "to_commit_no": 3, "consumed": "release", "rewound": [], "fenced": []}',
            ),
            "UPDATE rewinds SET to_commit_no = 3",
        ],
    ),
    "a rewind that only the journal has": ({3}, ["DELETE FROM rewinds"]),
    "an update that only the journal has": ({2, 3, 5}, ["DELETE FROM updates WHERE update_id = 'u3'"]),
    "a rewind that is told to have taken another update": (
        {3},
        ["UPDATE journal SET detail = detail || '{\"rewound\": [\"u1\"]}' WHERE event = 'line.rewound'"],
    ),
    "a rewind to what is not on the line": (
        {2, 3},
        ["UPDATE journal SET detail = detail || '{\"to_commit_no\": 9}' WHERE event = 'line.rewound'"],
    ),
    "a rollout consumed twice on the line through a rewind": (
        {2, 3},
        [
            "INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, actor)"
            " SELECT run_no, rollout_id, 4, 'rewind', 'consumed', 'rewarded', actor FROM rollout_audit"
            " WHERE rollout_id = 'a:0' AND revision = 3",
            "INSERT INTO rollout_audit SELECT (jsonb_populate_record(a, jsonb_build_object('rollout_id', 'a:0'))).*"
            " FROM rollout_audit a WHERE rollout_id = 'c:0' AND revision > 4",
            "UPDATE rollout_audit SET lag = 2 WHERE rollout_id = 'a:0' AND event = 'reserve' AND revision > 4",
            "INSERT INTO update_members SELECT (jsonb_populate_record(m, jsonb_build_object('rollout_id', 'a:0')"
            " )).* FROM update_members m WHERE rollout_id = 'c:0' AND update_id = 'u3'",
            "UPDATE rollouts SET update_id = 'u3', revision = 6 WHERE rollout_id = 'a:0'",
        ],
    ),
    "a commit after its lease": (
        {3},
        [
            'UPDATE journal SET detail = detail || \'{"lease_until": "2020-01-01T00:00:00+00:00"}\''
            " WHERE event = 'update.opened' AND subject = 'u1'",
            "UPDATE updates SET lease_until = '2020-01-01T00:00:00+00:00' WHERE update_id = 'u1'",
        ],
    ),
    "a commit after its end": (
        {3},
        [
            "UPDATE journal SET event_no = event_no + 1 WHERE event = 'update.committed' AND subject = 'u3'",
            "INSERT INTO journal (run_no, event_no, event, subject, actor, detail)"
            " SELECT run_no, event_no - 1, 'update.fenced', subject, actor, '{}' FROM journal"
            " WHERE event = 'update.committed' AND subject = 'u3'",
            "UPDATE runs SET event_no = event_no + 1",
        ],
    ),
    "a commit that the journal does not have": (
        {3},
        ["UPDATE journal SET event = 'x' WHERE event = 'update.committed' AND subject = 'u3'"],
    ),
    "a split group": ({3}, ["UPDATE update_members SET group_id = 'a' WHERE update_id = 'u3'"]),
    "a rollout lost": ({4}, ["DELETE FROM rollouts WHERE rollout_id = 'b:1'"]),
    "a rollout lost with all but its reward": (
        {4},
        [
            f"DELETE FROM {table} WHERE rollout_id = 'b:1'"
            for table in ("rollouts", "rollout_evidence", "rollout_audit")
        ],
    ),
    "tokens lost": ({4}, ["DELETE FROM rollout_evidence WHERE rollout_id = 'b:1'"]),
    "a rollout dropped while it could still be trained on": ({4}, [s.format(rollout_id="b:1") for s in DROP]),
    "a reward changed": ({4}, ["UPDATE rollouts SET reward = 17 WHERE rollout_id = 'a:0'"]),
    "a reserve over the lag": (
        {5},
        [
            "UPDATE rollout_audit SET lag = 5 WHERE rollout_id = 'a:0' AND event = 'reserve'",
            "UPDATE rollouts SET oldest_clock = -5 WHERE rollout_id = 'a:0'",
        ],
    ),
    "a reserve of the future": (
        {5},
        [
            "UPDATE rollout_audit SET lag = -1 WHERE rollout_id = 'a:0' AND event = 'reserve'",
            "UPDATE rollouts SET oldest_clock = 1 WHERE rollout_id = 'a:0'",
        ],
    ),
    "a reserve over the drift": (
        {5},
        [
            "UPDATE rollout_audit SET drift = 0.3 WHERE rollout_id = 'a:0' AND event = 'reserve'",
            "UPDATE update_members SET drift = 0.3 WHERE rollout_id = 'a:0'",
        ],
    ),
    "a reserve without a drift": (
        {5},
        [
            "UPDATE rollout_audit SET drift = 'NaN' WHERE rollout_id = 'a:0' AND event = 'reserve'",
            "UPDATE update_members SET drift = 'NaN' WHERE rollout_id = 'a:0'",
        ],
    ),
    "a drift that the members have otherwise": (
        {5},
        ["UPDATE update_members SET drift = 0.1 WHERE rollout_id = 'a:0'"],
    ),
    "limits that are not the run's": (
        {5},
        ["UPDATE rollout_audit SET max_lag = 9 WHERE rollout_id = 'a:0' AND event = 'reserve'"],
    ),
    "a lag that the clocks contradict": ({5}, ["UPDATE rollouts SET oldest_clock = -1 WHERE rollout_id = 'a:0'"]),
    "a lag that the clocks contradict, of a dropped rollout": (
        {5},
        [
            *(s.format(rollout_id="c:0") for s in DROP),
            "UPDATE rollout_audit SET lag = 0 WHERE rollout_id = 'c:0' AND update_id = 'u3' AND event = 'reserve'",
        ],
    ),
    "an update's clock that is not its version's": (
        {5},
        ["UPDATE policy_versions SET lag_clock = 7 WHERE version = 2"],
    ),
    "two contracts in one update": (
        {5},
        ["UPDATE rollout_audit SET contract_hash = 'other' WHERE rollout_id = 'a:0' AND event = 'reserve'"],
    ),
    "no contract": ({5}, ["UPDATE rollout_audit SET contract_hash = NULL WHERE update_id = 'u1'"]),
    "a pointer going back": (
        {6},
        ["UPDATE journal SET subject = '0' WHERE event = 'policy.activated' AND subject = '2'"],
    ),
    "a switch before the artifact's commit": (
        {6},
        ["UPDATE journal SET event = 'x' WHERE event = 'policy.committed'"],
    ),
    "an ack that was not for this switch": (
        {6},
        [
            "UPDATE journal SET detail = detail || '{\"activation_id\": null}'"
            " WHERE event = 'worker.acked' AND detail ->> 'version' = '2'"
        ],
    ),
    "an ack of a fenced worker": (
        {6},
        ["UPDATE journal SET event = 'worker.fenced', subject = 'w' WHERE event = 'policy.prepared' AND subject = '2'"],
    ),
    "an ack that a fence came after, though it was lifted": (
        {6},
        [
            "UPDATE journal SET event_no = event_no + 1000 WHERE event_no >="
            " (SELECT event_no FROM journal WHERE event = 'policy.activated' AND subject = '2')",
            *(
                "INSERT INTO journal (run_no, event_no, event, subject, actor, detail)"
                f" SELECT run_no, event_no - {before}, '{event}', 'w', actor, '{{}}' FROM journal"
                " WHERE event = 'policy.activated' AND subject = '2'"
                for before, event in ((1000, "worker.fenced"), (999, "worker.unfenced"))
            ),
            "UPDATE journal SET event_no = event_no - 998 WHERE event_no >= 1000",
            "UPDATE runs SET event_no = event_no + 2",
        ],
    ),
    "a switch without an ack": (
        {6, 7},
        [
            "UPDATE journal SET detail = detail || '{\"matching\": false}'"
            " WHERE event = 'worker.acked' AND detail ->> 'version' = '2'"
        ],
    ),
    "a switch with another life's ack": (
        {6, 7},
        [
            'UPDATE journal SET detail = detail || \'{"incarnation": "w-0"}\''
            " WHERE event = 'worker.acked' AND detail ->> 'version' = '2'"
        ],
    ),
    "a pointer that the journal does not tell": (
        {6},
        ["UPDATE runs SET active_version = 1"],
    ),
    "a hole in the journal": ({6}, ["DELETE FROM journal WHERE event = 'policy.prepared' AND subject = '2'"]),
    "an end of the journal that is gone": ({6}, ["UPDATE runs SET event_no = event_no + 1"]),
    "an entry that says nothing": (
        {6},
        ["UPDATE journal SET detail = '{}' WHERE event = 'activation.opened' AND subject = 'act-2'"],
    ),
    "a span that was never acked": (
        {7},
        [
            "UPDATE journal SET event = 'x' WHERE event = 'worker.acked' AND detail ->> 'version' = '0'",
        ],
    ),
    "a span that was acked too late": (
        {7},
        ["UPDATE journal SET at = at + interval '1 day' WHERE event = 'worker.acked' AND detail ->> 'version' = '0'"],
    ),
    "a span that was acked under another hash": (
        {7},
        ["UPDATE rollout_evidence SET span_hashes = ARRAY['other'] WHERE rollout_id = 'a:0'"],
    ),
    "a version of another hash": ({7}, ["UPDATE policy_versions SET artifact_hash = 'other' WHERE version = 0"]),
    "a span released without an ack": (
        {7},
        [
            "UPDATE journal SET event = 'x' WHERE event = 'worker.acked' AND detail ->> 'version' = '0'",
            *(
                "INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, actor)"
                f" SELECT run_no, rollout_id, revision + 1, '{event}', state, '{target}', 'admin' FROM rollouts"
                " WHERE rollout_id = 'b:0';"
                f"UPDATE rollouts SET state = '{target}', reason = 'x', revision = revision + 1"
                " WHERE rollout_id = 'b:0'"
                for event, target in (("quarantine", "quarantined"), ("release", "rewarded"))
            ),
        ],
    ),
    "an action token outside of the spans": (
        {7},
        ["UPDATE rollout_evidence SET span_starts = '{4}' WHERE rollout_id = 'a:0'"],
    ),
    "action tokens that were counted otherwise": (
        {7},
        ["UPDATE rollout_evidence SET action_tokens = 4 WHERE rollout_id = 'a:0'"],
    ),
}

TOLD: dict[str, Acknowledged] = {
    "a rollout": Acknowledged(rollouts={"z"}),
    "a reward": Acknowledged(rewards={"a:0": 0.5}),
    "a reserve": Acknowledged(reserves={("u1", "a:0", 3)}),
    "a commit": Acknowledged(commits={"u1": 2}),
    "a version": Acknowledged(versions={3}),
}


def numbers(found: list[str]) -> set[int]:
    return {int(fault.partition(":")[0]) for fault in found}


async def test_each_planted_fault_is_found_by_its_statement(ledger: Ledger) -> None:
    told = {ledger.run_id: await rewound(ledger, "release")}
    wrong: dict[str, list[str]] = {}
    async with ledger.api.database.engine.connect() as connection:
        assert await check(connection, told) == []
        await connection.rollback()
        await ledger.api.database.transaction(AsyncConnection.exec_driver_sql, UNGUARDED)
        for name, (statements, planted) in PLANTED.items():
            for statement in planted:
                for part in statement.split(";"):
                    await connection.exec_driver_sql(part)
            found = await check(connection)
            await connection.rollback()
            if numbers(found) != statements:
                wrong[name] = found
        assert wrong == {}, "\n".join(f"{k}: {v}" for k, v in wrong.items())
        assert await check(connection, told) == []


@pytest.mark.parametrize("what", TOLD)
async def test_what_was_acknowledged_and_is_not_there_is_found(ledger: Ledger, what: str) -> None:
    await two_commits(ledger)
    async with ledger.api.database.engine.connect() as connection:
        assert numbers(await check(connection, {ledger.run_id: TOLD[what]})) == {4}
        assert numbers(await check(connection, {"gone": Acknowledged()})) == {4}
        assert await check(connection) == []


async def test_what_a_rewind_left_spent_is_no_use_of_the_line(ledger: Ledger) -> None:
    told = {ledger.run_id: await rewound(ledger, "spent")}
    async with ledger.api.database.engine.connect() as connection:
        assert await check(connection, told) == []
        await connection.exec_driver_sql(
            "INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, actor)"
            " SELECT run_no, rollout_id, 4, 'rewind', 'consumed', 'rewarded', 'admin' FROM rollouts"
            " WHERE rollout_id = 'c:0'"
        )
        await connection.exec_driver_sql(
            "UPDATE rollouts SET state = 'rewarded', update_id = NULL, revision = 4 WHERE rollout_id = 'c:0'"
        )
        assert await check(connection, told) == [
            "2: c:0: revision 4: taken out of the commit of u2, which no rewind released (run run)"
        ]


async def test_what_retention_took_is_no_loss(ledger: Ledger) -> None:
    told = {ledger.run_id: await rewound(ledger, "release")}
    await execute(
        ledger,
        *(statement.format(rollout_id=rollout_id) for rollout_id in ("a:0", "c:1") for statement in DROP),
        "UPDATE rollout_evidence SET token_ids = NULL, action_mask = NULL, behavior_log_probs = NULL"
        " WHERE rollout_id = 'a:1'",
        "DELETE FROM rollout_evidence WHERE rollout_id = 'c:0'",
    )
    async with ledger.api.database.engine.connect() as connection:
        assert await check(connection, told) == []


async def test_a_quarantined_rollout_needs_no_ack(ledger: Ledger) -> None:
    await ledger.worker("late", ack=False)
    late = ledger.rollout("l", "l", worker_id="late", incarnation="late-1")
    assert [verdict["state"] for verdict in await ledger.submit(late)] == ["quarantined"]
    async with ledger.api.database.engine.connect() as connection:
        assert await check(connection) == []


async def test_gates_that_only_observe_are_not_held_against_a_reserve(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "observed", max_lag=0, lag_gate="observe", drift_gate="observe")
    await run.worker()
    members = await run.group("a")
    await run.activate(1, 0)
    await run.open(version=1)
    assert await run.reserve(*members, shift=1.0) == ["reserved"] * 2
    async with ledger.api.database.engine.connect() as connection:
        assert await check(connection) == []
        await connection.exec_driver_sql(
            """UPDATE runs SET settings = settings || '{"lag_gate": "enforce"}' WHERE run_id = 'observed'"""
        )
        assert numbers(await check(connection)) == {5}
