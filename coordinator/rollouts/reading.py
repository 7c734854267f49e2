"""Reading rollouts: one by one, in lists with filters, one's history, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.rollouts.audit import CHANGE
from coordinator.runs.service import Run, get_run
from coordinator.wire.columns import EvidenceColumns, Ragged, base64_text, nulls_for_nan
from coordinator.wire.rollouts import (
    RolloutEvidence,
    RolloutHistory,
    RolloutList,
    RolloutView,
    Span,
    State,
    Transition,
)

LIST_ROLLOUTS = """
    SELECT r.rollout_id, e.task_id, e.task_source, r.group_id, r.sample_index, r.attempt, r.state, r.revision, r.reason,
           r.update_id, r.worker_id, r.incarnation, e.span_versions, e.span_hashes, e.span_starts, e.span_ends,
           e.span_source, e.generation, e.tokens, e.action_tokens, c.contract_hash,
           COALESCE(e.row_starts, '{{0}}') AS row_starts,
           e.side_data_digest, r.reward, r.reward_status, s.ruleset_id,
           encode(r.content_hash, 'hex') AS content_hash, e.flags, r.arrived_at
    FROM rollouts r
    JOIN rollout_evidence e USING (run_no, rollout_id)
    LEFT JOIN contracts c USING (run_no, contract_no)
    LEFT JOIN rulesets s USING (run_no, ruleset_no)
    WHERE r.run_no = :run_no {conditions}
    ORDER BY r.rollout_id LIMIT :limit
"""

GET_HISTORY = text(f"""
    SELECT {CHANGE} FROM rollout_audit WHERE run_no = :run_no AND rollout_id = :rollout_id ORDER BY revision
""")

GET_EVIDENCE = text("""
    SELECT rollout_id, token_ids, action_mask, behavior_log_probs, side_data, side_data_digest,
           COALESCE(row_starts, '{0}') AS row_starts
    FROM rollout_evidence
    WHERE run_no = :run_no AND rollout_id = ANY(CAST(:rollout_ids AS text[])) AND token_ids IS NOT NULL
    ORDER BY array_position(CAST(:rollout_ids AS text[]), rollout_id)
""")


def _view(row: Any) -> RolloutView:
    spans = tuple(
        Span(version=version, artifact_hash=artifact_hash, start=start, end=end)
        for version, artifact_hash, start, end in zip(
            row.span_versions, row.span_hashes, row.span_starts, row.span_ends, strict=True
        )
    )
    names = RolloutView.model_fields.keys() - {"spans"}
    return RolloutView(spans=spans, **{name: getattr(row, name) for name in names})


_FILTERS = {
    "state": "r.state = :state",
    "group_id": "r.group_id = :group_id",
    "version": "r.versions @> CAST(ARRAY[CAST(:version AS int)] AS int[])",
    "task_source": "e.task_source = :task_source",
    "worker_id": "r.worker_id = :worker_id",
    "reason": "r.reason = :reason",
    "arrived_from": "r.arrived_at >= :arrived_from",
    "arrived_before": "r.arrived_at < :arrived_before",
}


async def list_rollouts(
    connection: AsyncConnection,
    run_id: str,
    after: str,
    limit: int,
    *,
    state: State | None = None,
    group_id: str | None = None,
    version: int | None = None,
    task_source: str | None = None,
    worker_id: str | None = None,
    reason: str | None = None,
    arrived_from: datetime | None = None,
    arrived_before: datetime | None = None,
) -> RolloutList:
    """Rollouts by id, those after `after` that meet every filter."""
    run = await get_run(connection, run_id)
    wanted = {
        "state": state,
        "group_id": group_id,
        "version": version,
        "task_source": task_source,
        "worker_id": worker_id,
        "reason": reason,
        "arrived_from": arrived_from,
        "arrived_before": arrived_before,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    conditions = " ".join(f"AND {condition}" for condition in ("r.rollout_id > :after", *map(_FILTERS.get, given)))
    rows = await connection.execute(
        text(LIST_ROLLOUTS.format(conditions=conditions)),
        {"run_no": run.run_no, "after": after, "limit": limit} | given,
    )
    rollouts = [_view(row) for row in rows]
    return RolloutList(rollouts=rollouts, next_after=rollouts[-1].rollout_id if len(rollouts) == limit else None)


async def get_rollout(connection: AsyncConnection, run_id: str, rollout_id: str) -> RolloutView:
    """One rollout."""
    run = await get_run(connection, run_id)
    row = (
        await connection.execute(
            text(LIST_ROLLOUTS.format(conditions="AND r.rollout_id = :rollout_id")),
            {"run_no": run.run_no, "rollout_id": rollout_id, "limit": 1},
        )
    ).one_or_none()
    if row is None:
        raise Refusal("rollout_unknown", f"run {run_id} has no rollout {rollout_id}")
    return _view(row)


async def get_history(connection: AsyncConnection, run_id: str, rollout_id: str) -> RolloutHistory:
    """Every change of one rollout's state."""
    run = await get_run(connection, run_id)
    rows = await connection.execute(GET_HISTORY, {"run_no": run.run_no, "rollout_id": rollout_id})
    transitions = [Transition.model_validate(dict(row._mapping)) for row in rows]
    if not transitions:
        raise Refusal("rollout_unknown", f"run {run_id} has no rollout {rollout_id}")
    return RolloutHistory(rollout_id=rollout_id, transitions=transitions)


async def get_evidence(connection: AsyncConnection, run_id: str, rollout_id: str) -> RolloutEvidence:
    """The tokens of one rollout."""
    run = await get_run(connection, run_id)
    rows = await read_evidence(connection, run, [rollout_id])
    if not rows:
        raise Refusal("rollout_unknown", f"run {run_id} stores no tokens of a rollout {rollout_id}")
    row = rows[0]
    return RolloutEvidence(
        rollout_id=rollout_id,
        token_ids=np.frombuffer(row.token_ids, "<i4").tolist(),
        action_mask=np.frombuffer(row.action_mask, np.bool_).tolist(),
        behavior_log_probs=nulls_for_nan(np.frombuffer(row.behavior_log_probs, "<f4")),
        row_starts=tuple(row.row_starts),
        side_data=base64_text(row.side_data),
        side_data_digest=row.side_data_digest,
    )


async def read_evidence(connection: AsyncConnection, run: Run, rollout_ids: Sequence[str]) -> list[Any]:
    """The stored tokens of those rollouts that have any, in the order asked."""
    parameters = {"run_no": run.run_no, "rollout_ids": list(rollout_ids)}
    return list(await connection.execute(GET_EVIDENCE, parameters))


async def evidence_rows(
    connection: AsyncConnection, run_id: str, rollout_ids: Sequence[str]
) -> tuple[list[Any], list[str]]:
    """The rows of many rollouts' tokens, and the ids that have none."""
    rows = await read_evidence(connection, await get_run(connection, run_id), rollout_ids)
    found = {row.rollout_id for row in rows}
    return rows, [rollout_id for rollout_id in dict.fromkeys(rollout_ids) if rollout_id not in found]


def evidence_columns(rows: list[Any], missing: list[str]) -> EvidenceColumns:
    """The tokens of many rollouts as columns. Blocks a little: run it in a thread."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row.action_mask) for row in rows], out=offsets[1:])
    return EvidenceColumns(
        rollout_id=[row.rollout_id for row in rows],
        token_ids=Ragged(np.frombuffer(b"".join(row.token_ids for row in rows), "<i4"), offsets),
        action_mask=Ragged(np.frombuffer(b"".join(row.action_mask for row in rows), np.bool_), offsets),
        behavior_log_probs=Ragged(np.frombuffer(b"".join(row.behavior_log_probs for row in rows), "<f4"), offsets),
        row_starts=[list(row.row_starts) for row in rows],
        side_data=[row.side_data for row in rows],
        side_data_digest=[row.side_data_digest for row in rows],
        missing=missing,
    )
