"""Every statement about runs."""

from sqlalchemy import text

INSERT_RUN = text("""
    INSERT INTO runs (run_id, settings, contract, contract_hash, vocab_size, active_version)
    VALUES (:run_id, CAST(:settings AS jsonb), CAST(:contract AS jsonb), :contract_hash, :vocab_size, :version)
    ON CONFLICT (run_id) DO NOTHING
    RETURNING run_no
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
    r.vocab_size, r.active_version, r.commits, r.last_commit_no, r.event_no, r.created_at,
    v.artifact_hash AS active_hash, v.lag_clock AS active_clock
"""
_WITH_ACTIVE = "runs r JOIN policy_versions v ON v.run_no = r.run_no AND v.version = r.active_version"

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

COUNT_ROLLOUTS = text("SELECT state, count(*) AS n FROM rollouts WHERE run_no = :run_no GROUP BY state")

GET_JOURNAL = text("""
    SELECT event_no, event, subject, actor, at, CAST(detail AS text) AS detail FROM journal
    WHERE run_no = :run_no AND event_no > :after ORDER BY event_no LIMIT :limit
""")

GET_FAILURES = text("""
    SELECT failure_no, stage, kind, message, actor, at, rollout_id, update_id, version, worker_id FROM failures
    WHERE run_no = :run_no AND failure_no > :after ORDER BY failure_no LIMIT :limit
""")
