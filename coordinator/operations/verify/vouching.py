"""Statement 7: every action span was vouched for by an earlier ack of its incarnation, or the rollout is kept out."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sqlalchemy import text

from coordinator.operations.verify.findings import Finding
from coordinator.operations.verify.ledger import Ledger, Search

CHECKED = text("""
    SELECT count(*) AS rollouts, COALESCE(sum(cardinality(span_versions)), 0) AS spans
    FROM rollout_evidence WHERE run_no = :run_no
""")

# An ack counts from the time of its entry in the journal. It must come before the rollout does, or before an operator
# let the rollout out of quarantine, which repeats the checks of its arrival. A rollout that is quarantined, or went
# offline from there, is kept out of training and needs no ack.
SPANS = Search(
    """
    WITH ack AS MATERIALIZED (
        SELECT subject AS worker_id, detail ->> 'incarnation' AS incarnation, detail ->> 'version' AS version,
               detail ->> 'artifact_hash' AS artifact_hash, min(at) AS at
        FROM journal WHERE run_no = :run_no AND event = 'worker.acked' AND detail ->> 'matching' = 'true'
        GROUP BY 1, 2, 3, 4
    ), span AS (
        SELECT e.rollout_id, r.worker_id, r.incarnation, s.version, s.artifact_hash, a.at AS arrived_at
        FROM rollout_evidence e
        JOIN rollouts r USING (run_no, rollout_id)
        JOIN rollout_audit a ON a.run_no = e.run_no AND a.rollout_id = e.rollout_id AND a.revision = 0
        CROSS JOIN LATERAL unnest(e.span_versions, e.span_hashes) AS s (version, artifact_hash)
        WHERE e.run_no = :run_no
    ), doubtful AS (
        SELECT s.*, k.at AS acked_at, v.artifact_hash AS known_hash
        FROM span s
        LEFT JOIN ack k ON k.worker_id = s.worker_id AND k.incarnation = s.incarnation
            AND k.version = CAST(s.version AS text) AND k.artifact_hash = s.artifact_hash
        LEFT JOIN policy_versions v ON v.run_no = :run_no AND v.version = s.version
        WHERE k.at IS NULL OR k.at > s.arrived_at OR v.artifact_hash IS DISTINCT FROM s.artifact_hash
    )
    SELECT d.rollout_id AS subject, d.version, d.artifact_hash, d.known_hash, d.incarnation, d.acked_at,
           GREATEST(d.arrived_at, (
               SELECT max(a.at) FROM rollout_audit a
               WHERE a.run_no = :run_no AND a.rollout_id = d.rollout_id AND a.event = 'release')) AS entered_at,
           (SELECT a.to_state = 'quarantined' OR (a.to_state = 'offline' AND a.from_state = 'quarantined')
            FROM rollout_audit a WHERE a.run_no = :run_no AND a.rollout_id = d.rollout_id
            ORDER BY a.revision DESC LIMIT 1) AS kept_out
    FROM doubtful d
    """,
    {
        "{incarnation} had not acked version {version} as {artifact_hash} before": """
            NOT kept_out AND (acked_at IS NULL OR acked_at > entered_at)
        """,
        "version {version} is {known_hash}, not {artifact_hash}": """
            NOT kept_out AND known_hash IS DISTINCT FROM artifact_hash
        """,
    },
)

# The mask has one byte for each token, 0 or 1, so that its bits are its action tokens.
COVER = Search(
    """
    SELECT e.rollout_id AS subject, bit_count(e.action_mask) AS acting, e.action_tokens, c.covered
    FROM rollout_evidence e
    CROSS JOIN LATERAL (
        SELECT sum(bit_count(substring(e.action_mask FROM s.start_at + 1 FOR GREATEST(s.end_at - s.start_at, 0))))
            AS covered
        FROM unnest(e.span_starts, e.span_ends) AS s (start_at, end_at)
    ) AS c
    WHERE e.run_no = :run_no AND e.action_mask IS NOT NULL
    """,
    {
        "its spans cover {covered} action tokens of {acting}": "covered IS DISTINCT FROM acting",
        "it has {acting} action tokens, {action_tokens} were counted": "action_tokens <> acting",
    },
)


async def check(ledger: Ledger) -> AsyncIterator[Finding]:
    """Each breach of the statement."""
    async for finding in SPANS.run(ledger):
        yield finding
    async for finding in COVER.run(ledger):
        yield finding
