"""Every statement about runs."""

from sqlalchemy import text

INSERT_RUN = text("""
    INSERT INTO runs (run_id, settings, contract, contract_hash, vocab_size, active_version)
    VALUES (:run_id, CAST(:settings AS jsonb), CAST(:contract AS jsonb), :contract_hash, :vocab_size, :version)
    ON CONFLICT (run_id) DO NOTHING
    RETURNING run_no
""")

CLAIM_CONTRACTS = text("""
    INSERT INTO contracts (run_no, contract_hash, contract)
    SELECT :run_no, hash, CAST(contract AS jsonb)
    FROM unnest(CAST(:hashes AS text[]), CAST(:contracts AS text[])) AS c (hash, contract)
    ORDER BY hash
    ON CONFLICT DO NOTHING
""")

FIND_CONTRACTS = text("""
    SELECT contract_no, contract_hash FROM contracts
    WHERE run_no = :run_no AND contract_hash = ANY(CAST(:hashes AS text[]))
""")

INSERT_FIRST_VERSION = text("""
    WITH now AS MATERIALIZED (SELECT clock_timestamp() AS t)
    INSERT INTO policy_versions (run_no, version, artifact_hash, kind, state, lag_clock, base_model, files, updates,
                                 prepared_at, committed_at, activated_at)
    SELECT :run_no, :version, :artifact_hash, 'base', 'active', :version, CAST(:base_model AS jsonb), '[]', '{}',
           t, t, t
    FROM now
""")

_COLUMNS = """
    r.run_no, r.run_id, CAST(r.settings AS text) AS settings, CAST(r.contract AS text) AS contract, r.contract_hash,
    c.contract_no, r.vocab_size, r.active_version, r.commits, r.last_commit_no, r.event_no, r.created_at,
    v.artifact_hash AS active_hash, v.lag_clock AS active_clock
"""
_WITH_ACTIVE = """runs r
    JOIN policy_versions v ON v.run_no = r.run_no AND v.version = r.active_version
    JOIN contracts c ON c.run_no = r.run_no AND c.contract_hash = r.contract_hash"""

GET_RUN = text(f"SELECT {_COLUMNS} FROM {_WITH_ACTIVE} WHERE r.run_id = :run_id")

LOCK_RUN = text("SELECT run_no FROM runs WHERE run_id = :run_id FOR UPDATE")

LIST_RUNS = text(f"""
    SELECT {_COLUMNS} FROM {_WITH_ACTIVE}
    WHERE CAST(:run_id AS text) IS NULL OR r.run_id = :run_id
    ORDER BY r.run_no
""")

GET_FIRST_VERSION = text("""
    SELECT version, CAST(base_model AS text) AS base_model FROM policy_versions
    WHERE run_no = :run_no AND parent_version IS NULL
    ORDER BY version LIMIT 1
""")

# What is folded and what is not yet, read in one statement, so that a fold in between is seen whole or not at all.
COUNTS = text("""
    SELECT name, CAST(sum(n) AS bigint) AS n FROM (
        SELECT name, n FROM counts WHERE run_no = :run_no
        UNION ALL
        SELECT name, delta FROM count_deltas WHERE run_no = :run_no
    ) AS c GROUP BY name
""")

FOLD_COUNTS = text("""
    WITH gone AS (DELETE FROM count_deltas RETURNING run_no, name, delta)
    INSERT INTO counts (run_no, name, n)
    SELECT run_no, name, sum(delta) FROM gone GROUP BY run_no, name ORDER BY run_no, name
    ON CONFLICT (run_no, name) DO UPDATE SET n = counts.n + EXCLUDED.n
""")

GET_JOURNAL = text("""
    SELECT event_no, event, subject, actor, at, CAST(detail AS text) AS detail FROM journal
    WHERE run_no = :run_no AND event_no > :after ORDER BY event_no LIMIT :limit
""")

GET_FAILURES = text("""
    SELECT failure_no, stage, kind, message, actor, at, rollout_id, update_id, version, worker_id FROM failures
    WHERE run_no = :run_no AND failure_no > :after AND at < :settled
      AND (CAST(:stage AS text) IS NULL OR stage = :stage) ORDER BY failure_no LIMIT :limit
""")

# Before a number, or from the newest on without one.
GET_NEWEST_FAILURES = text("""
    SELECT failure_no, stage, kind, message, actor, at, rollout_id, update_id, version, worker_id FROM failures
    WHERE run_no = :run_no AND (CAST(:after AS bigint) = 0 OR failure_no < CAST(:after AS bigint)) AND at < :settled
      AND (CAST(:stage AS text) IS NULL OR stage = :stage) ORDER BY failure_no DESC LIMIT :limit
""")
