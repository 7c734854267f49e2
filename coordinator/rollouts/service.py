"""Rewards, reading, and the moves of rollouts that other nouns ask for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.rollouts import groups, queries
from coordinator.runs.service import Run, get_run
from coordinator.wire.columns import nulls_for_nan
from coordinator.wire.rollouts import (
    Reward,
    RewardAnswer,
    RewardBatch,
    RewardVerdict,
    RolloutEvidence,
    RolloutHistory,
    RolloutList,
    RolloutView,
    Span,
    State,
    Transition,
)


async def take_rewards(connection: AsyncConnection, run_id: str, body: RewardBatch, caller: Caller) -> RewardAnswer:
    """Stores rewards and answers one verdict for each, in the order sent."""
    run = await get_run(connection, run_id)
    verdicts: dict[int, RewardVerdict] = {}
    good: list[tuple[int, Reward, float | None]] = []
    for place, reward in enumerate(body.rewards):
        value, fault = _value(reward)
        if fault is None:
            good.append((place, reward, value))
        else:
            verdicts[place] = RewardVerdict(rollout_id=reward.rollout_id, verdict="rejected", detail=fault)
    if good:
        group_ids = await groups.lock_of_rollouts(connection, run, [r.rollout_id for _, r, _ in good])
        rulesets = await _ruleset_numbers(connection, run, [r for _, r, _ in good])
        for wave in _waves(good):
            verdicts |= await _store_wave(connection, run, wave, rulesets, caller)
        fallen = await groups.refresh(connection, run, group_ids, caller.actor)
        for place, verdict in verdicts.items():
            if verdict.rollout_id in fallen:
                verdicts[place] = verdict.model_copy(
                    update={"state": "offline", "revision": fallen[verdict.rollout_id]}
                )
    return RewardAnswer(verdicts=[verdicts[place] for place in range(len(body.rewards))])


def _value(reward: Reward) -> tuple[float | None, str | None]:
    """The value of a reward, or why it is not one."""
    if reward.status != "ok":
        if reward.value is not None or reward.components is not None:
            return None, f"a reward with status {reward.status} has no value: leave value and components out"
        return None, None
    if reward.value is not None:
        return reward.value, None
    if not reward.components:
        return None, "a reward with status ok needs a finite value, or components whose sum it is"
    try:
        return math.fsum(reward.components.values()), None
    except OverflowError:  # the components are finite, each by itself
        return None, "the sum of the components is too large for a float64"


def _waves(
    rewards: Sequence[tuple[int, Reward, float | None]],
) -> list[list[tuple[int, Reward, float | None]]]:
    """Splits a batch so that each wave names a rollout once; usually one wave."""
    waves: list[list[tuple[int, Reward, float | None]]] = []
    seen: dict[str, int] = {}
    for entry in rewards:
        n = seen[entry[1].rollout_id] = seen.get(entry[1].rollout_id, -1) + 1
        if n == len(waves):
            waves.append([])
        waves[n].append(entry)
    return waves


async def _ruleset_numbers(
    connection: AsyncConnection, run: Run, rewards: Sequence[Reward]
) -> dict[tuple[str, str], int]:
    wanted = sorted({(r.ruleset_id, r.ruleset_hash) for r in rewards})
    ids, hashes = [w[0] for w in wanted], [w[1] for w in wanted]
    await connection.execute(queries.CLAIM_RULESETS, {"run_no": run.run_no, "ids": ids, "hashes": hashes})
    rows = await connection.execute(queries.FIND_RULESETS, {"run_no": run.run_no, "ids": ids})
    return {(row.ruleset_id, row.ruleset_hash): row.ruleset_no for row in rows}


async def _store_wave(
    connection: AsyncConnection,
    run: Run,
    wave: Sequence[tuple[int, Reward, float | None]],
    rulesets: dict[tuple[str, str], int],
    caller: Caller,
) -> dict[int, RewardVerdict]:
    rewards = [reward for _, reward, _ in wave]
    rows = await connection.execute(
        queries.for_run(queries.REWARD, run.group_column),
        {
            "run_no": run.run_no,
            "actor": caller.actor,
            "rollout_id": [r.rollout_id for r in rewards],
            "status": [r.status for r in rewards],
            "value": [value for _, _, value in wave],
            "components": [json.dumps(r.components) if r.components is not None else None for r in rewards],
            "ruleset_no": [rulesets[r.ruleset_id, r.ruleset_hash] for r in rewards],
            "message": [r.message for r in rewards],
        },
    )
    details = {
        "conflict": "the rollout has another reward; the first one stands",
        "ruleset_conflict": "the group's first reward came under another ruleset",
        "missing_rollout": "there is no such rollout",
        "rejected": "the generation failed: there is nothing to reward",
    }
    return {
        place: RewardVerdict(
            rollout_id=reward.rollout_id,
            verdict=row.verdict,
            state=row.state,
            revision=row.revision,
            detail=details.get(row.verdict),
        )
        for (place, reward, _), row in zip(wave, rows, strict=True)
    }


async def quarantine_unconsumed(connection: AsyncConnection, run: Run, version: int, reason: str, actor: str) -> None:
    """Quarantines every rollout whose newest tokens are of this version and that no update holds or consumed."""
    rows = (
        await connection.execute(
            queries.for_run(queries.UNCONSUMED_OF_VERSION, run.group_column),
            {"run_no": run.run_no, "version": version},
        )
    ).all()
    group_ids = sorted({row.group_id for row in rows})
    await groups.lock(connection, run, group_ids)
    await connection.execute(
        text(queries.QUARANTINE),
        {
            "run_no": run.run_no,
            "rollout_ids": [row.rollout_id for row in rows],
            "reason": reason,
            "actor": actor,
        },
    )
    await groups.refresh(connection, run, group_ids, actor)


def _view(row: Any) -> RolloutView:
    spans = tuple(
        Span(version=version, artifact_hash=artifact_hash, start=start, end=end)
        for version, artifact_hash, start, end in zip(
            row.span_versions, row.span_hashes, row.span_starts, row.span_ends, strict=True
        )
    )
    names = RolloutView.model_fields.keys() - {"spans"}
    return RolloutView(spans=spans, **{name: getattr(row, name) for name in names})


async def list_rollouts(
    connection: AsyncConnection,
    run_id: str,
    state: State | None,
    group_id: str | None,
    after: str,
    limit: int,
) -> RolloutList:
    """Rollouts by id, those after `after`."""
    run = await get_run(connection, run_id)
    conditions = "AND r.rollout_id > :after"
    parameters: dict[str, Any] = {"run_no": run.run_no, "after": after, "limit": limit}
    for name, value in (("state", state), ("group_id", group_id)):
        if value is not None:
            conditions += f" AND r.{name} = :{name}"
            parameters[name] = value
    rows = await connection.execute(text(queries.LIST_ROLLOUTS.replace("{conditions}", conditions)), parameters)
    rollouts = [_view(row) for row in rows]
    return RolloutList(rollouts=rollouts, next_after=rollouts[-1].rollout_id if len(rollouts) == limit else None)


async def get_rollout(connection: AsyncConnection, run_id: str, rollout_id: str) -> RolloutView:
    """One rollout."""
    run = await get_run(connection, run_id)
    row = (
        await connection.execute(
            text(queries.LIST_ROLLOUTS.replace("{conditions}", "AND r.rollout_id = :rollout_id")),
            {"run_no": run.run_no, "rollout_id": rollout_id, "limit": 1},
        )
    ).one_or_none()
    if row is None:
        raise Refusal("rollout_unknown", f"run {run_id} has no rollout {rollout_id}")
    return _view(row)


async def get_history(connection: AsyncConnection, run_id: str, rollout_id: str) -> RolloutHistory:
    """Every change of one rollout's state."""
    run = await get_run(connection, run_id)
    rows = await connection.execute(queries.GET_HISTORY, {"run_no": run.run_no, "rollout_id": rollout_id})
    transitions = [Transition.model_validate(dict(row._mapping)) for row in rows]
    if not transitions:
        raise Refusal("rollout_unknown", f"run {run_id} has no rollout {rollout_id}")
    return RolloutHistory(rollout_id=rollout_id, transitions=transitions)


async def get_evidence(connection: AsyncConnection, run_id: str, rollout_id: str) -> RolloutEvidence:
    """The tokens of one rollout."""
    run = await get_run(connection, run_id)
    row = (
        await connection.execute(queries.GET_EVIDENCE, {"run_no": run.run_no, "rollout_ids": [rollout_id]})
    ).one_or_none()
    if row is None:
        raise Refusal("rollout_unknown", f"run {run_id} has no rollout {rollout_id}")
    return RolloutEvidence(
        rollout_id=rollout_id,
        token_ids=np.frombuffer(row.token_ids, "<i4").tolist(),
        action_mask=np.frombuffer(row.action_mask, np.bool_).tolist(),
        behavior_log_probs=nulls_for_nan(np.frombuffer(row.behavior_log_probs, "<f4")),
    )
