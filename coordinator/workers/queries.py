"""Every statement about workers."""

from sqlalchemy import text

from coordinator.storage.lost import LOST

SUSPECT = """(SELECT CASE
    WHEN d.n >= 8 AND d.total / d.n > 0.1
    THEN format('mean drift %s over %s fresh rollouts', round(CAST(d.total / d.n AS numeric), 4), d.n)
    WHEN j.n >= 10 THEN format('%s rollouts rejected, last: %s', j.n, j.last_detail) END
 FROM (SELECT sum(n) AS n, (array_agg(last_detail ORDER BY last_at DESC))[1] AS last_detail FROM rejections
       WHERE run_no = workers.run_no AND worker_id = workers.worker_id AND incarnation = workers.incarnation) AS j
 LEFT JOIN worker_drift d ON d.run_no = workers.run_no AND d.worker_id = workers.worker_id
    AND d.incarnation = workers.incarnation)"""
"""Why a row of `workers` is suspect; null if it is not."""

_COLUMNS = f"""
    worker_id, incarnation, draining, fenced_reason, engine, engine_version, registered_at,
    heartbeat_at, asleep_until, asleep_until > clock_timestamp() AS asleep, deregistered_at,
    {SUSPECT} AS suspect_reason,
    (SELECT a.version FROM acks a
     WHERE a.run_no = workers.run_no AND a.worker_id = workers.worker_id AND a.incarnation = workers.incarnation
       AND a.matching
     ORDER BY a.acked_at DESC LIMIT 1) AS version,
    (SELECT d.n FROM worker_drift d WHERE d.run_no = workers.run_no AND d.worker_id = workers.worker_id
        AND d.incarnation = workers.incarnation) AS drift_rollouts,
    (SELECT d.total / d.n FROM worker_drift d WHERE d.run_no = workers.run_no AND d.worker_id = workers.worker_id
        AND d.incarnation = workers.incarnation AND d.n > 0) AS drift,
    {LOST} AS lost
"""

REGISTER = text("""
    INSERT INTO workers (run_no, worker_id, incarnation, engine, engine_version)
    VALUES (:run_no, :worker_id, :incarnation, :engine, :engine_version)
    ON CONFLICT (run_no, worker_id) DO UPDATE SET
        incarnation = EXCLUDED.incarnation, engine = EXCLUDED.engine, engine_version = EXCLUDED.engine_version,
        draining = false, fenced_reason = NULL, must_ack_active = false, registered_at = clock_timestamp(),
        heartbeat_at = clock_timestamp(), asleep_until = NULL, deregistered_at = NULL
""")

REMEMBER_INCARNATION = text("""
    INSERT INTO incarnations (run_no, worker_id, incarnation) VALUES (:run_no, :worker_id, :incarnation)
    ON CONFLICT DO NOTHING
    RETURNING incarnation
""")

GET_WORKER = text(f"SELECT {_COLUMNS} FROM workers WHERE run_no = :run_no AND worker_id = :worker_id")

MUST_ACK_ACTIVE = text("""
    SELECT must_ack_active FROM workers WHERE run_no = :run_no AND worker_id = :worker_id
""")

LOCK_WORKER = text("SELECT FROM workers WHERE run_no = :run_no AND worker_id = :worker_id FOR UPDATE")

LIST_WORKERS = text(f"SELECT {_COLUMNS} FROM workers WHERE run_no = :run_no ORDER BY worker_id")

BEAT = text("""
    UPDATE workers SET heartbeat_at = clock_timestamp(),
        asleep_until = clock_timestamp() + make_interval(secs => CAST(:asleep_seconds AS float8))
    WHERE run_no = :run_no AND worker_id = :worker_id AND incarnation = :incarnation AND deregistered_at IS NULL
    RETURNING worker_id
""")

SET_DRAINING = text("""
    UPDATE workers SET draining = true WHERE run_no = :run_no AND worker_id = :worker_id AND NOT draining
    RETURNING worker_id
""")

SET_DEREGISTERED = text("""
    UPDATE workers SET draining = true, deregistered_at = clock_timestamp()
    WHERE run_no = :run_no AND worker_id = :worker_id AND deregistered_at IS NULL
""")

SET_FENCED = text("""
    UPDATE workers SET fenced_reason = :reason, must_ack_active = must_ack_active AND CAST(:reason AS text) IS NOT NULL
    WHERE run_no = :run_no AND worker_id = :worker_id
""")

# What a worker confirmed before it was fenced counts for no activation any more; for rollouts it still vouches.
VOID_ACKS = text("""
    UPDATE acks SET activation_id = NULL
    WHERE run_no = :run_no AND worker_id = :worker_id AND activation_id IS NOT NULL AND matching
      AND activation_id IN (SELECT activation_id FROM activations WHERE run_no = :run_no AND state = 'open')
""")

STORE_ACK = text("""
    INSERT INTO acks (run_no, worker_id, incarnation, version, artifact_hash, matching, detail, digest_layout,
                      digest_registered, digest_active, caches_reset, activation_id)
    VALUES (:run_no, :worker_id, :incarnation, :version, :artifact_hash, :matching, :detail, :digest_layout,
            :digest_registered, :digest_active, CAST(:caches_reset AS text[]), :activation_id)
    ON CONFLICT (run_no, worker_id, incarnation, version) DO UPDATE SET
        artifact_hash = EXCLUDED.artifact_hash, matching = EXCLUDED.matching, detail = EXCLUDED.detail,
        digest_layout = EXCLUDED.digest_layout, digest_registered = EXCLUDED.digest_registered,
        digest_active = EXCLUDED.digest_active, caches_reset = EXCLUDED.caches_reset,
        activation_id = EXCLUDED.activation_id,
        acked_at = clock_timestamp()
    RETURNING (xmax = 0) AS first
""")

# Whether the worker's last word was just this, and was judged as now: another's word, or the version's end, may have
# changed that. After it served something else the same ack is news again.
SAME_ACK = text("""
    SELECT 1 AS same FROM acks
    WHERE NOT EXISTS (
        SELECT FROM acks later WHERE later.run_no = :run_no AND later.worker_id = :worker_id
            AND later.incarnation = :incarnation AND later.acked_at > acks.acked_at)
      AND run_no = :run_no AND worker_id = :worker_id AND incarnation = :incarnation AND version = :version
      AND artifact_hash = :artifact_hash AND matching = :matching AND detail IS NOT DISTINCT FROM CAST(:detail AS text)
      AND (digest_layout, digest_registered, digest_active) IS NOT DISTINCT FROM
          (CAST(:digest_layout AS text), CAST(:digest_registered AS text), CAST(:digest_active AS text))
      AND caches_reset = CAST(:caches_reset AS text[])
      AND activation_id IS NOT DISTINCT FROM CAST(:activation_id AS text)
""")

# What engines of this layout hold of this artifact, by what they said last: those that are trusted as they stand. Where
# two contradict each other the one that spoke first is believed, until somebody fences it.
SAME_LAYOUT = text("""
    SELECT a.worker_id, a.digest_registered, a.digest_active
    FROM acks a JOIN workers w USING (run_no, worker_id, incarnation)
    WHERE a.run_no = :run_no AND a.artifact_hash = :artifact_hash AND a.digest_layout = :digest_layout AND a.matching
      AND a.worker_id <> :worker_id AND w.fenced_reason IS NULL AND w.deregistered_at IS NULL
      AND (a.digest_registered <> :digest_registered OR a.digest_active <> CAST(:digest_active AS text))
    ORDER BY a.acked_at, a.worker_id LIMIT 1
""")

# The artifact that this incarnation served before, if its engine still holds those very weights.
UNCHANGED = text("""
    SELECT version FROM acks
    WHERE run_no = :run_no AND worker_id = :worker_id AND incarnation = :incarnation
      AND artifact_hash <> :artifact_hash AND digest_layout = :digest_layout AND matching
      AND (digest_registered = :digest_registered OR digest_active = CAST(:digest_active AS text))
    ORDER BY acked_at DESC LIMIT 1
""")

# Groups that could still enter an update and are not consumed, and those that other tickets stand for.
GROUPS_IN_FLIGHT = text("""
    SELECT
        (SELECT count(*) FROM groups g
         WHERE g.run_no = :run_no AND g.state = 'open'
           AND (g.freshest_clock IS NULL OR g.freshest_clock >= :active_clock - CAST(:max_lag AS int))) AS unconsumed,
        (SELECT count(*) FROM tickets t WHERE t.run_no = :run_no AND t.expires_at > clock_timestamp()) AS ticketed
""")

# A ticket that is there is kept by its holder; one that ended may go to somebody else.
GRANT = text("""
    INSERT INTO tickets (run_no, group_id, worker_id, incarnation, expires_at)
    SELECT :run_no, id, :worker_id, :incarnation, clock_timestamp() + make_interval(secs => :ticket_seconds)
    FROM unnest(CAST(:group_ids AS text[])) AS id
    ON CONFLICT (run_no, group_id) DO UPDATE SET
        worker_id = EXCLUDED.worker_id, incarnation = EXCLUDED.incarnation, expires_at = EXCLUDED.expires_at
    RETURNING group_id, expires_at
""")

TICKETS_OF = text("""
    SELECT group_id, worker_id FROM tickets
    WHERE run_no = :run_no AND group_id = ANY(CAST(:group_ids AS text[])) AND expires_at > clock_timestamp()
""")

ARRIVED_GROUPS = text("""
    SELECT group_id FROM groups WHERE run_no = :run_no AND group_id = ANY(CAST(:group_ids AS text[]))
""")

DROP_ENDED_TICKETS = text("DELETE FROM tickets WHERE expires_at <= clock_timestamp() - interval '1 hour'")
