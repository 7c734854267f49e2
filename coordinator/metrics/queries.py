"""Every statement of `/metrics`. Each goes along an index over what is open or new, whatever a run has behind it."""

from sqlalchemy import text

from coordinator.storage.lost import lost_after
from coordinator.workers.queries import SUSPECT

# The runs in which anything happened within a day, the latest first. `event_no` of a run is its newest entry.
RUNS = text("""
    SELECT * FROM (
        SELECT r.run_no, r.run_id, r.active_version, r.event_no,
            COALESCE((SELECT u.ended_at FROM updates u WHERE u.run_no = r.run_no AND u.commit_no = r.last_commit_no),
                     r.created_at) AS last_commit_at,
            GREATEST(r.created_at, j.at,
                     (SELECT max(heartbeat_at) FROM workers w WHERE w.run_no = r.run_no)) AS moved_at
        FROM runs r LEFT JOIN journal j ON j.run_no = r.run_no AND j.event_no = r.event_no
    ) AS r
    WHERE moved_at > clock_timestamp() - interval '1 day' ORDER BY moved_at DESC LIMIT :most
""")

COUNTS = text("""
    SELECT run_no, name, CAST(sum(n) AS bigint) AS n FROM (
        SELECT run_no, name, n FROM counts WHERE run_no = ANY(CAST(:run_nos AS int[]))
        UNION ALL
        SELECT run_no, name, delta FROM count_deltas WHERE run_no = ANY(CAST(:run_nos AS int[]))
    ) AS c GROUP BY run_no, name
""")

GROUPS = text("""
    SELECT run_no,
        count(*) FILTER (WHERE held_until > clock_timestamp()) AS held,
        EXTRACT(EPOCH FROM clock_timestamp()
            - min(first_arrival_at) FILTER (WHERE rewarded = 0 AND NOT bound)) AS generated,
        EXTRACT(EPOCH FROM clock_timestamp()
            - min(first_arrival_at) FILTER (WHERE rewarded > 0 AND NOT bound)) AS rewarded
    FROM groups WHERE run_no = ANY(CAST(:run_nos AS int[])) AND state = 'open' GROUP BY run_no
""")

UPDATES = text("""
    SELECT run_no, count(*) AS open, EXTRACT(EPOCH FROM clock_timestamp() - min(opened_at)) AS reserved
    FROM updates WHERE run_no = ANY(CAST(:run_nos AS int[])) AND state = 'open' AND lease_until > clock_timestamp()
    GROUP BY run_no
""")

_LOST = lost_after("CAST(r.settings ->> 'lost_after_seconds' AS float8)")

WORKERS = text(f"""
    SELECT run_no,
        count(*) FILTER (WHERE NOT lost) AS live,
        count(*) FILTER (WHERE lost) AS lost,
        count(*) FILTER (WHERE fenced) AS fenced,
        count(*) FILTER (WHERE draining) AS draining,
        count(*) FILTER (WHERE asleep) AS asleep,
        count(*) FILTER (WHERE suspect) AS suspect
    FROM (
        SELECT workers.run_no, {_LOST} AS lost, fenced_reason IS NOT NULL AS fenced, draining,
            COALESCE(asleep_until > clock_timestamp(), false) AS asleep, {SUSPECT} IS NOT NULL AS suspect
        FROM workers JOIN runs r USING (run_no)
        WHERE workers.run_no = ANY(CAST(:run_nos AS int[])) AND deregistered_at IS NULL
    ) AS w GROUP BY run_no
""")

ACTIVATIONS = text("""
    SELECT a.run_no, EXTRACT(EPOCH FROM clock_timestamp() - a.opened_at) AS open,
        count(w.worker_id) FILTER (WHERE k.matching IS NULL) AS missing,
        count(w.worker_id) FILTER (WHERE k.matching) AS matching,
        count(w.worker_id) FILTER (WHERE NOT k.matching) AS mismatched
    FROM activations a
    LEFT JOIN activation_workers w
        ON w.run_no = a.run_no AND w.activation_id = a.activation_id AND w.dropped_at IS NULL
    LEFT JOIN acks k
        ON k.run_no = a.run_no AND k.worker_id = w.worker_id AND k.incarnation = w.incarnation
           AND k.version = a.version AND k.activation_id = a.activation_id
    WHERE a.run_no = ANY(CAST(:run_nos AS int[])) AND a.state = 'open'
    GROUP BY a.run_no, a.opened_at
""")

# What the journals of these runs have after these numbers. Where an activation ends, how long it had been open.
EVENTS = text("""
    SELECT j.run_no, j.event_no, j.event, j.subject, j.at, j.detail ->> 'stage' AS stage, a.state AS ended_as,
        EXTRACT(EPOCH FROM a.ended_at - a.opened_at) AS open_seconds
    FROM unnest(CAST(:run_nos AS int[]), CAST(:seen AS bigint[])) AS s (run_no, seen)
    JOIN journal j ON j.run_no = s.run_no AND j.event_no > s.seen
    LEFT JOIN activations a ON a.run_no = j.run_no AND a.ended_at IS NOT NULL AND a.activation_id = CASE
        WHEN j.event = 'policy.activated' THEN j.detail ->> 'activation_id'
        WHEN j.event IN ('activation.failed', 'activation.given_up', 'activation.superseded') THEN j.subject END
    ORDER BY j.run_no, j.event_no LIMIT :most
""")
