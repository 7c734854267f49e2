"""Candidates: whole groups that an update could reserve, held for it while it looks at them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.rollouts.queries import for_run
from coordinator.runs.service import Run, get_run
from coordinator.updates import queries, reservation
from coordinator.updates.service import lock_update, require_open
from coordinator.wire.columns import CandidateColumns, Ragged, ReserveColumns, encode_candidates, ragged
from coordinator.wire.updates import CandidatesRequest, EmptyReason, ReserveVerdict


@dataclass(frozen=True)
class Offer:
    """What an update is offered: rows of the members of whole groups, or why there is none."""

    rows: list[Any] = field(default_factory=list)
    group_ids: list[str] = field(default_factory=list)
    empty: EmptyReason | None = None
    reserved: list[ReserveVerdict] | None = None


async def hold(
    connection: AsyncConnection, run_id: str, update_id: str, body: CandidatesRequest, caller: Caller, last: bool
) -> Offer | None:
    """Holds up to the asked number of groups, and binds them where the call asks for it.

    None where there are fewer and this is not the last try: what is held stays held, and its tokens are not read yet.
    """
    run = await get_run(connection, run_id)
    row = await lock_update(connection, run, update_id, body.owner)
    require_open(row)
    settings = run.settings
    if body.reserve and settings.drift_gate != "off":
        raise Refusal(
            "invalid_request",
            f"run {run_id} measures drift: fetch candidates, score them, then reserve with the current log-probs",
            field="reserve",
        )
    parameters: dict[str, Any] = {
        "run_no": run.run_no,
        "update_id": update_id,
        "lag_clock": row.lag_clock,
        "gate_lag": settings.lag_gate == "enforce",
        "max_lag": settings.max_lag,
        "usable_needed": settings.usable_needed,
    }
    own: list[Any] = []
    if body.reserve:
        keys = {"run_no": run.run_no, "update_id": update_id}
        own = list(await connection.execute(text(queries.OWN_GROUPS), keys))
    groups_left = (body.groups or body.rollouts or 0) - len(own)
    rollouts_left = None if body.rollouts is None else body.rollouts - sum(g.members for g in own)
    only = await _kept_to(connection, run, row, parameters)
    held: list[Any] = []
    if groups_left > 0 and (rollouts_left is None or rollouts_left > 0):
        held = list(
            await connection.execute(
                text(queries.HOLD_GROUPS),
                parameters
                | only
                | {"groups": groups_left, "rollouts": rollouts_left, "hold_seconds": settings.hold_seconds},
            )
        )
    members = sum(g.members for g in own) + sum(g.rewarded for g in held)
    enough = len(own) + len(held) >= body.groups if body.groups is not None else members >= (body.rollouts or 0)
    if not enough and not last:
        return None
    if not held and not own:
        facts = parameters | {
            "lost_after_seconds": settings.lost_after_seconds,
            "hold_seconds": settings.hold_seconds,
            "contract_no": only["contract_no"],
        }
        return Offer(empty=await _why_empty(connection, facts))
    oldest_first = sorted(held, key=lambda g: (g.oldest_clock, g.first_arrival_at, g.group_id))
    group_ids = [g.group_id for g in own] + [g.group_id for g in oldest_first]
    rows = list(
        await connection.execute(
            for_run(queries.CANDIDATES, run.group_column),
            {"run_no": run.run_no, "update_id": update_id, "lag_clock": row.lag_clock, "group_ids": group_ids},
        )
    )
    reserved = await _bind(connection, run, update_id, body, rows, caller) if body.reserve else None
    return Offer(rows, group_ids, None, reserved)


async def _kept_to(connection: AsyncConnection, run: Run, update: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """The contract and the ruleset that the answer must keep to; None where any will do."""
    apart, mixed = run.settings.other_contract == "keep_apart", run.settings.mix_rulesets
    contract_no, ruleset_no = update.contract_no, None
    if not mixed:
        keys = {"run_no": run.run_no, "update_id": update.update_id}
        ruleset_no = await connection.scalar(queries.BOUND_RULESET, keys)
    if (apart and contract_no is None) or (not mixed and ruleset_no is None):
        first = (await connection.execute(queries.PEEK_GROUP, parameters)).first()
        if first is not None:
            contract_no = first.contract_no if apart and contract_no is None else contract_no
            ruleset_no = first.ruleset_no if not mixed and ruleset_no is None else ruleset_no
    return {"contract_no": contract_no if apart else None, "ruleset_no": ruleset_no}


async def _bind(
    connection: AsyncConnection, run: Run, update_id: str, body: CandidatesRequest, rows: list[Any], caller: Caller
) -> list[ReserveVerdict]:
    assert body.after_commit_no is not None
    named = ReserveColumns(
        body.owner,
        body.after_commit_no,
        False,
        [row.rollout_id for row in rows],
        [row.revision for row in rows],
        [None] * len(rows),
        [False] * len(rows),
        ragged([np.empty(0)] * len(rows), np.float64),
    )
    unmeasured = reservation.measure(run, named, {})
    answer = await reservation.reserve(connection, run.run_id, update_id, named, unmeasured, caller)
    return answer.verdicts


async def _why_empty(connection: AsyncConnection, parameters: dict[str, Any]) -> EmptyReason:
    facts = (await connection.execute(queries.EMPTY, parameters)).one()
    since: datetime | None
    if facts.rewarded_groups:
        first = facts.first_arrival_at
        if facts.stale == facts.rewarded_groups:
            return EmptyReason(reason="all_stale", since=first)
        if facts.held:
            return EmptyReason(reason="held_by_others", since=facts.held_since)
        if facts.ahead + facts.stale == facts.rewarded_groups:
            return EmptyReason(reason="ahead_of_update", since=first)
        if facts.other_contract + facts.stale == facts.rewarded_groups:
            return EmptyReason(reason="other_contract", since=first)
        if facts.incomplete:
            return EmptyReason(reason="groups_incomplete", since=first)
        return EmptyReason(reason="other_ruleset", since=first)
    if not facts.producing:
        return EmptyReason(reason="no_live_producers", since=facts.last_heartbeat)
    since = await connection.scalar(queries.LAST_BOUND, {"run_no": parameters["run_no"]})
    return EmptyReason(reason="nothing_rewarded", since=since)


def columns(offer: Offer) -> CandidateColumns:
    """The answer as columns."""
    rows = offer.rows
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row.action_mask) for row in rows], out=offsets[1:])
    return CandidateColumns(
        rollout_id=[row.rollout_id for row in rows],
        revision=[row.revision for row in rows],
        group_id=[row.group_id for row in rows],
        task_id=[row.task_id for row in rows],
        task_source=[row.task_source for row in rows],
        sample_index=[row.sample_index for row in rows],
        attempt=[row.attempt for row in rows],
        policy_version=[row.policy_version for row in rows],
        lag=[row.lag for row in rows],
        reward=[row.reward for row in rows],
        token_ids=Ragged(np.frombuffer(b"".join(row.token_ids for row in rows), "<i4"), offsets),
        action_mask=Ragged(np.frombuffer(b"".join(row.action_mask for row in rows), np.bool_), offsets),
        behavior_log_probs=Ragged(np.frombuffer(b"".join(row.behavior_log_probs for row in rows), "<f4"), offsets),
        row_starts=[list(row.row_starts) for row in rows],
        side_data=[row.side_data for row in rows],
        groups=offer.group_ids,
        empty=offer.empty,
        contract_hash=rows[0].contract_hash if rows else None,
        reserved=offer.reserved,
    )


def to_arrow(offer: Offer) -> bytes:
    """The answer as an Arrow stream. Blocks a little: run it in a thread."""
    return encode_candidates(columns(offer))


def to_json(offer: Offer) -> dict[str, Any]:
    """The answer as a JSON object. Blocks: run it in a thread."""
    return columns(offer).to_model().model_dump(mode="json")
