"""Generation failures: an attempt that gave no tokens is a rollout of its own, at its end."""

from __future__ import annotations

import logging
from typing import Any, Literal

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.access import Caller
from coordinator.rollouts import groups, queries
from coordinator.rollouts.arrival import count_rejections, member_fault, own_group
from coordinator.rollouts.retention import await_tombstones
from coordinator.rules.identity import Fault, canonical_hash
from coordinator.runs.service import Run, get_run
from coordinator.wire.rollouts import ArrivalAnswer, ArrivalVerdict, GenerationFailure, GenerationFailureBatch

log = logging.getLogger("coordinator.arrival")

# Items are unique by rollout_id and by (group_id, sample_index, attempt); the groups' rows are locked.
FAIL_GENERATION = text("""
    WITH item AS (
        SELECT * FROM unnest(
            CAST(:rollout_id AS text[]), CAST(:task_id AS text[]), CAST(:task_source AS text[]),
            CAST(:group_id AS text[]), CAST(:sample_index AS int[]), CAST(:attempt AS int[]),
            CAST(:worker_id AS text[]), CAST(:incarnation AS text[]), CAST(:kind AS text[]), CAST(:message AS text[]),
            CAST(:content_hash AS bytea[])
        ) AS i (rollout_id, task_id, task_source, group_id, sample_index, attempt, worker_id, incarnation, kind,
                message, content_hash)
    ), placed AS (
        INSERT INTO rollouts (run_no, rollout_id, group_id, sample_index, attempt, state, revision, worker_id,
                              incarnation, versions, content_hash)
        SELECT :run_no, rollout_id, group_id, sample_index, attempt, 'generation_failed', 0, worker_id, incarnation,
               '{}', content_hash
        FROM item i
        WHERE NOT EXISTS (SELECT FROM tombstones t WHERE t.run_no = :run_no AND t.rollout_id = i.rollout_id)
          AND NOT EXISTS (SELECT FROM tombstones t WHERE t.run_no = :run_no AND t.group_id = i.group_id
                          AND t.sample_index = i.sample_index AND t.attempt = i.attempt)
        ORDER BY rollout_id
        ON CONFLICT DO NOTHING
        RETURNING rollout_id
    ), evidence AS (
        INSERT INTO rollout_evidence (run_no, rollout_id, task_id, task_source, span_versions, span_hashes, span_starts,
                                      span_ends, span_source, generation, flags, action_tokens, tokens)
        SELECT :run_no, rollout_id, task_id, task_source, '{}', '{}', '{}', '{}', 'dispatch', '{}', '{}', 0, 0
        FROM item JOIN placed USING (rollout_id)
    ), audit AS (
        INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor)
        SELECT :run_no, rollout_id, 0, 'generation_fail', NULL, 'generation_failed', kind, :actor
        FROM item JOIN placed USING (rollout_id)
    ), failed AS (
        INSERT INTO failures (run_no, stage, kind, message, actor, rollout_id, worker_id)
        SELECT :run_no, 'generation', kind, message, :actor, rollout_id, worker_id
        FROM item JOIN placed USING (rollout_id)
    )
    SELECT rollout_id FROM placed
""")

# A ticket is redeemed by its group's first member, whatever became of it.
REDEEM = text("""
    DELETE FROM tickets WHERE run_no = :run_no AND group_id = ANY(CAST(:group_ids AS text[]))
""")

_COLUMNS = (
    "rollout_id", "task_id", "task_source", "group_id", "sample_index", "attempt", "worker_id", "incarnation", "kind",
    "message",
)  # fmt: skip


Placed = tuple[int, GenerationFailure]
"""A failure and its place in the batch."""


def _hash(failure: GenerationFailure) -> bytes:
    """What makes two reports the same; a report that is sent again may be worded otherwise."""
    return bytes.fromhex(canonical_hash(failure.model_dump(exclude={"kind", "message"})))


async def take_failures(
    connection: AsyncConnection, run_id: str, body: GenerationFailureBatch, caller: Caller
) -> ArrivalAnswer:
    """Records failed attempts and answers one verdict for each, in the order sent."""
    run = await get_run(connection, run_id)
    verdicts: dict[int, ArrivalVerdict] = {}
    good: list[tuple[int, GenerationFailure]] = []
    rejected: list[tuple[str, Fault]] = []
    for place, failure in enumerate(body.failures):
        fault = member_fault(failure, run, caller)
        if fault is None:
            good.append((place, failure))
            continue
        rejected.append((caller.worker_id or failure.worker_id, fault))
        log.info("run %s: rejected %s from %s: %s", run_id, failure.rollout_id, caller.actor, fault.detail)
        verdicts[place] = ArrivalVerdict(
            rollout_id=failure.rollout_id, verdict="rejected", reason=fault.code, detail=fault.detail
        )
    await count_rejections(connection, run, rejected)
    group_ids = sorted({getattr(failure, run.group_column) for _, failure in good})
    await groups.claim(connection, run, dict.fromkeys(group_ids))
    while good:
        first, repeats = _first_of_each(good)
        verdicts |= await _store(connection, run, first, caller)
        good = []
        for (place, failure), (earlier_place, earlier) in repeats:
            if verdicts[earlier_place].verdict == "conflict":  # it is not here, and not in the way
                good.append((place, failure))
                continue
            same = failure.rollout_id == earlier.rollout_id and _hash(failure) == _hash(earlier)
            verdicts[place] = _verdict(run, failure, "duplicate" if same else "conflict")
    if any(verdict.verdict == "conflict" for verdict in verdicts.values()):
        await connection.execute(
            queries.for_run(queries.DROP_EMPTY_GROUPS, run.group_column),
            {"run_no": run.run_no, "group_ids": group_ids},
        )
    return ArrivalAnswer(verdicts=[verdicts[place] for place in range(len(body.failures))])


def _first_of_each(items: list[Placed]) -> tuple[list[Placed], list[tuple[Placed, Placed]]]:
    """Within one batch the first of a rollout_id, or of a (group, sample, attempt), wins over later ones."""
    first: list[Placed] = []
    repeats: list[tuple[Placed, Placed]] = []
    seen: dict[Any, Placed] = {}
    for item in items:
        failure = item[1]
        keys = (failure.rollout_id, (failure.group_id, failure.sample_index, failure.attempt))
        earlier = next((seen[key] for key in keys if key in seen), None)
        if earlier is not None:
            repeats.append((item, earlier))
            continue
        seen.update(dict.fromkeys(keys, item))
        first.append(item)
    return first, repeats


def _verdict(
    run: Run, failure: GenerationFailure, verdict: Literal["accepted", "duplicate", "conflict"]
) -> ArrivalVerdict:
    if verdict == "conflict":
        detail = "this rollout_id or this attempt of the member is taken"
        return ArrivalVerdict(rollout_id=failure.rollout_id, verdict=verdict, detail=detail)
    return ArrivalVerdict(
        rollout_id=failure.rollout_id,
        verdict=verdict,
        state="generation_failed",
        revision=0,
        detail=own_group(run, failure),
    )


async def _store(
    connection: AsyncConnection, run: Run, items: list[tuple[int, GenerationFailure]], caller: Caller
) -> dict[int, ArrivalVerdict]:
    failures = [failure for _, failure in items]
    group_ids = sorted({getattr(failure, run.group_column) for failure in failures})
    await await_tombstones(connection, run, failures)
    rows = await connection.scalars(
        FAIL_GENERATION,
        {
            "run_no": run.run_no,
            "actor": caller.actor,
            "content_hash": [_hash(failure) for failure in failures],
            **{name: [getattr(failure, name) for failure in failures] for name in _COLUMNS},
        },
    )
    placed = set(rows.all())
    known = {}
    if len(placed) < len(failures):
        left_out = [failure.rollout_id for failure in failures if failure.rollout_id not in placed]
        rows_known = await connection.execute(queries.FIND_KNOWN, {"run_no": run.run_no, "rollout_ids": left_out})
        known = {row.rollout_id: row.content_hash for row in rows_known}
    if placed:
        redeemed = sorted({getattr(f, run.group_column) for f in failures if f.rollout_id in placed})
        await connection.execute(REDEEM, {"run_no": run.run_no, "group_ids": redeemed})
    await groups.refresh(connection, run, group_ids, caller.actor)
    verdicts: dict[int, ArrivalVerdict] = {}
    for place, failure in items:
        if failure.rollout_id in placed:
            verdicts[place] = _verdict(run, failure, "accepted")
        else:
            same = known.get(failure.rollout_id) == _hash(failure)
            verdicts[place] = _verdict(run, failure, "duplicate" if same else "conflict")
    return verdicts
