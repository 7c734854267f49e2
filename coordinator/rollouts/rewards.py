"""Rewards: stored once for each rollout, recorded as failures, or replaced for a whole group."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.rollouts import groups, queries
from coordinator.runs.service import Run, get_run
from coordinator.wire.rollouts import (
    Rescore,
    RescoreAnswer,
    RescoreVerdict,
    Reward,
    RewardAnswer,
    RewardBatch,
    RewardVerdict,
)


async def take_rewards(connection: AsyncConnection, run_id: str, body: RewardBatch, caller: Caller) -> RewardAnswer:
    """Stores rewards and answers one verdict for each, in the order sent."""
    run = await get_run(connection, run_id)
    verdicts, _ = await store_rewards(connection, run, body.rewards, caller)
    return RewardAnswer(verdicts=verdicts)


async def store_rewards(
    connection: AsyncConnection, run: Run, rewards: Sequence[Reward], caller: Caller
) -> tuple[list[RewardVerdict], dict[str, int]]:
    """One verdict for each reward, in the order given, and the rollouts that fell with their groups: id -> revision."""
    verdicts: dict[int, RewardVerdict] = {}
    fallen: dict[str, int] = {}
    good: list[tuple[int, Reward, float | None]] = []
    for place, reward in enumerate(rewards):
        value, fault = _value(reward)
        if fault is None:
            good.append((place, reward, value))
        else:
            verdicts[place] = RewardVerdict(rollout_id=reward.rollout_id, verdict="rejected", detail=fault)
    if good:
        group_ids = await groups.lock_of_rollouts(connection, run, [r.rollout_id for _, r, _ in good])
        rulesets = await _ruleset_numbers(connection, run, [(r.ruleset_id, r.ruleset_hash) for _, r, _ in good])
        for wave in _waves(good):
            verdicts |= await _store_wave(connection, run, wave, rulesets, caller)
        fallen = await groups.refresh(connection, run, group_ids, caller.actor)
        for place, verdict in verdicts.items():
            if verdict.rollout_id in fallen:
                verdicts[place] = verdict.model_copy(
                    update={"state": "offline", "revision": fallen[verdict.rollout_id]}
                )
    return [verdicts[place] for place in range(len(rewards))], fallen


def _value(reward: Reward) -> tuple[float | None, str | None]:
    """The value of a reward, or why it is not one."""
    if reward.status != "ok":
        if reward.value is not None or reward.components is not None:
            return None, f"a reward with status {reward.status} has no value: leave value and components out"
        return None, None
    return total(reward.value, reward.components)


def total(value: float | None, components: Mapping[str, float] | None) -> tuple[float | None, str | None]:
    """The value of a good reward, given or as the sum of its components, or why there is none."""
    if value is not None:
        return value, None
    if not components:
        return None, "a reward with status ok needs a finite value, or components whose sum it is"
    try:
        return math.fsum(components.values()), None
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
    connection: AsyncConnection, run: Run, named: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], int]:
    wanted = sorted(set(named))
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
            "components": [_document(r.components) for r in rewards],
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


async def rescore(connection: AsyncConnection, run_id: str, body: Rescore, caller: Caller) -> RescoreAnswer:
    """Replaces the reward of every member of a group that has a good one, in one call; the old ones are kept.

    Refuses a group that an update holds or consumed, and a call that leaves such a member out: one that is in
    quarantine may be released later, and must not come out with a reward of another ruleset than its group's.
    """
    run = await get_run(connection, run_id)
    values: list[float] = []
    for reward in body.rewards:
        value, fault = total(reward.value, reward.components)
        if value is None:
            raise Refusal("invalid_request", f"{reward.rollout_id}: {fault}", field="rewards", item=reward.rollout_id)
        values.append(value)
    named = [reward.rollout_id for reward in body.rewards]
    if len(set(named)) != len(named):
        raise Refusal("invalid_request", "a rollout is named twice", field="rewards")
    if body.group_id not in await groups.lock(connection, run, [body.group_id]):
        raise Refusal("group_unknown", f"run {run_id} has no group {body.group_id}")
    members = {
        row.rollout_id: row
        for row in await connection.execute(
            queries.for_run(queries.GROUP_MEMBERS, run.group_column),
            {"run_no": run.run_no, "group_id": body.group_id},
        )
    }
    for rollout_id, row in members.items():
        if row.state in ("reserved", "consumed"):
            raise Refusal("group_held", f"{rollout_id} is {row.state} by update {row.update_id}", item=rollout_id)
    rewarded = {rollout_id for rollout_id, row in members.items() if row.reward_status == "ok"}
    if odd := sorted(rewarded.symmetric_difference(named)):
        what = "was not named" if odd[0] in rewarded else "is no member with a good reward"
        raise Refusal("partial_group", f"group {body.group_id}: {odd[0]} {what}", item=odd[0])
    numbers = await _ruleset_numbers(connection, run, [(body.ruleset_id, body.ruleset_hash)])
    ruleset_no = numbers[body.ruleset_id, body.ruleset_hash]
    moved = {
        row.rollout_id: row.revision
        for row in await connection.execute(
            queries.for_run(queries.RESCORE, run.group_column),
            {
                "run_no": run.run_no,
                "group_id": body.group_id,
                "rollout_ids": named,
                "values": values,
                "components": [_document(reward.components) for reward in body.rewards],
                "ruleset_no": ruleset_no,
                "actor": caller.actor,
            },
        )
    }
    return RescoreAnswer(
        verdicts=[
            RescoreVerdict(
                rollout_id=rollout_id,
                verdict="rescored" if rollout_id in moved else "duplicate",
                state=members[rollout_id].state,
                revision=moved.get(rollout_id, members[rollout_id].revision),
            )
            for rollout_id in named
        ]
    )


def _document(components: Mapping[str, float] | None) -> str | None:
    return None if components is None else json.dumps(components)
