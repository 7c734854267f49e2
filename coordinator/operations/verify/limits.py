"""Statement 5: every reserve kept the limits on lag and drift, under one contract for each update."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sqlalchemy import text

from coordinator.operations.verify.findings import Finding
from coordinator.operations.verify.ledger import Ledger, Search

CHECKED = text("""
    SELECT count(*) AS reserves, count(DISTINCT update_id) AS updates
    FROM rollout_audit WHERE run_no = :run_no AND event = 'reserve'
""")

# The lag is computed anew from the clocks of the versions. Of a rollout that retention has dropped only the versions
# are left, without telling which of them had action tokens: then the lag is that of one of them.
RESERVES = Search(
    """
    SELECT a.rollout_id AS subject, a.revision, a.update_id, a.lag, a.drift, a.max_lag, a.max_drift,
           u.lag_clock, r.rollout_id IS NOT NULL AS kept, u.lag_clock - r.oldest_clock AS clock_lag,
           m.rollout_id IS NOT NULL AS listed, m.versions, m.drift AS member_drift
    FROM rollout_audit a
    LEFT JOIN updates u ON u.run_no = a.run_no AND u.update_id = a.update_id
    LEFT JOIN rollouts r ON r.run_no = a.run_no AND r.rollout_id = a.rollout_id
    LEFT JOIN update_members m ON m.run_no = a.run_no AND m.update_id = a.update_id AND m.rollout_id = a.rollout_id
        AND m.revision = a.revision - 1
    WHERE a.run_no = :run_no AND a.event = 'reserve'
    """,
    {
        "revision {revision} by {update_id}: lag {lag}": "lag IS NULL OR lag < 0",
        "revision {revision} by {update_id}: lag {lag} over {max_lag}": "CAST(:gate_lag AS bool) AND lag > max_lag",
        "revision {revision} by {update_id}: drift {drift} over {max_drift}": """
            CAST(:gate_drift AS bool) AND NOT COALESCE(drift >= 0 AND drift <= max_drift, false)
        """,
        "revision {revision} by {update_id}: the limits {max_lag} and {max_drift} are not the run's": """
            (max_lag, max_drift) IS DISTINCT FROM (CAST(:max_lag AS int), CAST(:max_drift AS float8))
        """,
        "revision {revision} by {update_id}: lag {lag}, but by the clocks of the versions {clock_lag}": """
            kept AND clock_lag IS DISTINCT FROM lag
        """,
        "revision {revision} by {update_id}: lag {lag} is that of none of its versions": """
            NOT kept AND listed AND NOT EXISTS (
                SELECT FROM policy_versions v
                WHERE v.run_no = :run_no AND v.version = ANY(versions) AND v.lag_clock = found.lag_clock - lag)
        """,
        "revision {revision} by {update_id}: drift {drift}, among its members {member_drift}": """
            listed AND drift IS DISTINCT FROM member_drift
        """,
    },
)

CONTRACTS = Search(
    """
    SELECT update_id AS subject, count(DISTINCT contract_hash) AS n, bool_or(contract_hash IS NULL) AS unknown,
           string_agg(DISTINCT contract_hash, ', ' ORDER BY contract_hash) AS contracts
    FROM rollout_audit WHERE run_no = :run_no AND event = 'reserve' GROUP BY update_id
    """,
    {
        "reserved under {n} contracts: {contracts}": "n > 1",
        "reserved without a contract": "unknown",
    },
)

CLOCKS = Search(
    """
    SELECT u.update_id AS subject, u.policy_version, u.lag_clock, v.lag_clock AS version_clock
    FROM updates u LEFT JOIN policy_versions v ON v.run_no = u.run_no AND v.version = u.policy_version
    WHERE u.run_no = :run_no
    """,
    {
        "its clock is {lag_clock}, that of its version {policy_version} is {version_clock}": """
            lag_clock IS DISTINCT FROM version_clock
        """
    },
)


async def check(ledger: Ledger) -> AsyncIterator[Finding]:
    """Each breach of the statement."""
    settings = ledger.settings
    searches = (
        RESERVES.run(
            ledger,
            gate_lag=settings["lag_gate"] == "enforce",
            gate_drift=settings["drift_gate"] == "enforce",
            max_lag=settings["max_lag"],
            max_drift=settings["max_drift"],
        ),
        CONTRACTS.run(ledger),
        CLOCKS.run(ledger),
    )
    for search in searches:
        async for finding in search:
            yield finding
