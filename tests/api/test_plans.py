"""How the hot statements are planned on a database that was never analyzed: what one batch costs must not grow with its
run, nor with the square of the batch. A planner that knows nothing takes a run for two rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.access import Caller
from coordinator.rollouts import arrival
from coordinator.rollouts.rewards import take_rewards
from coordinator.runs.service import get_run
from coordinator.updates import candidates, reservation, service
from coordinator.wire.columns import ReserveColumns, ragged, rollout_columns
from coordinator.wire.rollouts import RewardBatch, Rollout
from coordinator.wire.updates import CandidatesRequest, CommitUpdate
from tests.api.ledger import BEHAVIOR, Api, H, Ledger

CALLER = Caller("t", "t", "admin", None, None)
SIZE, BATCH = 4, 32
FULL = 1500  # groups that are there already
ENOUGH = 1000  # visits of one kind that a batch may need; its run has more groups, and the batch has 128 * 128 pairs


class Explained:
    """Every statement of a connection, run once more under EXPLAIN ANALYZE and taken back, before it is run."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.statements = 0

    @contextlib.contextmanager
    def watching(self, connection: AsyncConnection) -> Iterator[None]:
        sync = connection.sync_connection
        assert sync is not None

        def look(_: Any, cursor: Any, statement: str, parameters: Any, *__: Any) -> None:
            if not statement.strip().upper().startswith(("SELECT", "WITH", "INSERT", "UPDATE", "DELETE")):
                return
            self.statements += 1
            cursor.execute("SAVEPOINT look")
            cursor.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}", parameters)
            plan = cursor.fetchone()[0]
            cursor.execute("ROLLBACK TO look")
            self._judge(" ".join(statement.split())[:80], plan[0]["Plan"])

        event.listen(sync, "before_cursor_execute", look)
        try:
            yield
        finally:
            event.remove(sync, "before_cursor_execute", look)

    def _judge(self, statement: str, node: dict[str, Any]) -> None:
        # Candidates are chosen among all groups that are offered; they have an index of their own.
        all_offered = node.get("Index Name") == "groups_open"
        visited = node["Actual Rows"] * node["Actual Loops"] if "Relation Name" in node and not all_offered else 0
        for what, n in (
            (f"rows of {node.get('Relation Name')}", visited),
            ("pairs compared in vain", node.get("Rows Removed by Join Filter", 0) * node["Actual Loops"]),
            ("rows filtered out", node.get("Rows Removed by Filter", 0) * node["Actual Loops"]),
        ):
            if n > ENOUGH:
                self.faults.append(f"{statement}: {node['Node Type']}: {n:.0f} {what}")
        for child in node.get("Plans", ()):
            self._judge(statement, child)


async def explained(api: Api, found: Explained, work: Any, *arguments: Any) -> Any:
    """Runs `work(connection, *arguments)` in a transaction that is watched."""

    async def watched(connection: AsyncConnection) -> Any:
        with found.watching(connection):
            return await work(connection, *arguments)

    return await api.database.transaction(watched)


async def take_in(ledger: Ledger, numbers: range, found: Explained | None) -> None:
    """Groups arrive whole and are rewarded, each in one call."""

    async def call(work: Any, *arguments: Any) -> Any:
        if found is None:
            return await ledger.api.database.transaction(work, *arguments)
        return await explained(ledger.api, found, work, *arguments)

    bodies = [ledger.rollout(f"g{n:05d}:{i}", f"g{n:05d}", i) for n in numbers for i in range(SIZE)]
    columns = rollout_columns([Rollout.model_validate(body) for body in bodies])
    run = await call(get_run, ledger.run_id)
    answer = await call(arrival.take_in, run, arrival.examine(columns, run, CALLER), CALLER)
    assert {v.verdict for v in answer.verdicts} == {"accepted"}
    rewards = [
        {"rollout_id": body["rollout_id"], "status": "ok", "value": 1.0, "ruleset_id": "rules", "ruleset_hash": H}
        for body in bodies
    ]
    rewarded = await call(take_rewards, ledger.run_id, RewardBatch.model_validate({"rewards": rewards}), CALLER)
    assert {v.verdict for v in rewarded.verdicts} == {"stored"}


async def test_a_batch_costs_the_same_in_a_run_of_any_size(api: Api) -> None:
    for table in ("groups", "rollouts", "rollout_evidence", "rollout_audit", "rewards", "update_members", "acks"):
        async with api.database.engine.begin() as connection:
            await connection.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = false)"))
    ledger = await Ledger.create(api, group_size=SIZE)
    await ledger.worker()
    found = Explained()
    for first in range(0, FULL, FULL // 4):
        await take_in(ledger, range(first, first + FULL // 4), None)
    await take_in(ledger, range(FULL, FULL + BATCH), found)
    assert found.statements > 10

    for commit_no in range(3):
        update = f"u{commit_no}"
        assert (await ledger.open(update)).status_code == 201
        asking = CandidatesRequest(owner="t-1", groups=BATCH)
        offer = await explained(api, found, candidates.hold, ledger.run_id, update, asking, CALLER, True)
        rows = offer.rows
        columns = ReserveColumns(
            "t-1",
            commit_no,
            False,
            [row.rollout_id for row in rows],
            [row.revision for row in rows],
            [None] * len(rows),
            [True] * len(rows),
            ragged([[0.0] * 3 + [BEHAVIOR] * 3] * len(rows), "f8"),
        )
        assert len(rows) == BATCH * SIZE
        run, evidence = await explained(api, found, reservation.read_evidence, ledger.run_id, columns)
        drift = reservation.measure(run, columns, evidence)
        reserved = await explained(api, found, reservation.reserve, ledger.run_id, update, columns, drift, CALLER)
        assert {v.verdict for v in reserved.verdicts} == {"reserved"}
        closing = CommitUpdate(owner="t-1", after_commit_no=commit_no)
        await explained(api, found, service.commit, ledger.run_id, update, closing, CALLER)
    await explained(api, found, api.app.state.standing._read)
    assert not found.faults, "\n".join(sorted(set(found.faults)))
