"""What can be done with runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.operations.journal import record_event
from coordinator.rules.identity import canonical_hash
from coordinator.rules.lifecycle import State
from coordinator.rules.manifest import artifact_hash
from coordinator.runs import queries
from coordinator.storage.settled import settled_before
from coordinator.wire.policies import PolicyRef
from coordinator.wire.runs import (
    CreateRun,
    FailureList,
    FailureView,
    GenerationContract,
    Journal,
    JournalEntry,
    RunCounts,
    RunList,
    RunSettings,
    RunView,
)


@dataclass(frozen=True)
class Run:
    """A run as a request found it. Its settings never change; pointer and counters may have moved since."""

    run_no: int
    run_id: str
    settings: RunSettings
    contract: GenerationContract
    contract_hash: str
    contract_no: int
    vocab_size: int
    active: PolicyRef
    active_clock: int
    commits: int
    last_commit_no: int
    event_no: int
    created_at: datetime

    @property
    def group_column(self) -> str:
        """The rollout column that names its group: without a group size every rollout is its own group."""
        return "group_id" if self.settings.group_size is not None else "rollout_id"

    def view(self) -> RunView:
        """As it goes over the wire."""
        return RunView(
            run_id=self.run_id,
            settings=self.settings,
            contract=self.contract,
            contract_hash=self.contract_hash,
            vocab_size=self.vocab_size,
            active=self.active,
            last_commit_no=self.last_commit_no,
            event_no=self.event_no,
            created_at=self.created_at,
        )


@lru_cache(maxsize=1024)
def _settings(document: str) -> RunSettings:
    return RunSettings.model_validate_json(document)


@lru_cache(maxsize=1024)
def _contract(document: str) -> GenerationContract:
    return GenerationContract.model_validate_json(document)


def _run(row: Any) -> Run:
    return Run(
        run_no=row.run_no,
        run_id=row.run_id,
        settings=_settings(row.settings),
        contract=_contract(row.contract),
        contract_hash=row.contract_hash,
        contract_no=row.contract_no,
        vocab_size=row.vocab_size,
        active=PolicyRef(version=row.active_version, artifact_hash=row.active_hash),
        active_clock=row.active_clock,
        commits=row.commits,
        last_commit_no=row.last_commit_no,
        event_no=row.event_no,
        created_at=row.created_at,
    )


async def get_run(connection: AsyncConnection, run_id: str) -> Run:
    """The run, without a lock."""
    row = (await connection.execute(queries.GET_RUN, {"run_id": run_id})).one_or_none()
    if row is None:
        raise Refusal("run_unknown", f"there is no run {run_id}")
    return _run(row)


async def lock_run(connection: AsyncConnection, run_id: str) -> Run:
    """The run, locked until the transaction ends: first in the order of locks."""
    await connection.execute(queries.LOCK_RUN, {"run_id": run_id})
    return await get_run(connection, run_id)


async def create_run(connection: AsyncConnection, body: CreateRun, caller: Caller) -> tuple[RunView, bool]:
    """Creates a run with its first version active, or finds the same one. Second: whether it is new."""
    base_model = body.policy.base_model.model_dump()
    contract_hash = canonical_hash(body.contract.model_dump())
    run_no = await connection.scalar(
        queries.INSERT_RUN,
        {
            "run_id": body.run_id,
            "settings": body.settings.model_dump_json(),
            "contract": body.contract.model_dump_json(),
            "contract_hash": contract_hash,
            "vocab_size": body.vocab_size,
            "version": body.policy.version,
        },
    )
    if run_no is None:
        run = await get_run(connection, body.run_id)
        first = (await connection.execute(queries.GET_FIRST_VERSION, {"run_no": run.run_no})).one()
        same = (
            run.settings == body.settings
            and run.contract == body.contract
            and run.vocab_size == body.vocab_size
            and first.version == body.policy.version
            and json.loads(first.base_model) == base_model
        )
        if not same:
            raise Refusal("run_conflict", f"run {body.run_id} exists with other settings, contract or policy")
        return run.view(), False
    await connection.execute(
        queries.CLAIM_CONTRACTS,
        {"run_no": run_no, "hashes": [contract_hash], "contracts": [body.contract.model_dump_json()]},
    )
    first_hash = artifact_hash("base", base_model, [])
    await connection.execute(
        queries.INSERT_FIRST_VERSION,
        {
            "run_no": run_no,
            "version": body.policy.version,
            "artifact_hash": first_hash,
            "base_model": json.dumps(base_model),
        },
    )
    await record_event(
        connection,
        run_no,
        "run.created",
        body.run_id,
        caller.actor,
        version=body.policy.version,
        artifact_hash=first_hash,
    )
    return (await get_run(connection, body.run_id)).view(), True


async def list_runs(connection: AsyncConnection, caller: Caller) -> RunList:
    """Every run that the caller may see."""
    rows = await connection.execute(queries.LIST_RUNS, {"run_id": caller.run_id})
    return RunList(runs=[_run(row).view() for row in rows])


async def run_ids(connection: AsyncConnection) -> list[str]:
    """The ids of all runs, the newest first."""
    rows = (await connection.execute(queries.LIST_RUNS, {"run_id": None})).all()
    return [row.run_id for row in reversed(rows)]


async def contract_numbers(
    connection: AsyncConnection, run: Run, contracts: Iterable[GenerationContract]
) -> dict[GenerationContract, int]:
    """The number of each contract in this run, given on its first appearance."""
    numbers = {run.contract: run.contract_no}
    new = {canonical_hash(c.model_dump()): c for c in contracts if c not in numbers}
    if new:
        hashes = sorted(new)
        parameters = {"run_no": run.run_no, "hashes": hashes}
        documents = [new[h].model_dump_json() for h in hashes]
        await connection.execute(queries.CLAIM_CONTRACTS, parameters | {"contracts": documents})
        for row in await connection.execute(queries.FIND_CONTRACTS, parameters):
            numbers[new[row.contract_hash]] = row.contract_no
    return numbers


async def count_rollouts(connection: AsyncConnection, run_id: str) -> RunCounts:
    """How many rollouts are in each state, zeros included."""
    run = await get_run(connection, run_id)
    found = await counts(connection, run)
    return RunCounts(
        rollouts={state.value: found.get(state.value, 0) for state in State},
        evidence_bytes=found.get("evidence_bytes", 0),
    )


async def counts(connection: AsyncConnection, run: Run) -> dict[str, int]:
    """The counted things of a run by name: each state, and `evidence_bytes`."""
    rows = await connection.execute(queries.COUNTS, {"run_no": run.run_no})
    return {row.name: row.n for row in rows}


def journal_entry(row: Any) -> JournalEntry:
    """A row of the journal as it goes over the wire."""
    return JournalEntry(
        event_no=row.event_no,
        event=row.event,
        subject=row.subject,
        actor=row.actor,
        at=row.at,
        detail=json.loads(row.detail),
    )


async def get_journal(connection: AsyncConnection, run_id: str, after: int, limit: int) -> Journal:
    """Journal entries after a number."""
    run = await get_run(connection, run_id)
    rows = await connection.execute(queries.GET_JOURNAL, {"run_no": run.run_no, "after": after, "limit": limit})
    entries = [journal_entry(row) for row in rows]
    return Journal(entries=entries, next_after=entries[-1].event_no if entries else after)


async def get_failures(
    connection: AsyncConnection,
    run_id: str,
    after: int,
    limit: int,
    stage: str | None,
    newest_first: bool,
) -> FailureList:
    """Recorded failures after a number in their order, or before it in the other; all or those of one stage."""
    run = await get_run(connection, run_id)
    parameters: dict[str, Any] = {"run_no": run.run_no, "after": after, "limit": limit, "stage": stage}
    parameters["settled"] = await settled_before(connection)
    statement = queries.GET_NEWEST_FAILURES if newest_first else queries.GET_FAILURES
    rows = await connection.execute(statement, parameters)
    failures = [FailureView.model_validate(dict(row._mapping)) for row in rows]
    return FailureList(failures=failures, next_after=failures[-1].failure_no if failures else after)
