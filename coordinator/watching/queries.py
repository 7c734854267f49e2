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
