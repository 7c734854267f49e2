"""Every statement about watching. They only read, each by itself."""

from sqlalchemy import text

# The entries after a number, with the run looked up by its id.
ENTRIES_AFTER = text("""
    SELECT j.event_no, j.event, j.subject, j.actor, j.at, CAST(j.detail AS text) AS detail
    FROM runs r
    CROSS JOIN LATERAL (
        SELECT * FROM journal WHERE run_no = r.run_no AND event_no > :after ORDER BY event_no LIMIT :limit
    ) AS j
    WHERE r.run_id = :run_id
    ORDER BY j.event_no
""")

# What the journal says of an activation and its version. Updates may have the same names, so the event decides, too.
ACTIVATION_STEPS = text("""
    SELECT event_no, event, subject, at, CAST(detail AS text) AS detail FROM journal
    WHERE run_no = :run_no AND (
        (subject = :activation_id AND event LIKE 'activation.%')
        OR (subject = :version AND (
            event IN ('policy.prepared', 'policy.committed')
            OR (event = 'policy.activated' AND detail ->> 'activation_id' = :activation_id)
        ))
    )
    ORDER BY event_no
""")

# What some workers did between two entries: everything about this version, and what voids an ack.
WORKER_STEPS = text("""
    SELECT j.event_no, j.event, j.subject, j.at, CAST(j.detail AS text) AS detail
    FROM unnest(CAST(:worker_ids AS text[])) AS w (worker_id)
    CROSS JOIN LATERAL (
        SELECT * FROM journal
        WHERE run_no = :run_no AND subject = w.worker_id AND event_no > :after AND event_no < :before AND (
            event IN ('worker.registered', 'worker.fenced')
            OR (event IN ('worker.stage', 'worker.acked', 'worker.failed')
                AND CAST(detail ->> 'version' AS bigint) = :version)
        )
        OFFSET 0
    ) AS j
    ORDER BY j.event_no
""")
