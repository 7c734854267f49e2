"""Retention: what is over loses its tokens, then its row; the tombstone of its id stays.

Only what is consumed, quarantined or offline for longer than the run says is touched, under the lock of its group
and judged again there, so that nothing that a rewind or a release has just brought back can be lost. What the last
`rewind_commits` commits touched is kept whole. Rows go only when their group has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.rollouts import groups
from coordinator.rollouts.queries import for_run
from coordinator.runs.service import Run, get_run
from coordinator.storage.database import Database
from coordinator.wire.rollouts import GenerationFailure, RolloutIdentity

BATCH = 1000

RUNS_WITH_RETENTION = text("""
    SELECT run_id FROM runs
    WHERE settings ->> 'evidence_retention_seconds' IS NOT NULL OR settings ->> 'rollout_retention_seconds' IS NOT NULL
    ORDER BY run_no
""")

# The moment of the last commit that a rewind cannot reach behind any more; none: all of them can be undone.
_HORIZON = """
    (SELECT u.ended_at FROM updates u WHERE u.run_no = :run_no AND u.commit_no = CAST(:horizon AS int))
"""

# `r` ended long ago, by its last change `a`, and no rewind can bring it back.
_OVER = f"""
    r.state IN ('consumed', 'quarantined', 'offline')
    AND a.at < clock_timestamp() - make_interval(secs => :seconds)
    AND NOT EXISTS (
        SELECT FROM updates u WHERE u.run_no = :run_no AND u.update_id = a.update_id
            AND (u.state = 'open' OR u.commit_no > CAST(:horizon AS int)))
    AND ((r.state <> 'consumed' AND a.update_id IS NULL AND a.judged_version IS NULL
          AND r.reason NOT IN ('group_refused', 'group_spent'))
         OR EXISTS (SELECT FROM updates u WHERE u.run_no = :run_no AND u.update_id = a.update_id
                    AND u.commit_no <= CAST(:horizon AS int))
         OR a.at <= {_HORIZON})
"""
_LAST_CHANGE = "rollout_audit a ON a.run_no = r.run_no AND a.rollout_id = r.rollout_id AND a.revision = r.revision"

OLD_EVIDENCE = f"""
    SELECT r.rollout_id, r.{{group}} AS group_id
    FROM rollout_evidence e JOIN rollouts r USING (run_no, rollout_id) JOIN {_LAST_CHANGE}
    WHERE e.run_no = :run_no AND e.token_ids IS NOT NULL
      AND e.arrived_at < clock_timestamp() - make_interval(secs => :seconds) AND {_OVER}
    ORDER BY e.arrived_at LIMIT CAST(:batch AS int)
"""

COUNT_OLD_EVIDENCE = f"""
    SELECT count(*) AS rollouts, CAST(COALESCE(sum(octet_length(e.token_ids) + octet_length(e.action_mask)
        + octet_length(e.behavior_log_probs) + COALESCE(octet_length(e.side_data), 0)), 0) AS bigint) AS bytes
    FROM rollout_evidence e
    WHERE e.run_no = :run_no AND e.rollout_id IN (SELECT o.rollout_id FROM ({OLD_EVIDENCE}) AS o)
"""

DROP_EVIDENCE = text(f"""
    WITH over AS (
        SELECT e.rollout_id, octet_length(e.token_ids) + octet_length(e.action_mask)
            + octet_length(e.behavior_log_probs) + COALESCE(octet_length(e.side_data), 0) AS bytes
        FROM rollout_evidence e JOIN rollouts r USING (run_no, rollout_id) JOIN {_LAST_CHANGE}
        WHERE e.run_no = :run_no AND e.rollout_id = ANY(CAST(:rollout_ids AS text[])) AND e.token_ids IS NOT NULL
          AND {_OVER}
    ), dropped AS (
        UPDATE rollout_evidence e
        SET token_ids = NULL, action_mask = NULL, behavior_log_probs = NULL, side_data = NULL
        FROM over o WHERE e.run_no = :run_no AND e.rollout_id = o.rollout_id
        RETURNING o.rollout_id, o.bytes
    ), differences AS (
        DELETE FROM token_differences t USING dropped d WHERE t.run_no = :run_no AND t.rollout_id = d.rollout_id
    ), counted AS (
        INSERT INTO count_deltas (run_no, name, delta)
        SELECT :run_no, 'evidence_bytes', -sum(bytes) FROM dropped HAVING count(*) > 0
    )
    SELECT count(*) FROM dropped
""")

OLD_ROLLOUTS = f"""
    SELECT r.rollout_id, r.{{group}} AS group_id
    FROM rollouts r JOIN {_LAST_CHANGE} JOIN groups g ON g.run_no = r.run_no AND g.group_id = r.{{group}}
    WHERE r.run_no = :run_no AND g.state <> 'open'
      AND r.arrived_at < clock_timestamp() - make_interval(secs => :seconds) AND {_OVER}
    ORDER BY r.arrived_at LIMIT CAST(:batch AS int)
"""

COUNT_OLD_ROLLOUTS = f"SELECT count(*) FROM ({OLD_ROLLOUTS}) AS o"

DROP_ROLLOUTS = f"""
    WITH over AS (
        SELECT r.rollout_id FROM rollouts r JOIN {_LAST_CHANGE}
        JOIN groups g ON g.run_no = r.run_no AND g.group_id = r.{{group}}
        WHERE r.run_no = :run_no AND r.rollout_id = ANY(CAST(:rollout_ids AS text[])) AND g.state <> 'open'
          AND {_OVER}
    ), dropped AS (
        DELETE FROM rollouts r USING over o WHERE r.run_no = :run_no AND r.rollout_id = o.rollout_id
        RETURNING r.rollout_id, r.group_id, r.sample_index, r.attempt, r.state, r.revision, r.content_hash
    ), buried AS (
        INSERT INTO tombstones (run_no, rollout_id, group_id, sample_index, attempt, state, revision, content_hash)
        SELECT :run_no, * FROM dropped
    ), evidence AS (
        DELETE FROM rollout_evidence e USING dropped d WHERE e.run_no = :run_no AND e.rollout_id = d.rollout_id
        RETURNING octet_length(e.token_ids) + octet_length(e.action_mask) + octet_length(e.behavior_log_probs)
            + COALESCE(octet_length(e.side_data), 0) AS bytes
    ), differences AS (
        DELETE FROM token_differences t USING dropped d WHERE t.run_no = :run_no AND t.rollout_id = d.rollout_id
    ), counted AS (
        INSERT INTO count_deltas (run_no, name, delta)
        SELECT :run_no, 'evidence_bytes', -sum(bytes) FROM evidence HAVING sum(bytes) > 0
    ), rewards_gone AS (
        DELETE FROM rewards w USING dropped d WHERE w.run_no = :run_no AND w.rollout_id = d.rollout_id
    )
    SELECT count(*) FROM dropped
"""


# What already has these ids, or these places in their groups. Where retention is just dropping it, this waits for the
# tombstone, which a statement that began before would miss; the others are not dropped before this transaction ends.
AWAIT_TOMBSTONES = text("""
    SELECT count(*) FROM unnest(
        CAST(:rollout_ids AS text[]), CAST(:group_ids AS text[]), CAST(:sample_indexes AS int[]),
        CAST(:attempts AS int[])
    ) AS i (rollout_id, group_id, sample_index, attempt)
    LEFT JOIN LATERAL (
        SELECT FROM rollouts WHERE run_no = :run_no AND rollout_id = i.rollout_id FOR KEY SHARE
    ) AS same ON true
    LEFT JOIN LATERAL (
        SELECT FROM rollouts WHERE run_no = :run_no AND group_id = i.group_id AND sample_index = i.sample_index
            AND attempt = i.attempt FOR KEY SHARE
    ) AS in_place ON true
""")


async def await_tombstones(
    connection: AsyncConnection, run: Run, members: Sequence[RolloutIdentity | GenerationFailure]
) -> None:
    """Called with the groups locked, before these are stored: later statements see what retention made of their ids."""
    if run.settings.rollout_retention_seconds is None:
        return
    await connection.execute(
        AWAIT_TOMBSTONES,
        {
            "run_no": run.run_no,
            "rollout_ids": [member.rollout_id for member in members],
            "group_ids": [member.group_id for member in members],
            "sample_indexes": [member.sample_index for member in members],
            "attempts": [member.attempt for member in members],
        },
    )


async def _runs(connection: AsyncConnection) -> list[str]:
    return list((await connection.scalars(RUNS_WITH_RETENTION)).all())


def _limits(run: Run, seconds: float) -> dict[str, Any]:
    return {
        "run_no": run.run_no,
        "seconds": seconds,
        "horizon": run.commits - run.settings.rewind_commits,
        "batch": BATCH,
    }


@dataclass(frozen=True)
class Over:
    """What of a run is over: rollouts that would lose their tokens (of so many bytes), and their row."""

    evidence: int
    evidence_bytes: int
    rollouts: int


async def count_over(connection: AsyncConnection, run_id: str, seconds: float) -> Over:
    """What `drop_evidence` and `drop_rollouts` would drop of what was over so long ago."""
    run = await get_run(connection, run_id)
    limits = _limits(run, seconds) | {"batch": None}
    evidence = (await connection.execute(for_run(COUNT_OLD_EVIDENCE, run.group_column), limits)).one()
    rollouts = 0
    if run.settings.rollout_retention_seconds is not None:
        counted = await connection.execute(for_run(COUNT_OLD_ROLLOUTS, run.group_column), limits)
        rollouts = counted.scalar_one()
    return Over(evidence.rollouts, evidence.bytes, rollouts)


async def drop_evidence(connection: AsyncConnection, run_id: str, seconds: float | None = None) -> int:
    """Drops the tokens of one batch of rollouts that were over so long ago, left out: as the run says. Answers how
    many."""
    run = await get_run(connection, run_id)
    seconds = run.settings.evidence_retention_seconds if seconds is None else seconds
    if seconds is None:
        return 0
    limits = _limits(run, seconds)
    rows = (await connection.execute(for_run(OLD_EVIDENCE, run.group_column), limits)).all()
    await groups.lock(connection, run, sorted({row.group_id for row in rows}))
    dropped = await connection.execute(DROP_EVIDENCE, limits | {"rollout_ids": [row.rollout_id for row in rows]})
    return int(dropped.scalar_one())


async def drop_rollouts(connection: AsyncConnection, run_id: str, seconds: float | None = None) -> int:
    """Drops the rows of one batch of rollouts that were over so long ago, left out: as the run says, and leaves their
    tombstones. Answers how many: none of a run that keeps its rows, whose arrivals wait for no tombstone."""
    run = await get_run(connection, run_id)
    if run.settings.rollout_retention_seconds is None:
        return 0
    seconds = run.settings.rollout_retention_seconds if seconds is None else seconds
    limits = _limits(run, seconds)
    rows = (await connection.execute(for_run(OLD_ROLLOUTS, run.group_column), limits)).all()
    await groups.lock(connection, run, sorted({row.group_id for row in rows}))
    dropped = await connection.execute(
        for_run(DROP_ROLLOUTS, run.group_column), limits | {"rollout_ids": [row.rollout_id for row in rows]}
    )
    return int(dropped.scalar_one())


async def sweep(database: Database) -> dict[str, int]:
    """Drops everything that is over, in batches. Answers how many rollouts lost tokens or row, by run."""
    done: dict[str, int] = {}
    for run_id in await database.transaction(_runs):
        for drop in (drop_evidence, drop_rollouts):
            while count := await database.transaction(drop, run_id):
                done[run_id] = done.get(run_id, 0) + count
    return done
