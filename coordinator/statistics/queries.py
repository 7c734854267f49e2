"""Every statement about statistics. What each reads is bounded by the window: the audit and the members of updates lie
on disk in the order of their times, so that block ranges find a stretch of it; arrivals have an index.
"""

from sqlalchemy import text

# A window that ends now, cut where the epoch's seconds are divisible by a bucket: a chart does not tremble.
WINDOW = text("""
    SELECT now, to_timestamp((floor(CAST(extract(epoch FROM now) AS float8) / CAST(:bucket_seconds AS float8))
        - CAST(:buckets AS int) + 1) * CAST(:bucket_seconds AS float8)) AS begin
    FROM (SELECT clock_timestamp() AS now) AS clock
""")

FLOW = text("""
    SELECT CAST(floor(CAST(extract(epoch FROM at - CAST(:begin AS timestamptz)) AS float8)
            / CAST(:bucket_seconds AS float8)) AS int) AS bucket,
        event, count(*) AS n
    FROM rollout_audit
    WHERE run_no = :run_no AND at >= :begin AND at < :end
    GROUP BY bucket, event
""")

REFUSED = text("""
    SELECT event, COALESCE(reason, '') AS reason, count(*) AS rollouts FROM rollout_audit
    WHERE run_no = :run_no AND at >= :begin AND at < :end AND event IN ('quarantine', 'set_aside', 'discard')
    GROUP BY event, reason ORDER BY rollouts DESC, reason, event LIMIT 50
""")

REJECTED = text("""
    SELECT worker_id, incarnation, reason, n AS rollouts, last_detail, last_at FROM rejections
    WHERE run_no = :run_no AND last_at >= :begin ORDER BY last_at DESC, worker_id, reason LIMIT 50
""")

# Ages of what may still be used, among the groups that are next in line. What ended is in groups that are not open.
AGES = """
    SELECT r.state, count(*) AS rollouts, min(r.arrived_at) AS oldest_at,
        extract(epoch FROM max(r.age)) AS oldest_seconds,
        extract(epoch FROM percentile_cont(0.5) WITHIN GROUP (ORDER BY r.age)) AS median_seconds
    FROM (
        SELECT r.state, r.arrived_at, CAST(:end AS timestamptz) - r.arrived_at AS age
        FROM (
            SELECT group_id FROM groups WHERE run_no = :run_no AND state = 'open'
            ORDER BY oldest_clock, first_arrival_at LIMIT 10000
        ) AS g
        CROSS JOIN LATERAL (
            SELECT state, arrived_at FROM rollouts
            WHERE run_no = :run_no AND {group} = g.group_id
              AND state IN ('generated', 'reward_failed', 'rewarded', 'reserved')
            OFFSET 0
        ) AS r
        LIMIT 10000
    ) AS r
    GROUP BY r.state
"""

ARRIVED = text("""
    SELECT newest_version AS version, state, count(*) AS n FROM rollouts
    WHERE run_no = :run_no AND arrived_at >= :begin AND newest_version IS NOT NULL
    GROUP BY newest_version, state
""")

# Each verdict that judged lag and drift, by the oldest version of the rollout.
JUDGED = text("""
    SELECT version, lag, bin, count(*) AS n, count(drift) AS measured, sum(drift) AS total, max(drift) AS greatest
    FROM (
        SELECT (SELECT min(v) FROM unnest(versions) AS v) AS version, lag, drift,
            CASE WHEN drift IS NOT NULL THEN
                CAST(least(floor(drift / CAST(:bin_width AS float8)), CAST(:bins AS int)) AS int) END AS bin
        FROM update_members
        WHERE run_no = :run_no AND at >= :begin AND at < :end
          AND verdict IN ('reserved', 'stale_policy', 'policy_drift') AND lag IS NOT NULL
    ) AS m
    WHERE version IS NOT NULL
    GROUP BY version, lag, bin
""")
