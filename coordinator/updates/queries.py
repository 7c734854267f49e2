"""Every statement about updates. `{group}` is the rollout column that names the group.

How they are planned is by design, as `coordinator.rollouts.queries` has it.
"""

from __future__ import annotations

from sqlalchemy import TextClause, text

from coordinator.rules.lifecycle import sources
from coordinator.rules.reservation import RESERVE_REASONS
from coordinator.storage.lost import LOST

_LIVE = "(u.state = 'open' AND u.lease_until > clock_timestamp())"
_STATE = f"CASE WHEN u.state = 'open' AND NOT {_LIVE} THEN 'expired' ELSE u.state END"
_COLUMNS = f"""
    u.update_id, u.contract_no, {_STATE} AS state,
    u.owner, u.policy_version, u.artifact_hash, u.lag_clock, u.after_commit_no, u.commit_no, u.reason, u.opened_at,
    u.lease_until, u.ended_at,
    (SELECT count(*) FROM update_members m
     JOIN LATERAL (SELECT * FROM rollouts WHERE run_no = m.run_no AND rollout_id = m.rollout_id LIMIT 1) r
        ON r.state = 'reserved' AND r.update_id = m.update_id
     WHERE m.run_no = u.run_no AND m.update_id = u.update_id AND m.verdict = 'reserved') AS reserved,
    w.last_commit_no
"""
_WITH_RUN = "updates u JOIN runs w USING (run_no)"

GET_UPDATE = text(f"SELECT {_COLUMNS} FROM {_WITH_RUN} WHERE u.run_no = :run_no AND u.update_id = :update_id")


def _list_updates(beyond: str, order: str) -> TextClause:
    return text(f"""
        SELECT {_COLUMNS} FROM {_WITH_RUN}
        WHERE u.run_no = :run_no AND (CAST(:state AS text) IS NULL OR {_STATE} = :state)
          AND (CAST(:after AS text) IS NULL OR (u.opened_at, u.update_id) {beyond}
               (SELECT l.opened_at, l.update_id FROM updates l WHERE l.run_no = :run_no AND l.update_id = :after))
        ORDER BY u.opened_at {order}, u.update_id {order} LIMIT :limit
    """)


OLDEST_UPDATES, NEWEST_UPDATES = _list_updates(">", "ASC"), _list_updates("<", "DESC")

LOCK_UPDATE = text("SELECT FROM updates WHERE run_no = :run_no AND update_id = :update_id FOR UPDATE")

INSERT_UPDATE = text("""
    INSERT INTO updates (run_no, update_id, owner, policy_version, artifact_hash, lag_clock, opened_at, lease_until)
    SELECT :run_no, :update_id, :owner, :policy_version, :artifact_hash, :lag_clock, t,
           t + make_interval(secs => :lease_seconds)
    FROM (SELECT clock_timestamp() AS t) AS now
""")

RESTATE_UPDATE = text("""
    UPDATE updates SET policy_version = :policy_version, artifact_hash = :artifact_hash, lag_clock = :lag_clock
    WHERE run_no = :run_no AND update_id = :update_id
""")

RENEW_UPDATE = text("""
    UPDATE updates SET lease_until = clock_timestamp() + make_interval(secs => :lease_seconds)
    WHERE run_no = :run_no AND update_id = :update_id AND state = 'open' AND lease_until > clock_timestamp()
    RETURNING lease_until
""")

NAME_LINE = text("""
    UPDATE updates SET after_commit_no = :after_commit_no
    WHERE run_no = :run_no AND update_id = :update_id AND after_commit_no IS NULL
""")

# The update that holds the group lives: a hold ends with it.
_HOLDER_LIVES = """EXISTS (
        SELECT FROM updates u WHERE u.run_no = g.run_no AND u.update_id = g.held_by
            AND u.state = 'open' AND u.lease_until > clock_timestamp())"""

# A group that this update may be offered: whole, admissible, not held by another update that lives, and not bound: a
# latecomer alone would split it.
_OFFERED = f"""
    g.run_no = :run_no AND g.state = 'open' AND g.rewarded >= :usable_needed AND g.rewarded > 0
    AND (g.settled OR g.deadline_at <= clock_timestamp())
    AND g.newest_clock <= :lag_clock
    AND (NOT :gate_lag OR g.freshest_clock >= :lag_clock - CAST(:max_lag AS int))
    AND (g.held_by IS NULL OR g.held_by = :update_id OR g.held_until <= clock_timestamp()
         OR NOT {_HOLDER_LIVES})
    AND NOT g.bound
"""
_OWN_FIRST = "(g.held_by IS NOT DISTINCT FROM :update_id) DESC, g.oldest_clock, g.first_arrival_at, g.group_id"

# The contract and the ruleset that an answer must keep to: those of what the update holds, else of the first group.
PEEK_GROUP = text(f"""
    SELECT g.contract_no, g.ruleset_no FROM groups g WHERE {_OFFERED} ORDER BY {_OWN_FIRST} LIMIT 1
""")

BOUND_RULESET = text("""
    SELECT m.ruleset_no FROM update_members m
    WHERE m.run_no = :run_no AND m.update_id = :update_id AND m.verdict = 'reserved' LIMIT 1
""")

# Claims whole groups for this update: its own holds first, then the oldest admissible. A hold hides a group from
# other updates while it lasts and its update lives. `rollouts` ends the answer with the group that reaches it.
HOLD_GROUPS = f"""
    WITH pick AS (
        SELECT g.group_id, g.rewarded, g.held_by IS NOT DISTINCT FROM :update_id AS own, g.oldest_clock,
            g.first_arrival_at
        FROM groups g
        WHERE {_OFFERED}
          AND (CAST(:contract_no AS int) IS NULL OR g.contract_no = :contract_no)
          AND (CAST(:ruleset_no AS int) IS NULL OR g.ruleset_no = :ruleset_no)
        ORDER BY {_OWN_FIRST}
        LIMIT :groups
        FOR UPDATE SKIP LOCKED
    ), kept AS (
        SELECT group_id, sum(rewarded) OVER (ORDER BY own DESC, oldest_clock, first_arrival_at, group_id) - rewarded
            AS before
        FROM pick
    )
    UPDATE groups g SET held_by = :update_id, held_until = clock_timestamp() + make_interval(secs => :hold_seconds)
    FROM kept
    WHERE g.run_no = :run_no AND g.group_id = kept.group_id
      AND (CAST(:rollouts AS int) IS NULL OR kept.before < :rollouts)
    RETURNING g.group_id, g.oldest_clock, g.first_arrival_at, g.rewarded
"""

# Members of these groups that are rewarded, or that this update already holds, with their evidence.
CANDIDATES = """
    SELECT r.rollout_id, r.revision, r.state, r.{group} AS group_id, e.task_id, e.task_source, r.sample_index,
           r.attempt, v.version AS policy_version, CAST(:lag_clock AS int) - r.oldest_clock AS lag, r.reward,
           c.contract_hash, e.token_ids, e.action_mask, e.behavior_log_probs, e.side_data,
           COALESCE(e.row_starts, '{0}') AS row_starts
    FROM unnest(CAST(:group_ids AS text[])) WITH ORDINALITY AS n (group_id, place)
    CROSS JOIN LATERAL (
        SELECT * FROM rollouts
        WHERE run_no = :run_no AND {group} = n.group_id
          AND (state = 'rewarded' OR (state = 'reserved' AND update_id = :update_id))
        OFFSET 0
    ) r
    CROSS JOIN LATERAL (
        SELECT * FROM rollout_evidence WHERE run_no = :run_no AND rollout_id = r.rollout_id LIMIT 1
    ) e
    CROSS JOIN LATERAL (
        SELECT contract_hash FROM contracts WHERE run_no = :run_no AND contract_no = r.contract_no LIMIT 1
    ) c
    CROSS JOIN LATERAL (
        SELECT p.version FROM policy_versions p
        WHERE p.run_no = :run_no AND p.version = ANY(r.versions) AND p.lag_clock = r.oldest_clock
        ORDER BY p.version LIMIT 1
    ) v
    ORDER BY n.place, r.sample_index, r.attempt
"""

# Why no candidate is there, and since when.
EMPTY = text(f"""
    SELECT
        (SELECT max(heartbeat_at) FROM workers WHERE run_no = :run_no) AS last_heartbeat,
        EXISTS (SELECT FROM workers WHERE run_no = :run_no AND deregistered_at IS NULL AND NOT draining
                AND NOT ({LOST})) AS producing,
        o.*
    FROM (
        SELECT count(*) AS rewarded_groups,
            count(*) FILTER (WHERE :gate_lag AND g.freshest_clock < :lag_clock - CAST(:max_lag AS int)) AS stale,
            count(*) FILTER (WHERE g.newest_clock > :lag_clock) AS ahead,
            count(*) FILTER (WHERE g.rewarded < :usable_needed
                             OR NOT (g.settled OR g.deadline_at <= clock_timestamp())) AS incomplete,
            count(*) FILTER (WHERE g.contract_no <> CAST(:contract_no AS int)) AS other_contract,
            min(g.first_arrival_at) AS first_arrival_at,
            count(*) FILTER (WHERE h.others) AS held,
            COALESCE(min(g.held_until) FILTER (WHERE h.others) - make_interval(secs => :hold_seconds),
                     min(g.first_arrival_at) FILTER (WHERE h.others)) AS held_since
        FROM groups g, LATERAL (
            SELECT g.bound OR (g.held_by <> :update_id AND g.held_until > clock_timestamp() AND {_HOLDER_LIVES})
                AS others
        ) AS h
        WHERE g.run_no = :run_no AND g.state = 'open' AND g.rewarded > 0
    ) AS o
""")

LAST_BOUND = text("""
    SELECT max(ended_at) FROM updates WHERE run_no = :run_no AND state = 'committed'
""")

NAMED_EVIDENCE = text("""
    SELECT e.* FROM unnest(CAST(:rollout_ids AS text[])) AS n (rollout_id)
    CROSS JOIN LATERAL (
        SELECT rollout_id, action_mask, behavior_log_probs FROM rollout_evidence
        WHERE run_no = :run_no AND rollout_id = n.rollout_id LIMIT 1
    ) e
""")

_CONDITIONS = {
    "missing_rollout": "r.rollout_id IS NULL",
    "idempotent_retry": "(SELECT live FROM alive) AND r.state = 'reserved' AND r.update_id = :update_id",
    "update_fenced": "NOT (SELECT live FROM alive)",
    "revision_conflict": "r.revision <> n.seen",
    "not_rewarded": "r.state <> 'rewarded'",
    "contract_mismatch": "r.contract_no <> COALESCE(CAST(:contract_no AS int), (SELECT contract_no FROM pin))",
    "policy_withdrawn": """EXISTS (SELECT FROM policy_versions p WHERE p.run_no = :run_no
                            AND p.version = ANY(r.versions) AND p.state = 'withdrawn')""",
    "candidate_not_active": "v.state IN ('prepared', 'committed')",
    "future_policy": "r.newest_clock > :lag_clock",
    "stale_policy": ":gate_lag AND :lag_clock - r.oldest_clock > :max_lag",
    "policy_drift": ":gate_drift AND NOT COALESCE(n.drift <= :max_drift, false)",
}
# A retry replays, in the place of idempotent_retry, the refusal that moved the rollout at that revision.
_REPLAY = """WHEN (SELECT live FROM alive) AND earlier.verdict IS NOT NULL AND earlier.verdict <> 'reserved'
    THEN earlier.verdict"""


def _verdict() -> str:
    cases = []
    for reason in RESERVE_REASONS:
        if reason in _CONDITIONS:
            cases.append(f"WHEN {_CONDITIONS[reason]} THEN '{reason}'")
        if reason == "idempotent_retry":
            cases.append(_REPLAY)
    return "CASE " + " ".join(cases) + f" ELSE '{RESERVE_REASONS[-1]}' END"


# Decides each named rollout in the order of reasons and binds those that are reserved, in one statement.
# The update's row and the rows of the groups are locked; its lease may have ended while it waited for them.
# `unnamed` is a rewarded member that the call left out, `elsewhere` that another update holds members of the group.
RESERVE = f"""
    WITH alive AS MATERIALIZED (
        SELECT CAST(:live AS bool) AND EXISTS (
            SELECT FROM updates WHERE run_no = :run_no AND update_id = :update_id AND state = 'open'
                AND lease_until > clock_timestamp()) AS live
    ), named AS (
        SELECT * FROM unnest(
            CAST(:rollout_ids AS text[]), CAST(:revisions AS int[]), CAST(:uses AS text[]), CAST(:drifts AS float8[]),
            CAST(:drift_max AS float8[]), CAST(:drift_k3 AS float8[]), CAST(:drift_outside AS float8[]),
            CAST(:drift_sample_size AS float8[])
        ) WITH ORDINALITY AS n (rollout_id, seen, use, drift, drift_max, drift_k3, drift_outside,
                                 drift_sample_size, item)
    ), pin AS (
        SELECT r.contract_no FROM named n
        JOIN LATERAL (SELECT * FROM rollouts WHERE run_no = :run_no AND rollout_id = n.rollout_id LIMIT 1) r
            ON r.state = 'rewarded' AND r.revision = n.seen
        ORDER BY n.item LIMIT 1
    ), judged AS (
        SELECT n.*, r.state, r.revision, r.{{group}} AS group_key, r.versions, r.ruleset_no, r.worker_id,
            r.incarnation, r.contract_no, r.reward, earlier.drift AS earlier_drift,
            earlier.verdict IS NOT NULL AS judged_before,
            :lag_clock - r.oldest_clock AS lag, {_verdict()} AS verdict
        FROM named n
        LEFT JOIN LATERAL (
            SELECT * FROM rollouts WHERE run_no = :run_no AND rollout_id = n.rollout_id LIMIT 1
        ) r ON true
        LEFT JOIN LATERAL (
            SELECT state FROM policy_versions WHERE run_no = :run_no AND version = r.newest_version LIMIT 1
        ) v ON true
        LEFT JOIN LATERAL (
            SELECT verdict, drift FROM update_members
            WHERE run_no = :run_no AND update_id = :update_id AND rollout_id = n.rollout_id AND revision = n.seen
            LIMIT 1
        ) earlier ON true
    ), usable AS (
        SELECT group_key, count(*) FILTER (WHERE verdict IN ('reserved', 'idempotent_retry')) AS n,
            CASE WHEN (SELECT live FROM alive) THEN (
               SELECT s.rollout_id FROM rollouts s
               WHERE s.run_no = :run_no AND s.{{group}} = judged.group_key AND s.state = 'rewarded'
                 AND NOT s.rollout_id = ANY(CAST(:rollout_ids AS text[]))
               ORDER BY s.rollout_id LIMIT 1) END AS unnamed,
            CASE WHEN bool_or(verdict = 'reserved') AND (
               SELECT bound FROM groups WHERE run_no = :run_no AND group_id = judged.group_key) THEN (
               SELECT s.rollout_id FROM rollouts s
               WHERE s.run_no = :run_no AND s.{{group}} = judged.group_key AND s.state = 'reserved'
                 AND s.update_id <> :update_id LIMIT 1) END AS elsewhere
        FROM judged GROUP BY group_key
    ), finals AS (
        SELECT j.*, u.unnamed,
            CASE WHEN j.verdict = 'reserved' AND (u.n < :usable_needed OR u.elsewhere IS NOT NULL) THEN 'group_refused'
                 ELSE j.verdict END AS final
        FROM judged j LEFT JOIN usable u USING (group_key)
    ), decided AS (
        SELECT *, CASE final
            WHEN 'reserved' THEN 'reserved' WHEN 'stale_policy' THEN :stale_to
            WHEN 'policy_drift' THEN 'quarantined' WHEN 'policy_withdrawn' THEN 'quarantined'
        END AS next_state
        FROM finals
    ), moves AS (
        SELECT * FROM decided WHERE state = 'rewarded' AND revision = seen
    ), moved AS (
        UPDATE rollouts r SET state = m.next_state, revision = r.revision + 1,
            reason = CASE WHEN m.final = 'reserved' THEN NULL ELSE m.final END,
            update_id = CASE WHEN m.final = 'reserved' THEN :update_id END
        FROM moves m
        WHERE r.run_no = :run_no AND r.rollout_id = m.rollout_id AND r.state = 'rewarded' AND r.revision = m.seen
          AND m.next_state IS NOT NULL
        RETURNING r.rollout_id, r.state, r.revision, m.seen, m.final, m.use, m.group_key, m.versions, m.ruleset_no,
            m.contract_no, m.lag, m.drift, m.drift_max, m.drift_k3, m.drift_outside, m.drift_sample_size
    ), audit AS (
        INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor, update_id,
                                   contract_hash, lag, drift, max_lag, max_drift, judged_version)
        SELECT :run_no, m.rollout_id, m.revision,
               CASE m.state WHEN 'reserved' THEN 'reserve' WHEN 'offline' THEN 'set_aside' ELSE 'quarantine' END,
               'rewarded', m.state, CASE WHEN m.final = 'reserved' THEN NULL ELSE m.final END, :actor, :update_id,
               (SELECT contract_hash FROM contracts WHERE run_no = :run_no AND contract_no = m.contract_no),
               m.lag, m.drift, :max_lag, :max_drift,
               CASE WHEN m.final <> 'reserved' THEN CAST(:policy_version AS int) END
        FROM moved m
    ), members AS (
        INSERT INTO update_members (run_no, update_id, rollout_id, revision, verdict, would_refuse, use, group_id,
                                    versions, ruleset_no, lag, drift, drift_max, drift_k3, drift_outside_share,
                                    drift_sample_size)
        SELECT :run_no, :update_id, m.rollout_id, m.seen, m.final,
               CASE WHEN m.final <> 'reserved' THEN NULL WHEN m.lag > :max_lag THEN 'stale_policy'
                    WHEN m.drift > :max_drift THEN 'policy_drift' END,
               m.use, m.group_key, m.versions, m.ruleset_no, m.lag, m.drift, m.drift_max, m.drift_k3, m.drift_outside,
               m.drift_sample_size
        FROM moved m
    )
    SELECT d.item, d.rollout_id, d.final AS verdict, d.group_key AS group_id, d.lag, d.worker_id, d.incarnation,
           d.contract_no, d.ruleset_no, d.reward, d.moved, d.drift AS measured, d.judged_before,
           COALESCE(d.earlier_drift, d.drift) AS drift,
           CASE WHEN d.moved THEN d.next_state ELSE d.state END AS state,
           d.revision + CASE WHEN d.moved THEN 1 ELSE 0 END AS revision,
           CASE WHEN d.final <> 'reserved' THEN NULL WHEN d.lag > :max_lag THEN 'stale_policy'
                WHEN d.drift > :max_drift THEN 'policy_drift' END AS would_refuse,
           d.unnamed
    FROM (SELECT *, rollout_id IN (SELECT rollout_id FROM moved) AS moved FROM decided) d ORDER BY d.item
"""

PIN_CONTRACT = text("""
    UPDATE updates SET contract_no = :contract_no
    WHERE run_no = :run_no AND update_id = :update_id AND contract_no IS NULL
""")

# A ruleset is its name and its hash.
BOUND_RULESETS = text("""
    SELECT DISTINCT s.ruleset_id || ' (' || left(s.ruleset_hash, 8) || ')' AS ruleset, m.ruleset_no
    FROM update_members m JOIN rulesets s USING (run_no, ruleset_no)
    WHERE m.run_no = :run_no AND m.update_id = :update_id AND m.verdict = 'reserved' ORDER BY 1, 2
""")

# Sums the drift of fresh rollouts by the life of the worker that made them. Last in the order of locks.
ADD_WORKER_DRIFT = text("""
    INSERT INTO worker_drift (run_no, worker_id, incarnation, n, total)
    SELECT :run_no, worker_id, incarnation, count(*), sum(drift)
    FROM unnest(CAST(:worker_ids AS text[]), CAST(:incarnations AS text[]), CAST(:drifts AS float8[]))
        AS d (worker_id, incarnation, drift)
    GROUP BY worker_id, incarnation ORDER BY worker_id, incarnation
    ON CONFLICT (run_no, worker_id, incarnation) DO UPDATE SET
        n = worker_drift.n + EXCLUDED.n, total = worker_drift.total + EXCLUDED.total
""")

# A refused group's members fall when the group is counted anew; here the update remembers that it asked for them.
REMEMBER_FALLEN = """
    INSERT INTO update_members (run_no, update_id, rollout_id, revision, verdict, use, group_id, versions, ruleset_no,
                                lag, drift, drift_max, drift_k3, drift_outside_share, drift_sample_size)
    SELECT r.run_no, :update_id, r.rollout_id, f.seen, 'group_refused', f.use, r.{group}, r.versions, r.ruleset_no,
           CAST(:lag_clock AS int) - r.oldest_clock, f.drift, f.drift_max, f.drift_k3, f.drift_outside,
           f.drift_sample_size
    FROM unnest(
        CAST(:rollout_ids AS text[]), CAST(:revisions AS int[]), CAST(:uses AS text[]), CAST(:drifts AS float8[]),
        CAST(:drift_max AS float8[]), CAST(:drift_k3 AS float8[]), CAST(:drift_outside AS float8[]),
        CAST(:drift_sample_size AS float8[])
    ) AS f (rollout_id, seen, use, drift, drift_max, drift_k3, drift_outside, drift_sample_size)
    CROSS JOIN LATERAL (SELECT * FROM rollouts WHERE run_no = :run_no AND rollout_id = f.rollout_id LIMIT 1) r
"""

# Groups of which this update already holds members, in the order in which they were bound.
OWN_GROUPS = """
    SELECT m.group_id, count(*) AS members FROM update_members m
    JOIN LATERAL (SELECT * FROM rollouts WHERE run_no = m.run_no AND rollout_id = m.rollout_id LIMIT 1) r
        ON r.state = 'reserved' AND r.update_id = m.update_id
    WHERE m.run_no = :run_no AND m.update_id = :update_id AND m.verdict = 'reserved'
    GROUP BY m.group_id ORDER BY min(m.at), m.group_id
"""

HELD_ROLLOUTS = """
    SELECT r.rollout_id, r.{group} AS group_id
    FROM update_members m
    JOIN LATERAL (SELECT * FROM rollouts WHERE run_no = m.run_no AND rollout_id = m.rollout_id LIMIT 1) r
        ON r.state = 'reserved' AND r.update_id = m.update_id
    WHERE m.run_no = :run_no AND m.update_id = :update_id AND m.verdict = 'reserved'
"""

WITHDRAWN = text("""
    SELECT p.version FROM policy_versions p
    WHERE p.run_no = :run_no AND p.state = 'withdrawn' AND (
        p.version = :policy_version OR p.version IN (
            SELECT unnest(m.versions) FROM update_members m
            WHERE m.run_no = :run_no AND m.update_id = :update_id AND m.verdict = 'reserved'))
    ORDER BY p.version LIMIT 1
""")

# The next commit of the line, if the lease still lives by the database's clock.
COMMIT_UPDATE = text("""
    WITH now AS MATERIALIZED (SELECT clock_timestamp() AS t), ended AS (
        UPDATE updates u SET state = 'committed', commit_no = r.commits + 1, after_commit_no = :after_commit_no,
            ended_at = now.t
        FROM now, runs r
        WHERE u.run_no = :run_no AND u.update_id = :update_id AND u.state = 'open' AND u.lease_until >= now.t
          AND r.run_no = :run_no
        RETURNING u.commit_no
    )
    UPDATE runs r SET commits = e.commit_no, last_commit_no = e.commit_no FROM ended e WHERE r.run_no = :run_no
    RETURNING e.commit_no
""")

# Consumes what the update holds, or sets it aside where it was discarded; its groups are spent, and what is left
# of them goes offline.
CONSUME = f"""
    WITH discard AS (
        SELECT * FROM unnest(CAST(:discard_ids AS text[]), CAST(:discard_reasons AS text[])) AS d (rollout_id, reason)
    ), named AS MATERIALIZED (
        SELECT r.rollout_id, r.revision, r.{{group}} AS group_id, r.state, r.update_id, d.reason
        FROM unnest(CAST(:held_ids AS text[])) AS n (rollout_id)
        CROSS JOIN LATERAL (SELECT * FROM rollouts WHERE run_no = :run_no AND rollout_id = n.rollout_id LIMIT 1) r
        LEFT JOIN discard d ON d.rollout_id = n.rollout_id
    ), held AS (
        SELECT * FROM named WHERE state = 'reserved' AND update_id = :update_id
    ), moved AS (
        UPDATE rollouts r SET state = CASE WHEN h.reason IS NULL THEN 'consumed' ELSE 'offline' END,
            update_id = CASE WHEN h.reason IS NULL THEN r.update_id END, reason = h.reason, revision = h.revision + 1
        FROM held h WHERE r.run_no = :run_no AND r.rollout_id = h.rollout_id AND r.revision = h.revision
        RETURNING r.rollout_id, r.revision, r.state, r.reason
    ), spent AS (
        UPDATE groups g SET state = 'spent', rewarded = 0, held_by = NULL, held_until = NULL
        WHERE g.run_no = :run_no AND g.group_id = ANY(ARRAY(SELECT DISTINCT group_id FROM held))
    ), left_over AS (
        SELECT r.rollout_id, r.state, r.revision FROM (SELECT DISTINCT group_id FROM held) h
        CROSS JOIN LATERAL (
            SELECT rollout_id, state, revision FROM rollouts
            WHERE run_no = :run_no AND {{group}} = h.group_id
              AND state IN ({", ".join(f"'{s}'" for s in sources("set_aside"))})
            OFFSET 0
        ) r
    ), fallen AS (
        UPDATE rollouts r SET state = 'offline', reason = 'group_spent', revision = l.revision + 1
        FROM left_over l WHERE r.run_no = :run_no AND r.rollout_id = l.rollout_id AND r.revision = l.revision
        RETURNING r.rollout_id, r.revision, l.state AS from_state
    )
    INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor, update_id)
    SELECT :run_no, rollout_id, revision, CASE state WHEN 'consumed' THEN 'commit' ELSE 'discard' END, 'reserved',
           state, reason, :actor, :update_id
    FROM moved
    UNION ALL
    SELECT :run_no, rollout_id, revision, 'set_aside', from_state, 'offline', 'group_spent', :actor, :update_id
    FROM fallen
"""

# Gives back what the update holds, or quarantines it.
RELEASE = text("""
    WITH moved AS (
        UPDATE rollouts r SET
            state = CASE WHEN :quarantine THEN 'quarantined' ELSE 'rewarded' END,
            reason = CASE WHEN :quarantine THEN CAST(:reason AS text) END,
            update_id = NULL, revision = r.revision + 1
        WHERE r.run_no = :run_no AND r.rollout_id = ANY(CAST(:held_ids AS text[])) AND r.state = 'reserved'
          AND r.update_id = :update_id
        RETURNING r.rollout_id, r.revision, r.state
    )
    INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor, update_id)
    SELECT :run_no, rollout_id, revision, CASE WHEN :quarantine THEN 'quarantine' ELSE 'abort' END, 'reserved', state,
           :reason, :actor, :update_id
    FROM moved
""")

END_UPDATE = text("""
    UPDATE updates SET state = :state, reason = :reason, ended_at = clock_timestamp()
    WHERE run_no = :run_no AND update_id = :update_id AND state = 'open'
""")

DUE_UPDATES = text("""
    SELECT update_id FROM updates
    WHERE run_no = :run_no AND state = 'open' AND lease_until <= clock_timestamp()
    ORDER BY update_id
""")

HAS_DUE_UPDATES = text("""
    SELECT EXISTS (SELECT FROM updates u WHERE u.state = 'open' AND u.lease_until <= clock_timestamp()
                   AND u.run_no = (SELECT run_no FROM runs WHERE run_id = :run_id))
""")

RUNS_WITH_DUE_UPDATES = text("""
    SELECT DISTINCT r.run_id FROM updates u JOIN runs r USING (run_no)
    WHERE u.state = 'open' AND u.lease_until <= clock_timestamp()
""")

MEMBERS = text("""
    SELECT m.rollout_id, m.group_id, m.verdict, m.use, m.revision, m.lag, m.drift, r.worker_id, r.incarnation, r.reward,
           m.drift_max, m.drift_k3, m.drift_outside_share, m.drift_sample_size, m.would_refuse,
           s.ruleset_id, s.ruleset_hash, m.versions,
           (SELECT array_agg(p.artifact_hash ORDER BY x.n) FROM unnest(m.versions) WITH ORDINALITY AS x (version, n)
            JOIN policy_versions p ON p.run_no = m.run_no AND p.version = x.version) AS hashes,
           (SELECT a.event FROM rollout_audit a
            WHERE a.run_no = m.run_no AND a.rollout_id = m.rollout_id AND a.update_id = m.update_id
              AND a.revision = m.revision + 2) AS ended_by
    FROM update_members m
    LEFT JOIN rollouts r USING (run_no, rollout_id)
    LEFT JOIN rulesets s ON s.run_no = m.run_no AND s.ruleset_no = m.ruleset_no
    WHERE m.run_no = :run_no AND m.update_id = :update_id
    ORDER BY m.group_id, m.rollout_id, m.revision
""")

MADE_VERSIONS = text("""
    SELECT version FROM policy_versions
    WHERE run_no = :run_no AND updates @> CAST(ARRAY[:update_id] AS text[]) ORDER BY version
""")
