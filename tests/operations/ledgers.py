"""Sound ledgers to plant faults into, and the SQL that makes what no endpoint would."""

from __future__ import annotations

from tests.api.ledger import Ledger
from tests.ledger_checker import Acknowledged

UNGUARDED = """
    DO $$ DECLARE guard record; BEGIN
        FOR guard IN SELECT conname, conrelid::regclass AS place FROM pg_constraint
                     WHERE contype = 'c' AND connamespace = 'public'::regnamespace
        LOOP EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', guard.place, guard.conname); END LOOP;
    END $$
"""

TO_THE_JOURNAL = """
    WITH numbered AS (UPDATE runs SET event_no = event_no + 1 RETURNING run_no, event_no)
    INSERT INTO journal (run_no, event_no, event, subject, actor, detail)
    SELECT run_no, event_no, '{event}', '{subject}', 'admin', '{detail}' FROM numbered
"""

_REWIND = (
    "UPDATE updates SET state = 'rewound' WHERE update_id = 'u2'",
    "UPDATE runs SET last_commit_no = 1",
    """
    INSERT INTO rewinds (run_no, rewind_id, to_commit_no, consumed, reason, actor, answer)
    SELECT run_no, 'back', 1, '{consumed}', 'restored', 'admin', '{{}}' FROM runs
    """,
    TO_THE_JOURNAL.format(
        event="line.rewound",
        subject="back",
        detail='{{"rewind_id": "back", "to_commit_no": 1, "consumed": "{consumed}", "rewound": ["u2"], "fenced": []}}',
    ),
)

RELEASE = (
    """
    INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, actor)
    SELECT run_no, rollout_id, revision + 1, 'rewind', 'consumed', 'rewarded', 'admin' FROM rollout_audit
    WHERE update_id = 'u2' AND event = 'commit'
    """,
    "UPDATE rollouts SET state = 'rewarded', update_id = NULL, revision = revision + 1 WHERE update_id = 'u2'",
    "UPDATE groups SET state = 'open', rewarded = 2 WHERE group_id = 'c'",
)

DROP = (
    """
    INSERT INTO tombstones (run_no, rollout_id, group_id, sample_index, attempt, state, revision, content_hash)
    SELECT run_no, rollout_id, group_id, sample_index, attempt, state, revision, content_hash FROM rollouts
    WHERE rollout_id = '{rollout_id}'
    """,
    "DELETE FROM rewards WHERE rollout_id = '{rollout_id}'",
    "DELETE FROM rollout_evidence WHERE rollout_id = '{rollout_id}'",
    "DELETE FROM rollouts WHERE rollout_id = '{rollout_id}'",
)
"""What retention leaves of a rollout: its audit and a tombstone."""


async def execute(ledger: Ledger, *statements: str) -> None:
    """Runs SQL on the ledger's database, for good."""
    async with ledger.api.database.engine.begin() as connection:
        for statement in statements:
            await connection.exec_driver_sql(statement)


async def consume(ledger: Ledger, told: Acknowledged, update: str, version: int, revision: int, *names: str) -> None:
    """Reserves whole groups in one update and commits it after the last commit of the line."""
    after = (await ledger.get(""))["last_commit_no"]
    members = [f"{name}:{index}" for name in names for index in range(2)]
    await ledger.open(update, version=version)
    named = [(member, revision) for member in members]
    assert await ledger.reserve(*named, update=update, after=after) == ["reserved"] * len(members)
    view = (await ledger.commit(update, after=after)).json()
    told.commits[update] = view["commit_no"]
    told.reserves.update((update, member, revision + 1) for member in members)


async def two_commits(ledger: Ledger) -> Acknowledged:
    """Group a in u1 and c in u2, a switch after each, and a group b that nobody took."""
    told = Acknowledged(versions={0, 1, 2})
    for number, name in enumerate(("a", "c")):
        told.rollouts.update(await ledger.group(name, version=number))
        await consume(ledger, told, f"u{number + 1}", number, 1, name)
        await ledger.activate(number + 1, number)
    told.rollouts.update(await ledger.group("b", version=2))
    told.rewards = {f"{name}:{index}": float(index) for name in "abc" for index in range(2)}
    return told


async def rewound(ledger: Ledger, consumed: str) -> Acknowledged:
    """The same, rewound to commit 1; then u3 commits after that, with c again if it was released, else with b."""
    told = await two_commits(ledger)
    release = consumed == "release"
    statements = [statement.format(consumed=consumed) for statement in _REWIND]
    await execute(ledger, *statements, *(RELEASE if release else ()))
    await consume(ledger, told, "u3", 2, *((4, "c") if release else (1, "b")))
    return told
