"""The checker finds each kind of fault when it is planted into a sound ledger, and none before."""

from __future__ import annotations

import asyncpg

from tests.api.ledger import Ledger
from tests.ledger_checker import Acknowledged, check

PLANTED = {
    "skipped revision": (
        "1: ",
        "UPDATE rollout_audit SET revision = revision + 1 WHERE rollout_id = 'a:0' AND revision = 3;"
        "UPDATE rollouts SET revision = revision + 1 WHERE rollout_id = 'a:0'",
    ),
    "a step that the machine does not have": (
        "1: ",
        "UPDATE rollout_audit SET event = 'abort' WHERE rollout_id = 'a:0' AND revision = 3",
    ),
    "a row that its audit does not tell": (
        "1: ",
        "UPDATE rollouts SET state = 'offline', reason = 'x' WHERE rollout_id = 'b:0'",
    ),
    "double consumption": (
        "2: ",
        "INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, actor, update_id)"
        " SELECT run_no, rollout_id, 4, 'commit', 'consumed', 'consumed', actor, 'u2' FROM rollout_audit"
        " WHERE rollout_id = 'a:0' AND revision = 3",
    ),
    "commit of what another update held": (
        "2: ",
        "UPDATE rollout_audit SET update_id = 'u2' WHERE rollout_id = 'a:0' AND event = 'commit'",
    ),
    "commit number left out": ("3: ", "UPDATE updates SET commit_no = 7 WHERE update_id = 'u2'"),
    "a second line": ("3: ", "UPDATE updates SET after_commit_no = 0 WHERE update_id = 'u2'"),
    "commit after the lease": (
        "3: ",
        'UPDATE journal SET detail = detail || \'{"lease_until": "2020-01-01T00:00:00+00:00"}\''
        " WHERE event = 'update.opened' AND subject = 'u1'",
    ),
    "split group": ("3: ", "UPDATE rollouts SET update_id = 'u2' WHERE rollout_id = 'a:1'"),
    "lost rollout": ("4: ", "DELETE FROM rollouts WHERE rollout_id = 'b:1'"),
    "lost reward": ("4: ", "UPDATE rollouts SET reward = 17 WHERE rollout_id = 'a:0'"),
    "lost commit": ("4: ", "UPDATE updates SET update_id = 'u3' WHERE update_id = 'u2'"),
    "reserve outside of the lag": (
        "5: ",
        "UPDATE rollout_audit SET lag = 5 WHERE rollout_id = 'a:0' AND event = 'reserve'",
    ),
    "reserve of the future": (
        "5: ",
        "UPDATE rollout_audit SET lag = -1 WHERE rollout_id = 'a:0' AND event = 'reserve'",
    ),
    "reserve outside of the drift": (
        "5: ",
        "UPDATE rollout_audit SET drift = 0.3 WHERE rollout_id = 'a:0' AND event = 'reserve';"
        "UPDATE update_members SET drift = 0.3 WHERE rollout_id = 'a:0'",
    ),
    "a lag that the clocks contradict": ("5: ", "UPDATE rollouts SET oldest_clock = -1 WHERE rollout_id = 'a:0'"),
    "two contracts in one update": (
        "5: ",
        "UPDATE rollout_audit SET contract_hash = 'other' WHERE rollout_id = 'a:0' AND event = 'reserve'",
    ),
    "pointer going back": (
        "6: ",
        "UPDATE journal SET subject = '0' WHERE event = 'policy.activated' AND subject = '2'",
    ),
    "a switch before the artifact's commit": ("6: ", "UPDATE journal SET event = 'x' WHERE event = 'policy.committed'"),
    "a switch without an ack": (
        "6: ",
        "UPDATE journal SET detail = detail || '{\"matching\": false}'"
        " WHERE event = 'worker.acked' AND detail ->> 'version' = '2'",
    ),
    "a switch with another life's ack": (
        "6: ",
        'UPDATE journal SET detail = detail || \'{"incarnation": "w-0"}\''
        " WHERE event = 'worker.acked' AND detail ->> 'version' = '2'",
    ),
    "a hole in the journal": ("6: ", "DELETE FROM journal WHERE event = 'update.opened' AND subject = 'u2'"),
    "span never acked": (
        "7: ",
        "UPDATE journal SET event = 'x' WHERE event = 'worker.acked' AND detail ->> 'version' = '0'",
    ),
    "span acked too late": (
        "7: ",
        "UPDATE journal SET at = at + interval '1 day' WHERE event = 'worker.acked' AND detail ->> 'version' = '0'",
    ),
}

UNGUARDED = """
    DO $$ DECLARE guard record; BEGIN
        FOR guard IN SELECT conname, conrelid::regclass AS place FROM pg_constraint
                     WHERE contype = 'c' AND connamespace = 'public'::regnamespace
        LOOP EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', guard.place, guard.conname); END LOOP;
    END $$
"""


async def sound_ledger(ledger: Ledger) -> Acknowledged:
    """Two commits on one line, a switch after each, and a group that nobody took."""
    told = Acknowledged(versions={0, 1, 2})
    for number, name in enumerate(("a", "c")):
        members = await ledger.group(name, version=number)
        await ledger.open(f"u{number + 1}", version=number)
        assert await ledger.reserve(*members, update=f"u{number + 1}", after=number) == ["reserved"] * 2
        view = (await ledger.commit(f"u{number + 1}", after=number)).json()
        told.commits[view["update_id"]] = view["commit_no"]
        told.rollouts.update(members)
        told.reserves.update((f"u{number + 1}", member, 2) for member in members)
        await ledger.activate(number + 1, number)
    told.rollouts.update(await ledger.group("b", version=2))
    told.rewards = {"a:0": 0.0, "a:1": 1.0}
    return told


async def test_each_planted_fault_is_found(ledger: Ledger, database_url: str) -> None:
    told = {ledger.run_id: await sound_ledger(ledger)}
    connection = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    try:
        assert await check(connection, told) == []
        overlooked: dict[str, list[str]] = {}
        for name, (statement, planted) in PLANTED.items():
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute(UNGUARDED)
            await connection.execute(planted)
            found = await check(connection, told)
            await transaction.rollback()
            if not any(fault.startswith(statement) for fault in found):
                overlooked[name] = found
        assert overlooked == {}
        assert await check(connection, told) == []
    finally:
        await connection.close()
