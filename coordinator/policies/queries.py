"""Every statement about policy versions and activations. All of them run under the run's lock or only read."""

from sqlalchemy import text

from coordinator.storage.lost import LOST, lost_after

_VERSION = """
    version, artifact_hash, kind, state, parent_version, rollback_version, lag_clock,
    CAST(base_model AS text) AS base_model, CAST(files AS text) AS files,
    uri, updates, CAST(digests AS text) AS digests,
    prepared_at, committed_at, activated_at, ended_at, files_removed_at, (
        SELECT CAST(json_build_object('state', c.state, 'bytes_done', c.bytes_done, 'bytes_total', c.bytes_total,
                                      'faulty', c.faulty, 'asked_at', c.asked_at, 'ended_at', c.ended_at) AS text)
        FROM verifications c WHERE c.run_no = policy_versions.run_no AND c.version = policy_versions.version
    ) AS verification
"""

GET_VERSION = text(f"SELECT {_VERSION} FROM policy_versions WHERE run_no = :run_no AND version = :version")

LIST_VERSIONS = text(f"SELECT {_VERSION} FROM policy_versions WHERE run_no = :run_no ORDER BY version")

NEWEST_VERSION = text("SELECT max(version) FROM policy_versions WHERE run_no = :run_no")

INSERT_VERSION = text("""
    INSERT INTO policy_versions (run_no, version, artifact_hash, kind, state, parent_version, rollback_version,
                                 lag_clock, base_model, files, updates, digests, uri)
    VALUES (:run_no, :version, :artifact_hash, :kind, 'prepared', :parent_version, :rollback_version, :lag_clock,
            CAST(:base_model AS jsonb), CAST(:files AS jsonb), CAST(:updates AS text[]),
            CAST(:digests AS jsonb), :uri)
""")

LOCK_VERSION = text("SELECT FROM policy_versions WHERE run_no = :run_no AND version = :version FOR UPDATE")

COMMIT_VERSION = text("""
    UPDATE policy_versions SET state = 'committed', committed_at = clock_timestamp()
    WHERE run_no = :run_no AND version = :version AND state = 'prepared'
""")

ABANDON_VERSION = text("""
    UPDATE policy_versions SET state = 'abandoned', ended_at = clock_timestamp()
    WHERE run_no = :run_no AND version = :version AND state IN ('prepared', 'committed')
""")

UNCOMMITTED_UPDATES = text("""
    SELECT id FROM unnest(CAST(:update_ids AS text[])) AS id
    WHERE NOT EXISTS (
        SELECT FROM updates u WHERE u.run_no = :run_no AND u.update_id = id AND u.state = 'committed'
    )
    ORDER BY id
""")

RETIRE_ACTIVE = text("""
    UPDATE policy_versions SET state = 'retired', ended_at = clock_timestamp()
    WHERE run_no = :run_no AND state = 'active'
""")

ACTIVATE_VERSION = text("""
    UPDATE policy_versions SET state = 'active', activated_at = clock_timestamp()
    WHERE run_no = :run_no AND version = :version AND state = 'committed'
""")

MOVE_POINTER = text("UPDATE runs SET active_version = :version WHERE run_no = :run_no")

_ACTIVATION = """
    a.activation_id, a.version, v.artifact_hash, v.kind, a.state, a.asked_workers, a.reason, a.asked_at, a.opened_at,
    a.deadline_at, a.ended_at
"""
_WITH_VERSION = "activations a JOIN policy_versions v USING (run_no, version)"

GET_ACTIVATION = text(f"""
    SELECT {_ACTIVATION} FROM {_WITH_VERSION} WHERE a.run_no = :run_no AND a.activation_id = :activation_id
""")

LIST_ACTIVATIONS = text(f"""
    SELECT {_ACTIVATION} FROM {_WITH_VERSION} WHERE a.run_no = :run_no ORDER BY a.asked_at, a.activation_id
""")

OPEN_ACTIVATION = text(f"SELECT {_ACTIVATION} FROM {_WITH_VERSION} WHERE a.run_no = :run_no AND a.state = 'open'")

WAITING_ACTIVATION = text(f"SELECT {_ACTIVATION} FROM {_WITH_VERSION} WHERE a.run_no = :run_no AND a.state = 'waiting'")

LATEST_OF_VERSION = text(f"""
    SELECT {_ACTIVATION} FROM {_WITH_VERSION} WHERE a.run_no = :run_no AND a.version = :version
    ORDER BY (a.state IN ('open', 'waiting')) DESC, a.asked_at DESC LIMIT 1
""")

INSERT_ACTIVATION = text("""
    INSERT INTO activations (run_no, activation_id, version, state, asked_workers)
    VALUES (:run_no, :activation_id, :version, 'waiting', CAST(:asked_workers AS text[]))
""")

BEGIN_ACTIVATION = text("""
    WITH now AS MATERIALIZED (SELECT clock_timestamp() AS t)
    UPDATE activations SET state = 'open', opened_at = t, deadline_at = t + make_interval(secs => :deadline_seconds)
    FROM now WHERE run_no = :run_no AND activation_id = :activation_id AND state = 'waiting'
""")

UNKNOWN_WORKERS = text("""
    SELECT id FROM unnest(CAST(:asked_workers AS text[])) AS id
    WHERE NOT EXISTS (
        SELECT FROM workers WHERE run_no = :run_no AND worker_id = id AND deregistered_at IS NULL)
    ORDER BY id
""")

# Freezes the required workers: those asked for by name, or every live one that neither drains nor is fenced.
FREEZE_WORKERS = text(f"""
    INSERT INTO activation_workers (run_no, activation_id, worker_id, incarnation)
    SELECT :run_no, :activation_id, worker_id, incarnation FROM workers
    WHERE run_no = :run_no AND deregistered_at IS NULL AND CASE
        WHEN CAST(:asked_workers AS text[]) IS NOT NULL THEN worker_id = ANY(CAST(:asked_workers AS text[]))
        ELSE NOT draining AND fenced_reason IS NULL
            AND NOT ({LOST})
    END
    ORDER BY worker_id
    RETURNING worker_id
""")

# The required workers of activations with what they said. An ack counts only from the incarnation that is live,
# only for the activation that it was given to (a fence takes that away), and not while the worker is fenced.
REQUIRED_WORKERS = text("""
    SELECT q.activation_id, q.worker_id, w.incarnation, k.matching, k.detail, k.acked_at, k.version AS acked_version,
           k.artifact_hash AS acked_hash, CAST(q.ended_as AS text) AS ended_as
    FROM activation_workers q
    JOIN activations a ON a.run_no = q.run_no AND a.activation_id = q.activation_id
    JOIN workers w ON w.run_no = q.run_no AND w.worker_id = q.worker_id
    LEFT JOIN acks k ON k.run_no = q.run_no AND k.worker_id = q.worker_id AND k.incarnation = w.incarnation
        AND k.version = a.version AND k.activation_id = a.activation_id
        AND (w.fenced_reason IS NULL OR NOT k.matching)
    WHERE q.run_no = :run_no AND q.dropped_at IS NULL
      AND (CAST(:activation_id AS text) IS NULL OR q.activation_id = :activation_id)
    ORDER BY q.activation_id, q.worker_id
""")

END_ACTIVATION = text("""
    UPDATE activations SET state = :state, reason = :reason, ended_at = clock_timestamp()
    WHERE run_no = :run_no AND activation_id = :activation_id AND state IN ('open', 'waiting')
""")

KEEP_WHAT_WAS_SAID = text("""
    UPDATE activation_workers q SET ended_as = CAST(s.said AS jsonb)
    FROM unnest(CAST(:worker_ids AS text[]), CAST(:said AS text[])) AS s (worker_id, said)
    WHERE q.run_no = :run_no AND q.activation_id = :activation_id AND q.worker_id = s.worker_id
""")

DROP_WORKER = text("""
    UPDATE activation_workers SET dropped_at = clock_timestamp(), dropped_reason = :reason
    WHERE run_no = :run_no AND activation_id = :activation_id AND worker_id = :worker_id AND dropped_at IS NULL
    RETURNING worker_id
""")

DROPPED_WORKERS = text("""
    SELECT activation_id, worker_id, incarnation, dropped_at, dropped_reason FROM activation_workers
    WHERE run_no = :run_no AND dropped_at IS NOT NULL
      AND (CAST(:activation_id AS text) IS NULL OR activation_id = :activation_id)
    ORDER BY activation_id, dropped_at, worker_id
""")

# Required workers that cannot confirm as they stand: silent for too long, or fenced.
ABSENT_WORKERS = text(f"""
    SELECT q.worker_id, COALESCE('fenced: ' || w.fenced_reason, 'lost') AS why
    FROM activation_workers q JOIN workers w USING (run_no, worker_id)
    WHERE q.run_no = :run_no AND q.activation_id = :activation_id AND q.dropped_at IS NULL
      AND (w.fenced_reason IS NOT NULL OR {LOST})
    ORDER BY q.worker_id
""")

FENCE_DROPPED = text("""
    UPDATE workers SET fenced_reason = :reason, must_ack_active = true
    WHERE run_no = :run_no AND worker_id = :worker_id
""")

IS_OVERDUE = text("""
    SELECT deadline_at <= clock_timestamp() FROM activations
    WHERE run_no = :run_no AND activation_id = :activation_id AND state = 'open'
""")

# Runs with an open activation that is past its deadline, or whose lost and fenced workers are to be dropped.
TO_TEND = text(f"""
    SELECT r.run_id FROM activations a JOIN runs r USING (run_no)
    WHERE a.state = 'open' AND (a.deadline_at <= clock_timestamp() OR (
        r.settings ->> 'on_lost' = 'drop' AND EXISTS (
            SELECT FROM activation_workers q JOIN workers w USING (run_no, worker_id)
            WHERE q.run_no = a.run_no AND q.activation_id = a.activation_id AND q.dropped_at IS NULL
              AND (w.fenced_reason IS NOT NULL
                   OR {lost_after("CAST(r.settings ->> 'lost_after_seconds' AS float8)")}))))
""")
