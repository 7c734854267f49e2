"""Quarantine: what may not be used is put there, and an operator may release it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.rollouts import groups
from coordinator.rollouts.queries import (
    IDENTITY_REASONS,
    JUDGE_VERSIONS,
    SPAN_CHECKS,
    STATE_BY_REWARD,
    for_run,
    states,
)
from coordinator.runs.service import Run, get_run
from coordinator.wire.rollouts import Quarantine, QuarantineEntry, Release, ReleaseAnswer, ReleaseVerdict

# What no update holds or consumed and that has tokens of one of these versions. It arrived after the first of them was
# prepared, or before that, was quarantined since nobody knew the version, and has been released since.
UNCONSUMED_OF_VERSIONS = """
    WITH since AS MATERIALIZED (
        SELECT min(prepared_at) AS at FROM policy_versions
        WHERE run_no = :run_no AND version = ANY(CAST(:versions AS int[]))
    )
    SELECT rollout_id, {group} AS group_id FROM rollouts
    WHERE run_no = :run_no AND versions && CAST(:versions AS int[])
      AND state IN ('generated', 'rewarded', 'reward_failed') AND arrived_at >= (SELECT at FROM since)
    UNION
    SELECT r.rollout_id, r.{group} AS group_id FROM rollout_audit a
    CROSS JOIN LATERAL (SELECT * FROM rollouts WHERE run_no = :run_no AND rollout_id = a.rollout_id LIMIT 1) r
    WHERE a.run_no = :run_no AND a.event = 'release' AND a.at >= (SELECT at FROM since)
      AND r.versions && CAST(:versions AS int[]) AND r.state IN ('generated', 'rewarded', 'reward_failed')
"""

# Quarantines what no update holds of these rollouts.
QUARANTINE = f"""
    WITH target AS (
        SELECT r.rollout_id, r.state, r.revision FROM rollouts r
        WHERE r.run_no = :run_no AND r.rollout_id = ANY(CAST(:rollout_ids AS text[]))
          AND r.state IN {states("quarantine")} AND r.state <> 'reserved'
    ), moved AS (
        UPDATE rollouts r SET state = 'quarantined', reason = :reason, revision = t.revision + 1
        FROM target t WHERE r.run_no = :run_no AND r.rollout_id = t.rollout_id AND r.revision = t.revision
        RETURNING r.rollout_id, r.revision, t.state AS from_state
    )
    INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor)
    SELECT :run_no, rollout_id, revision, 'quarantine', from_state, 'quarantined', :reason, :actor FROM moved
"""

# By the change that put each of them there, which is its last one.
LIST_QUARANTINE = text("""
    SELECT r.reason, a.update_id, count(*) AS rollouts, min(a.at) AS since, max(a.at) AS until
    FROM rollouts r
    CROSS JOIN LATERAL (
        SELECT update_id, at FROM rollout_audit
        WHERE run_no = r.run_no AND rollout_id = r.rollout_id AND revision = r.revision LIMIT 1
    ) AS a
    WHERE r.run_no = :run_no AND r.state = 'quarantined'
    GROUP BY r.reason, a.update_id
    ORDER BY until DESC, r.reason, a.update_id LIMIT :limit
""")

UPDATE_THERE = text("SELECT update_id FROM updates WHERE run_no = :run_no AND update_id = :update_id")

# What one update quarantined: refused at its reserve (one revision later), or held when it ended (two).
QUARANTINED_BY = """
    SELECT r.rollout_id FROM update_members m JOIN rollouts r USING (run_no, rollout_id)
    WHERE m.run_no = :run_no AND m.update_id = :update_id
      AND r.state = 'quarantined' AND r.reason = :reason AND r.revision IN (m.revision + 1, m.revision + 2)
    ORDER BY r.rollout_id
"""

# Those that fell with the refused groups of these rollouts.
FALLEN_SIBLINGS = """
    SELECT s.rollout_id FROM groups g JOIN rollouts s ON s.run_no = g.run_no AND s.{group} = g.group_id
    WHERE g.run_no = :run_no AND g.group_id = ANY(CAST(:group_ids AS text[])) AND g.state = 'refused'
      AND s.state = 'offline' AND s.reason = 'group_refused'
"""

# Holds each rollout against the arrival checks once more. Those that pass go where their stored reward has them, or
# offline where their group is spent; siblings only with one that was named. Groups that were refused are open again.
RELEASE = f"""
    WITH i AS (
        SELECT r.rollout_id, r.rollout_id AS item, r.state, r.revision, r.reason AS held_for, r.reward_status,
            r.worker_id, r.incarnation, r.{{group}} AS group_key, g.state AS group_state,
            e.token_ids IS NULL AS dropped, e.span_versions, e.span_hashes, e.span_starts, e.span_ends, e.action_mask
        FROM rollouts r
        JOIN rollout_evidence e USING (run_no, rollout_id)
        JOIN groups g ON g.run_no = r.run_no AND g.group_id = r.{{group}}
        WHERE r.run_no = :run_no AND r.rollout_id = ANY(CAST(:rollout_ids AS text[]))
          AND (r.state = 'quarantined' OR (r.state = 'offline' AND r.reason = 'group_refused'))
    ), s AS (
        SELECT i.item, s.version, s.artifact_hash,
            position('\\x01' IN substring(i.action_mask FROM s.start_at + 1 FOR s.end_at - s.start_at)) > 0 AS acts
        FROM i, unnest(i.span_versions, i.span_hashes, i.span_starts, i.span_ends)
            AS s (version, artifact_hash, start_at, end_at)
    ), p AS (
        SELECT v.version, v.lag_clock
        FROM runs r JOIN policy_versions v ON v.run_no = r.run_no AND v.version = r.active_version
        WHERE r.run_no = :run_no
    ), j AS (
        SELECT i.item,
            {SPAN_CHECKS},
            min(v.lag_clock) FILTER (WHERE s.acts) AS oldest_clock,
            max(v.lag_clock) FILTER (WHERE s.acts) AS newest_clock,
            (array_agg(s.version ORDER BY v.lag_clock DESC NULLS LAST, s.version DESC) FILTER (WHERE s.acts))[1]
                AS newest_version
        FROM i JOIN s USING (item) CROSS JOIN p
        LEFT JOIN policy_versions v ON v.run_no = :run_no AND v.version = s.version
        LEFT JOIN acks a ON a.run_no = :run_no AND a.worker_id = i.worker_id AND a.incarnation = i.incarnation
            AND a.version = s.version AND a.matching
        GROUP BY i.item
    ), judged AS (
        SELECT i.rollout_id, i.state, i.revision, i.reward_status, i.group_key, i.group_state,
            j.oldest_clock, j.newest_clock, j.newest_version,
            CASE
                WHEN i.dropped THEN 'beyond_retention'
                {IDENTITY_REASONS}
                WHEN :gate_lag AND p.lag_clock - j.oldest_clock > :max_lag THEN 'stale_policy'
            END AS stays_for
        FROM i JOIN j USING (item) CROSS JOIN p
    ), comes AS (
        SELECT *, rollout_id = ANY(CAST(:named AS text[])) OR group_key IN (
            SELECT group_key FROM judged WHERE stays_for IS NULL AND rollout_id = ANY(CAST(:named AS text[]))) AS asked
        FROM judged
    ), moves AS (
        SELECT *, CASE
            WHEN group_state <> 'spent' THEN {STATE_BY_REWARD}
            WHEN state = 'quarantined' THEN 'offline'
        END AS next_state
        FROM comes WHERE stays_for IS NULL AND asked
    ), moved AS (
        UPDATE rollouts r SET state = m.next_state, revision = m.revision + 1,
            reason = CASE WHEN m.next_state = 'offline' THEN 'group_spent' END,
            oldest_clock = m.oldest_clock, newest_clock = m.newest_clock, newest_version = m.newest_version
        FROM moves m
        WHERE r.run_no = :run_no AND r.rollout_id = m.rollout_id AND r.revision = m.revision
          AND m.next_state IS NOT NULL
        RETURNING r.rollout_id, r.state, r.revision, r.reason
    ), audit AS (
        INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor)
        SELECT :run_no, moved.rollout_id, moved.revision,
            CASE moved.state WHEN 'offline' THEN 'set_aside' ELSE 'release' END, j.state, moved.state, moved.reason,
            :actor
        FROM moved JOIN judged j USING (rollout_id)
    ), opened AS (
        UPDATE groups g SET state = 'open'
        WHERE g.run_no = :run_no AND g.state = 'refused'
          AND g.group_id IN (SELECT j.group_key FROM moved JOIN judged j USING (rollout_id))
    )
    SELECT j.rollout_id, j.stays_for, moved.rollout_id IS NOT NULL AS moved, COALESCE(moved.state, j.state) AS state,
        COALESCE(moved.revision, j.revision) AS revision, moved.reason
    FROM comes j LEFT JOIN moved USING (rollout_id) WHERE j.asked
"""


async def quarantine_of_versions(
    connection: AsyncConnection, run: Run, versions: Sequence[int], reason: str, actor: str
) -> None:
    """Quarantines every rollout with tokens of one of these versions that no update holds or consumed."""
    found = (
        await connection.execute(
            for_run(UNCONSUMED_OF_VERSIONS, run.group_column), {"run_no": run.run_no, "versions": list(versions)}
        )
    ).all()
    group_ids = sorted({row.group_id for row in found})
    await groups.lock(connection, run, group_ids)
    await connection.execute(
        text(QUARANTINE),
        {"run_no": run.run_no, "rollout_ids": [row.rollout_id for row in found], "reason": reason, "actor": actor},
    )
    await groups.refresh(connection, run, group_ids, actor)


async def list_quarantine(connection: AsyncConnection, run_id: str, limit: int) -> Quarantine:
    """What is in quarantine, counted by reason and by the update that put it there."""
    run = await get_run(connection, run_id)
    rows = await connection.execute(LIST_QUARANTINE, {"run_no": run.run_no, "limit": limit})
    return Quarantine(entries=[QuarantineEntry.model_validate(dict(row._mapping)) for row in rows])


async def release(connection: AsyncConnection, run_id: str, body: Release, caller: Caller) -> ReleaseAnswer:
    """Releases rollouts that pass the arrival checks now. Siblings that fell with a refused group come along."""
    run = await get_run(connection, run_id)
    await connection.execute(JUDGE_VERSIONS, {"run_no": run.run_no})
    if body.rollout_ids is not None:
        named = sorted(set(body.rollout_ids))
    else:
        keys = {"run_no": run.run_no, "update_id": body.update_id, "reason": body.reason}
        if await connection.scalar(UPDATE_THERE, keys) is None:
            raise Refusal("update_unknown", f"run {run_id} has no update {body.update_id}")
        named = list((await connection.scalars(text(QUARANTINED_BY), keys)).all())
    group_ids = await groups.lock_of_rollouts(connection, run, named)
    siblings = await connection.scalars(
        for_run(FALLEN_SIBLINGS, run.group_column), {"run_no": run.run_no, "group_ids": group_ids}
    )
    accompanied = sorted({*named, *siblings.all()})
    rows = await connection.execute(
        for_run(RELEASE, run.group_column),
        {
            "run_no": run.run_no,
            "rollout_ids": accompanied,
            "named": named,
            "gate_lag": run.settings.lag_gate == "enforce",
            "max_lag": run.settings.max_lag,
            "actor": caller.actor,
        },
    )
    judged = {row.rollout_id: row for row in rows}
    fallen = await groups.refresh(connection, run, group_ids, caller.actor)
    asked = sorted({*named, *judged})
    present = await groups.members(connection, run, asked)
    verdicts = []
    for rollout_id in asked:
        row, now = judged.get(rollout_id), present.get(rollout_id)
        if now is None:
            verdicts.append(ReleaseVerdict(rollout_id=rollout_id, verdict="missing_rollout"))
            continue
        verdict = "not_releasable"
        if row is not None and row.moved:
            verdict = "set_aside" if row.state == "offline" or rollout_id in fallen else "released"
        elif row is not None:
            verdict = "stays"
        verdicts.append(
            ReleaseVerdict.model_validate(
                {
                    "rollout_id": rollout_id,
                    "verdict": verdict,
                    "state": now.state,
                    "revision": now.revision,
                    "reason": row.stays_for if row is not None and verdict == "stays" else now.reason,
                }
            )
        )
    return ReleaseAnswer(verdicts=verdicts)
