"""Statement 1: a rollout's audit is one unbroken walk through the state machine, and its row stands at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sqlalchemy import text

from coordinator.operations.verify.findings import Finding
from coordinator.operations.verify.ledger import Ledger, Search
from coordinator.rules.lifecycle import LIFECYCLE_TRANSITIONS, OUTCOME_TRANSITIONS

MACHINE = sorted(
    f"{origin or ''} {event} {target}"
    for origin, event, target in (
        *((origin, event, target) for (origin, event), target in LIFECYCLE_TRANSITIONS.items()),
        *OUTCOME_TRANSITIONS,
    )
)
"""Every allowed step as 'from event to', from the tables that the server's own conditions are made of."""

CHECKED = text("""
    SELECT (SELECT count(*) FROM rollouts WHERE run_no = :run_no) AS rollouts,
           (SELECT count(*) FROM tombstones WHERE run_no = :run_no) AS tombstones,
           (SELECT count(*) FROM rollout_audit WHERE run_no = :run_no) AS revisions
""")

STEPS = Search(
    """
    SELECT rollout_id AS subject, revision, event, from_state, to_state,
           lag(revision) OVER history AS revision_before, lag(to_state) OVER history AS state_before
    FROM rollout_audit WHERE run_no = :run_no
    WINDOW history AS (PARTITION BY rollout_id ORDER BY revision)
    """,
    {
        "revision {revision} follows {revision_before}": "revision <> COALESCE(revision_before + 1, 0)",
        "revision {revision} leaves {from_state}, but the one before led to {state_before}": """
            from_state IS DISTINCT FROM state_before
        """,
        "revision {revision}: no transition leads from {from_state} by {event} to {to_state}": """
            NOT (COALESCE(from_state, '') || ' ' || event || ' ' || to_state = ANY(CAST(:machine AS text[])))
        """,
    },
)

# A rollout whose row and tombstone are both gone is a loss: statement 4 finds it.
ENDS = Search(
    """
    WITH step AS (
        SELECT rollout_id, revision, event, to_state, update_id, lead(revision) OVER history IS NULL AS last
        FROM rollout_audit WHERE run_no = :run_no
        WINDOW history AS (PARTITION BY rollout_id ORDER BY revision)
    ), kept AS (
        SELECT rollout_id, 'row' AS place, state, revision, update_id FROM rollouts WHERE run_no = :run_no
        UNION ALL
        SELECT rollout_id, 'tombstone', state, revision, NULL FROM tombstones WHERE run_no = :run_no
    )
    SELECT k.rollout_id AS subject, k.place, k.state, k.revision, k.update_id, s.rollout_id IS NOT NULL AS audited,
           s.to_state AS end_state, s.revision AS end_revision, s.update_id AS end_update
    FROM kept k LEFT JOIN step s ON s.rollout_id = k.rollout_id AND s.last
    """,
    {
        "has a {place}, but no audit": "NOT audited",
        "its {place} is {state} at {revision}, its audit ends {end_state} at {end_revision}": """
            audited AND (state, revision) IS DISTINCT FROM (end_state, end_revision)
        """,
        "its row is bound to {update_id}, its audit ends {state} by {end_update}": """
            audited AND place = 'row' AND state = end_state AND state IN ('reserved', 'consumed')
            AND update_id IS DISTINCT FROM end_update
        """,
    },
)


async def check(ledger: Ledger) -> AsyncIterator[Finding]:
    """Each breach of the statement."""
    async for finding in STEPS.run(ledger, machine=MACHINE):
        yield finding
    async for finding in ENDS.run(ledger):
        yield finding
