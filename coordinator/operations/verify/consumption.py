"""Statement 2: a rollout is consumed at most once at a time, by the update that had reserved it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sqlalchemy import text

from coordinator.operations.verify.findings import Finding
from coordinator.operations.verify.ledger import Ledger, Search
from coordinator.operations.verify.line import Line

CHECKED = text("""
    SELECT count(*) FILTER (WHERE event = 'reserve') AS reserves,
           count(*) FILTER (WHERE event = 'commit') AS consumptions,
           count(*) FILTER (WHERE event = 'rewind' AND from_state = 'consumed') AS releases
    FROM rollout_audit WHERE run_no = :run_no
""")

# `holder` is the update of the step before. Only a reserve leads to `reserved`, so that a step out of it must follow
# the reserve immediately.
STEPS = Search(
    """
    SELECT s.rollout_id AS subject, s.revision, s.event, s.from_state, s.update_id, s.event_before, s.holder,
           s.event_after, s.consumed, s.at, u.commit_no, u.ended_at, m.rollout_id IS NOT NULL AS listed
    FROM (
        SELECT rollout_id, revision, event, from_state, update_id, at,
               lag(event) OVER history AS event_before, lag(update_id) OVER history AS holder,
               lead(event) OVER history AS event_after,
               sum(CASE WHEN event = 'commit' THEN 1 WHEN event = 'rewind' AND from_state = 'consumed' THEN -1 ELSE 0
                   END) OVER history AS consumed
        FROM rollout_audit WHERE run_no = :run_no
        WINDOW history AS (PARTITION BY rollout_id ORDER BY revision)
    ) AS s
    LEFT JOIN updates u ON u.run_no = :run_no AND u.update_id = s.update_id
    LEFT JOIN update_members m ON m.run_no = :run_no AND m.update_id = s.update_id AND m.rollout_id = s.rollout_id
        AND m.revision = s.revision - 1 AND m.verdict = 'reserved' AND s.event = 'reserve'
    WHERE s.event IN ('reserve', 'commit', 'discard', 'abort', 'rewind') OR s.from_state = 'reserved'
    """,
    {
        "revision {revision}: {event} leaves it consumed {consumed} times": """
            event IN ('commit', 'rewind') AND consumed NOT IN (0, 1)
        """,
        "revision {revision}: {event} by {update_id}, but the step before is {event_before} by {holder}": """
            (from_state = 'reserved' OR event IN ('commit', 'discard', 'abort'))
            AND (event_before, holder) IS DISTINCT FROM ('reserve', update_id)
        """,
        "revision {revision}: consumed by {update_id}, which did not commit": "event = 'commit' AND commit_no IS NULL",
        "revision {revision}: reserved by {update_id}, which does not list it": "event = 'reserve' AND NOT listed",
        "revision {revision}: reserved by {update_id} after its end": "event = 'reserve' AND at > ended_at",
        "revision {revision}: taken out of the commit of {holder}, which no rewind released": """
            event = 'rewind' AND from_state = 'consumed'
            AND NOT COALESCE(holder = ANY(CAST(:released AS text[])), false)
        """,
        "revision {revision}: consumed by {update_id}, which a rewind released, and not taken out of it": """
            event = 'commit' AND update_id = ANY(CAST(:released AS text[])) AND event_after IS DISTINCT FROM 'rewind'
        """,
    },
)

MEMBERS = Search(
    """
    SELECT m.rollout_id AS subject, m.update_id, m.revision + 1 AS revision, a.rollout_id IS NOT NULL AS audited
    FROM update_members m
    LEFT JOIN rollout_audit a ON a.run_no = m.run_no AND a.rollout_id = m.rollout_id AND a.revision = m.revision + 1
        AND a.event = 'reserve' AND a.update_id = m.update_id
    WHERE m.run_no = :run_no AND m.verdict = 'reserved'
    """,
    {"{update_id} lists it as reserved, its audit has no such reserve at revision {revision}": "NOT audited"},
)


async def check(ledger: Ledger, line: Line) -> AsyncIterator[Finding]:
    """Each breach of the statement, given the line that the journal tells."""
    released = sorted(update_id for update_id, rewind in line.rewound.items() if rewind.consumed == "release")
    async for finding in STEPS.run(ledger, released=released):
        yield finding
    async for finding in MEMBERS.run(ledger):
        yield finding
