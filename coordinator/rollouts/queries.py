"""Every statement about rollouts, their rewards and their groups.

Whatever changes a rollout locks its group first, groups in the order of their ids; so a statement that runs
after `LOCK_GROUPS` sees all members as they are. `{group}` is the rollout column that names the group.

How a statement is planned must not depend on what the planner believes about the tables: before their first ANALYZE
it takes a run for a handful of rows, and reads the whole of it rather than follow an index. So a batch looks rows up
by their key in a LATERAL subquery with LIMIT or OFFSET, which can only be done for one key after the other. What an
UPDATE moved carries all that later parts need (RETURNING), or is asked for with `(id IN (SELECT ...)) IS TRUE`, which
is hashed: a join of two CTEs, whose sizes are guessed as 1, compares every row with every other.
tests/api/test_plans.py holds this.
"""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import TextClause, text

from coordinator.rules.lifecycle import sources, state_for_reward


def states(event: str) -> str:
    """The states that an event may leave, as the right side of IN."""
    return "(" + ", ".join(f"'{state}'" for state in sources(event)) + ")"


# Where a rollout stands that nothing holds, as its stored reward has it.
STATE_BY_REWARD = (
    "CASE "
    + " ".join(
        f"WHEN reward_status = '{status}' THEN '{state_for_reward(status)}'" for status in ("ok", "timeout", "error")
    )
    + f" ELSE '{state_for_reward(None)}' END"
)

CLAIM_GROUPS = text("""
    INSERT INTO groups (run_no, group_id, contract_no, deadline_at)
    SELECT :run_no, id, contract_no, clock_timestamp() + make_interval(secs => :deadline_seconds)
    FROM unnest(CAST(:group_ids AS text[]), CAST(:contract_nos AS int[])) AS g (id, contract_no)
    ORDER BY id
    ON CONFLICT DO NOTHING
""")

LOCK_GROUPS = text("""
    SELECT group_id, contract_no FROM groups
    WHERE run_no = :run_no AND group_id = ANY(CAST(:group_ids AS text[]))
    ORDER BY group_id FOR UPDATE
""")

# A group that a failed generation made has no contract until its first rollout comes.
PIN_CONTRACTS = text("""
    UPDATE groups g SET contract_no = n.contract_no
    FROM unnest(CAST(:group_ids AS text[]), CAST(:contract_nos AS int[])) AS n (group_id, contract_no)
    WHERE g.run_no = :run_no AND g.group_id = n.group_id AND g.contract_no IS NULL
""")

DROP_EMPTY_GROUPS = """
    DELETE FROM groups g
    WHERE g.run_no = :run_no AND g.group_id = ANY(CAST(:group_ids AS text[]))
      AND NOT EXISTS (SELECT FROM rollouts r WHERE r.run_no = g.run_no AND r.{group} = g.group_id)
      AND NOT EXISTS (SELECT FROM tombstones t WHERE t.run_no = g.run_no AND t.{group} = g.group_id)
"""

# Arrivals and releases hold rollouts against versions that others may withdraw at the same moment. Whoever does waits
# for those under way, and quarantines what they stored; later ones see the versions withdrawn. An advisory lock, so
# that no arrival writes to the row of a version. It is taken after the run's and before the groups'.
_JUDGING = 7_242_003
JUDGE_VERSIONS = text(f"SELECT pg_advisory_xact_lock_shared({_JUDGING}, CAST(:run_no AS int))")
CHANGE_VERSIONS = text(f"SELECT pg_advisory_xact_lock({_JUDGING}, CAST(:run_no AS int))")

# The same, and one more: an activation that ends without the switch quarantines what was made with its candidate. It
# locks the version first, so that it waits for these arrivals, or they see its end.
SHARE_CANDIDATES = text(f"""
    SELECT pg_advisory_xact_lock_shared({_JUDGING}, CAST(:run_no AS int)), (
        SELECT count(*) FROM (
            SELECT FROM policy_versions
            WHERE run_no = :run_no AND version = ANY(CAST(:versions AS int[])) AND state IN ('prepared', 'committed')
            ORDER BY version FOR SHARE) AS candidate)
""")

# What the spans `s` of a rollout of worker `i` are held against: versions `v`, acks `a` and the active version `p`.
# A candidate whose activation failed may be tried again; one whose number was overtaken never becomes active.
SPAN_CHECKS = """bool_or(v.version IS NULL) AS policy_unknown,
            bool_or(v.artifact_hash IS DISTINCT FROM s.artifact_hash) AS policy_identity_conflict,
            bool_or(v.state = 'withdrawn') AS policy_withdrawn,
            bool_or(a.version IS NULL) AS worker_not_acked,
            bool_or(v.state = 'abandoned' OR (v.state IN ('prepared', 'committed')
                AND NOT EXISTS (SELECT FROM activations c
                                WHERE c.run_no = :run_no AND c.version = s.version AND c.state = 'open')
                AND (s.version < p.version OR EXISTS (
                    SELECT FROM activations c
                    WHERE c.run_no = :run_no AND c.version = s.version AND c.state = 'failed')))
            ) AS candidate_not_activated"""

# The reasons that come of the identity alone, in the order in which the first that holds is given. `j` holds the
# checks, `p` is the active version.
IDENTITY_REASONS = """WHEN j.policy_unknown THEN 'policy_unknown'
                WHEN j.policy_identity_conflict THEN 'policy_identity_conflict'
                WHEN j.policy_withdrawn THEN 'policy_withdrawn'
                WHEN j.worker_not_acked THEN 'worker_not_acked'
                WHEN j.candidate_not_activated THEN 'candidate_not_activated'
                WHEN j.newest_clock > p.lag_clock AND NOT EXISTS (
                    SELECT FROM activations c
                    WHERE c.run_no = :run_no AND c.version = j.newest_version AND c.state = 'open'
                ) THEN 'future_policy'"""

# Judges each item against the active version and stores it: revision 0 is the arrival; a gate that refuses is
# revision 1 in the same statement. Items are unique by rollout_id and by (group_id, sample_index, attempt).
ARRIVE = """
    WITH item AS (
        SELECT * FROM unnest(
            CAST(:rollout_id AS text[]), CAST(:task_id AS text[]), CAST(:task_source AS text[]),
            CAST(:group_id AS text[]), CAST(:sample_index AS int[]), CAST(:attempt AS int[]),
            CAST(:worker_id AS text[]), CAST(:incarnation AS text[]), CAST(:span_source AS text[]),
            CAST(:generation AS text[]), CAST(:flags AS text[]), CAST(:action_tokens AS int[]),
            CAST(:content_hash AS bytea[]), CAST(:token_ids AS bytea[]), CAST(:action_mask AS bytea[]),
            CAST(:behavior_log_probs AS bytea[]), CAST(:side_data AS bytea[]), CAST(:side_data_digest AS text[]),
            CAST(:row_starts AS text[]), CAST(:contract_no AS int[])
        ) WITH ORDINALITY AS i (
            rollout_id, task_id, task_source, group_id, sample_index, attempt, worker_id, incarnation, span_source,
            generation, flags, action_tokens, content_hash, token_ids, action_mask, behavior_log_probs, side_data,
            side_data_digest, row_starts, contract_no, item)
    ), span AS (
        SELECT * FROM unnest(
            CAST(:span_item AS int[]), CAST(:span_version AS int[]), CAST(:span_hash AS text[]),
            CAST(:span_start AS int[]), CAST(:span_end AS int[]), CAST(:span_acts AS bool[])
        ) AS s (item, version, artifact_hash, start_at, end_at, acts)
    ), pointer AS (
        SELECT v.version, v.lag_clock
        FROM runs r JOIN policy_versions v ON v.run_no = r.run_no AND v.version = r.active_version
        WHERE r.run_no = :run_no
    ), judged AS (
        SELECT i.item,
            {{checks}},
            array_agg(DISTINCT s.version) AS versions,
            min(v.lag_clock) FILTER (WHERE s.acts) AS oldest_clock,
            max(v.lag_clock) FILTER (WHERE s.acts) AS newest_clock,
            (array_agg(s.version ORDER BY v.lag_clock DESC NULLS LAST, s.version DESC) FILTER (WHERE s.acts))[1]
                AS newest_version,
            array_agg(s.version ORDER BY s.start_at) AS span_versions,
            array_agg(s.artifact_hash ORDER BY s.start_at) AS span_hashes,
            array_agg(s.start_at ORDER BY s.start_at) AS span_starts,
            array_agg(s.end_at ORDER BY s.start_at) AS span_ends
        FROM item i JOIN span s USING (item) CROSS JOIN pointer p
        LEFT JOIN LATERAL (
            SELECT version, artifact_hash, state, lag_clock FROM policy_versions
            WHERE run_no = :run_no AND version = s.version LIMIT 1
        ) v ON true
        LEFT JOIN LATERAL (
            SELECT version FROM acks
            WHERE run_no = :run_no AND worker_id = i.worker_id AND incarnation = i.incarnation AND version = s.version
                AND matching LIMIT 1
        ) a ON true
        GROUP BY i.item
    ), gated AS (
        SELECT i.*, j.versions, j.oldest_clock, j.newest_clock, j.newest_version,
            j.span_versions, j.span_hashes, j.span_starts, j.span_ends,
            CASE
                {{identity}}
                WHEN :gate_lag AND p.lag_clock - j.oldest_clock > :max_lag THEN 'stale_policy'
                WHEN g.state = 'spent' THEN 'group_spent'
                WHEN g.state = 'refused' THEN 'group_refused'
            END AS reason
        FROM item i JOIN judged j USING (item) CROSS JOIN pointer p
        JOIN LATERAL (SELECT state FROM groups WHERE run_no = :run_no AND group_id = i.{group} LIMIT 1) g ON true
    ), decided AS (
        SELECT *, CASE
            WHEN reason IS NULL THEN 'generated'
            WHEN reason = 'stale_policy' THEN :stale_to
            WHEN reason IN ('group_spent', 'group_refused') THEN 'offline'
            ELSE 'quarantined'
        END AS state
        FROM gated
    ), placed AS (
        INSERT INTO rollouts (run_no, rollout_id, group_id, sample_index, attempt, state, revision, reason, worker_id,
                              incarnation, contract_no, versions, oldest_clock, newest_clock, newest_version,
                              content_hash)
        SELECT :run_no, rollout_id, group_id, sample_index, attempt, state, CASE WHEN reason IS NULL THEN 0 ELSE 1 END,
               reason, worker_id, incarnation, contract_no, versions, oldest_clock, newest_clock, newest_version,
               content_hash
        FROM decided d
        WHERE NOT EXISTS (SELECT FROM tombstones t WHERE t.run_no = :run_no AND t.rollout_id = d.rollout_id)
          AND NOT EXISTS (SELECT FROM tombstones t WHERE t.run_no = :run_no AND t.group_id = d.group_id
                          AND t.sample_index = d.sample_index AND t.attempt = d.attempt)
        ORDER BY rollout_id
        ON CONFLICT DO NOTHING
        RETURNING rollout_id, state, revision, reason
    ), evidence AS (
        INSERT INTO rollout_evidence (run_no, rollout_id, task_id, task_source, span_versions, span_hashes, span_starts,
                                      span_ends, span_source, generation, flags, action_tokens, token_ids, action_mask,
                                      behavior_log_probs, side_data, side_data_digest, row_starts, tokens)
        SELECT :run_no, rollout_id, task_id, task_source, span_versions, span_hashes, span_starts, span_ends,
               span_source, CAST(generation AS jsonb), string_to_array(flags, ','), action_tokens, token_ids,
               action_mask, behavior_log_probs, side_data, side_data_digest,
               CAST(string_to_array(row_starts, ',') AS int[]), octet_length(action_mask)
        FROM decided WHERE (rollout_id IN (SELECT rollout_id FROM placed)) IS TRUE
    ), audit AS (
        INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor,
                                   judged_version)
        SELECT :run_no, rollout_id, 0, 'arrive', NULL, 'generated', NULL, :actor, NULL FROM placed
        UNION ALL
        SELECT :run_no, rollout_id, 1, CASE state WHEN 'offline' THEN 'set_aside' ELSE 'quarantine' END,
               'generated', state, reason, :actor,
               CASE WHEN reason = 'stale_policy' THEN (SELECT version FROM pointer) END
        FROM placed WHERE reason IS NOT NULL
    ), stored AS (
        INSERT INTO count_deltas (run_no, name, delta)
        SELECT :run_no, 'evidence_bytes', sum(octet_length(token_ids) + octet_length(action_mask)
            + octet_length(behavior_log_probs) + COALESCE(octet_length(side_data), 0))
        FROM decided WHERE (rollout_id IN (SELECT rollout_id FROM placed)) IS TRUE HAVING count(*) > 0
    ), redeemed AS (
        DELETE FROM tickets WHERE run_no = :run_no AND group_id = ANY(ARRAY(
            SELECT DISTINCT {group} FROM item WHERE (rollout_id IN (SELECT rollout_id FROM placed)) IS TRUE))
    )
    SELECT rollout_id, state, revision, reason FROM placed
""".replace("{{checks}}", SPAN_CHECKS).replace("{{identity}}", IDENTITY_REASONS)

# Those that are here or were, before retention left only their ids.
FIND_KNOWN = text("""
    SELECT k.* FROM unnest(CAST(:rollout_ids AS text[])) AS n (rollout_id)
    CROSS JOIN LATERAL (
        SELECT rollout_id, state, revision, reason, content_hash FROM rollouts
        WHERE run_no = :run_no AND rollout_id = n.rollout_id
        UNION ALL
        SELECT rollout_id, state, revision, NULL, content_hash FROM tombstones
        WHERE run_no = :run_no AND rollout_id = n.rollout_id
        OFFSET 0
    ) k
""")

FIND_ROLLOUTS = text("""
    SELECT r.* FROM unnest(CAST(:rollout_ids AS text[])) AS n (rollout_id)
    CROSS JOIN LATERAL (
        SELECT rollout_id, group_id, state, revision, reason, content_hash FROM rollouts
        WHERE run_no = :run_no AND rollout_id = n.rollout_id LIMIT 1
    ) r
""")

# Rejected items leave no row; they are counted for the life of the worker that sent them.
COUNT_REJECTIONS = text("""
    INSERT INTO rejections (run_no, worker_id, incarnation, reason, n, last_detail)
    SELECT :run_no, i.worker_id, COALESCE(w.incarnation, ''), i.reason, i.n, i.detail
    FROM unnest(CAST(:worker_ids AS text[]), CAST(:reasons AS text[]), CAST(:ns AS int[]), CAST(:details AS text[]))
        AS i (worker_id, reason, n, detail)
    LEFT JOIN workers w ON w.run_no = :run_no AND w.worker_id = i.worker_id
    ORDER BY i.worker_id, i.reason
    ON CONFLICT (run_no, worker_id, incarnation, reason) DO UPDATE SET
        n = rejections.n + EXCLUDED.n, last_detail = EXCLUDED.last_detail, last_at = clock_timestamp()
""")

CLAIM_RULESETS = text("""
    INSERT INTO rulesets (run_no, ruleset_id, ruleset_hash)
    SELECT :run_no, * FROM unnest(CAST(:ids AS text[]), CAST(:hashes AS text[])) AS r (id, hash)
    ORDER BY id, hash
    ON CONFLICT DO NOTHING
""")

FIND_RULESETS = text("""
    SELECT ruleset_no, ruleset_id, ruleset_hash FROM rulesets
    WHERE run_no = :run_no AND ruleset_id = ANY(CAST(:ids AS text[]))
""")

# Stores rewards, at most one for each rollout. The group's first good reward pins its ruleset. A timeout or an
# error is a recorded failure and never a value.
REWARD = f"""
    WITH item AS (
        SELECT * FROM unnest(
            CAST(:rollout_id AS text[]), CAST(:status AS text[]), CAST(:value AS float8[]),
            CAST(:components AS text[]), CAST(:ruleset_no AS int[]), CAST(:message AS text[])
        ) WITH ORDINALITY AS i (rollout_id, status, value, components, ruleset_no, message, item)
    ), facts AS (
        SELECT i.*, r.state, r.revision, r.reason, r.reward AS stored_value, r.reward_status AS stored_status,
            r.ruleset_no AS stored_ruleset, r.{{group}} AS group_key, g.ruleset_no AS pinned,
            (SELECT w.components FROM rewards w WHERE w.run_no = :run_no AND w.rollout_id = i.rollout_id
             ORDER BY w.reward_no DESC LIMIT 1) AS stored_components
        FROM item i
        LEFT JOIN LATERAL (
            SELECT * FROM rollouts WHERE run_no = :run_no AND rollout_id = i.rollout_id LIMIT 1
        ) r ON true
        LEFT JOIN LATERAL (
            SELECT ruleset_no FROM groups WHERE run_no = :run_no AND group_id = r.{{group}} LIMIT 1
        ) g ON true
    ), pin AS (
        SELECT DISTINCT ON (group_key) group_key, ruleset_no FROM facts
        WHERE group_key IS NOT NULL AND pinned IS NULL AND status = 'ok' AND stored_status IS DISTINCT FROM 'ok'
          AND state <> 'generation_failed'
        ORDER BY group_key, item
    ), decided AS (
        SELECT f.*, CASE
            WHEN f.state IS NULL THEN 'missing_rollout'
            WHEN f.state = 'generation_failed' THEN 'rejected'
            WHEN f.status <> 'ok' THEN 'recorded_failure'
            WHEN f.stored_status = 'ok' THEN CASE
                WHEN f.value = f.stored_value AND f.ruleset_no = f.stored_ruleset
                    AND CAST(f.components AS jsonb) IS NOT DISTINCT FROM f.stored_components THEN 'duplicate'
                ELSE 'conflict' END
            WHEN f.ruleset_no <> COALESCE(f.pinned, p.ruleset_no) THEN 'ruleset_conflict'
            ELSE 'stored'
        END AS verdict
        FROM facts f LEFT JOIN pin p USING (group_key)
    ), moves AS (
        SELECT *, CASE
            WHEN verdict = 'stored' AND state IN {states("reward_ready")} THEN 'rewarded'
            WHEN verdict = 'recorded_failure' AND state IN {states("reward_fail")} THEN 'reward_failed'
        END AS next_state
        FROM decided
    ), moved AS (
        UPDATE rollouts r SET
            state = COALESCE(m.next_state, r.state),
            revision = r.revision + CASE WHEN m.next_state IS NULL THEN 0 ELSE 1 END,
            reward = CASE WHEN m.verdict = 'stored' THEN m.value ELSE r.reward END,
            reward_status = CASE WHEN m.verdict = 'stored' OR r.reward_status IS DISTINCT FROM 'ok'
                                 THEN m.status ELSE r.reward_status END,
            ruleset_no = CASE WHEN m.verdict = 'stored' THEN m.ruleset_no ELSE r.ruleset_no END
        FROM moves m
        WHERE r.run_no = :run_no AND r.rollout_id = m.rollout_id AND r.revision = m.revision
          AND m.verdict IN ('stored', 'recorded_failure')
        RETURNING r.rollout_id, r.revision, m.state AS from_state, m.next_state, m.verdict, m.status, m.value,
            m.components, m.ruleset_no, m.message
    ), audit AS (
        INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor)
        SELECT :run_no, rollout_id, revision,
               CASE next_state WHEN 'rewarded' THEN 'reward_ready' ELSE 'reward_fail' END, from_state, next_state,
               CASE WHEN next_state = 'reward_failed' THEN 'reward_' || status END, :actor
        FROM moved WHERE next_state IS NOT NULL
    ), kept AS (
        INSERT INTO rewards (run_no, rollout_id, value, components, ruleset_no, actor)
        SELECT :run_no, rollout_id, value, CAST(components AS jsonb), ruleset_no, :actor
        FROM moved WHERE verdict = 'stored'
    ), failed AS (
        INSERT INTO failures (run_no, stage, kind, message, actor, rollout_id)
        SELECT :run_no, 'reward', status, COALESCE(message, 'reward ' || status), :actor, rollout_id
        FROM moved WHERE verdict = 'recorded_failure'
    ), pinned AS (
        UPDATE groups g SET ruleset_no = p.ruleset_no FROM pin p
        WHERE g.run_no = :run_no AND g.group_id = p.group_key AND g.ruleset_no IS NULL
    )
    SELECT item, verdict, CASE WHEN has_moved THEN next_state ELSE state END AS state,
           revision + CASE WHEN has_moved THEN 1 ELSE 0 END AS revision, stored_value
    FROM (
        SELECT *, rollout_id IN (SELECT rollout_id FROM moved WHERE next_state IS NOT NULL) AS has_moved FROM moves
    ) m ORDER BY item
"""

GROUP_MEMBERS = """
    SELECT rollout_id, state, revision, update_id, reward_status FROM rollouts
    WHERE run_no = :run_no AND {group} = :group_id
"""

# Replaces the rewards of the named members where anything differs. The group's row is locked; it gets the ruleset.
# One that is quarantined or offline has its reward replaced as well, and is not moved by it.
RESCORE = """
    WITH item AS (
        SELECT * FROM unnest(
            CAST(:rollout_ids AS text[]), CAST(:values AS float8[]), CAST(:components AS text[])
        ) AS i (rollout_id, value, components)
    ), changed AS (
        SELECT i.*, r.state, r.revision FROM item i
        JOIN rollouts r ON r.run_no = :run_no AND r.rollout_id = i.rollout_id
        WHERE r.reward_status = 'ok' AND (r.reward <> i.value OR r.ruleset_no <> :ruleset_no OR
            CAST(i.components AS jsonb) IS DISTINCT FROM (
                SELECT w.components FROM rewards w WHERE w.run_no = :run_no AND w.rollout_id = i.rollout_id
                ORDER BY w.reward_no DESC LIMIT 1))
    ), moved AS (
        UPDATE rollouts r SET reward = c.value, ruleset_no = :ruleset_no,
            revision = c.revision + CASE c.state WHEN 'rewarded' THEN 1 ELSE 0 END
        FROM changed c WHERE r.run_no = :run_no AND r.rollout_id = c.rollout_id AND r.revision = c.revision
        RETURNING r.rollout_id, r.revision, r.state
    ), audit AS (
        INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor)
        SELECT :run_no, rollout_id, revision, 'rescore', 'rewarded', 'rewarded', 'rescored', :actor
        FROM moved WHERE state = 'rewarded'
    ), kept AS (
        INSERT INTO rewards (run_no, rollout_id, value, components, ruleset_no, actor)
        SELECT :run_no, c.rollout_id, c.value, CAST(c.components AS jsonb), :ruleset_no, :actor
        FROM changed c JOIN moved USING (rollout_id)
    ), pinned AS (
        UPDATE groups g SET ruleset_no = :ruleset_no
        WHERE g.run_no = :run_no AND g.group_id = :group_id AND g.ruleset_no IS DISTINCT FROM :ruleset_no
    )
    SELECT rollout_id, revision FROM moved
"""

# Counts the members of groups anew after some of them changed, and refuses the groups that can no longer have
# enough usable ones: what is left of those goes offline. A member (one sample_index) may have several attempts; when
# the newest has failed it waits for the next, until there can be none.
REFRESH_GROUPS = f"""
    WITH member AS (
        SELECT g.group_id, r.sample_index,
            bool_or(r.state IN ('rewarded', 'reserved', 'consumed')) AS usable,
            bool_or(r.state = 'generated') OR COALESCE(
                max(r.attempt) FILTER (WHERE r.state IN ('reward_failed', 'generation_failed')) = max(r.attempt)
                AND max(r.attempt) + 1 < :max_attempts, false) AS pending,
            count(*) FILTER (WHERE r.state = 'rewarded') AS rewarded,
            bool_or(r.state = 'reserved') AS bound,
            min(r.oldest_clock) FILTER (WHERE r.state = 'rewarded') AS oldest_clock,
            max(r.oldest_clock) FILTER (WHERE r.state = 'rewarded') AS freshest_clock,
            max(r.newest_clock) FILTER (WHERE r.state = 'rewarded') AS newest_clock
        FROM groups g JOIN rollouts r ON r.run_no = g.run_no AND r.{{group}} = g.group_id
        WHERE g.run_no = :run_no AND g.group_id = ANY(CAST(:group_ids AS text[]))
        GROUP BY g.group_id, r.sample_index
    ), counted AS MATERIALIZED (
        SELECT group_id,
            CAST(sum(rewarded) AS int) AS rewarded, bool_or(bound) AS bound,
            count(*) FILTER (WHERE usable OR NOT pending) >= :group_size AS settled,
            count(*) FILTER (WHERE NOT usable AND NOT pending) > :group_size - CAST(:usable_needed AS int) AS hopeless,
            min(oldest_clock) AS oldest_clock, max(freshest_clock) AS freshest_clock, max(newest_clock) AS newest_clock
        FROM member GROUP BY group_id
    ), counted_groups AS (
        UPDATE groups g SET
            state = CASE WHEN g.state = 'open' AND c.hopeless THEN 'refused' ELSE g.state END,
            rewarded = CASE WHEN g.state = 'open' AND c.hopeless THEN 0 ELSE c.rewarded END,
            settled = c.settled, bound = c.bound, oldest_clock = c.oldest_clock, freshest_clock = c.freshest_clock,
            newest_clock = c.newest_clock
        FROM counted c
        WHERE g.run_no = :run_no AND g.group_id = ANY(CAST(:group_ids AS text[])) AND g.group_id = c.group_id
        RETURNING g.group_id, g.state
    ), fallen AS (
        SELECT r.rollout_id, r.state, r.revision
        FROM counted_groups g JOIN rollouts r ON r.run_no = :run_no AND r.{{group}} = g.group_id
        WHERE g.state = 'refused' AND r.state IN {states("set_aside")} AND r.state <> 'quarantined'
    ), moved AS (
        UPDATE rollouts r SET state = 'offline', reason = 'group_refused', revision = f.revision + 1
        FROM fallen f WHERE r.run_no = :run_no AND r.rollout_id = f.rollout_id AND r.revision = f.revision
        RETURNING r.rollout_id, r.revision, f.state AS from_state
    ), audit AS (
        INSERT INTO rollout_audit (run_no, rollout_id, revision, event, from_state, to_state, reason, actor, update_id)
        SELECT :run_no, rollout_id, revision, 'set_aside', from_state, 'offline', 'group_refused', :actor, :update_id
        FROM moved
    )
    SELECT rollout_id, revision FROM moved
"""


@lru_cache(maxsize=64)
def for_run(statement: str, group_column: str) -> TextClause:
    """The statement for a run whose rollouts name their group in this column."""
    return text(statement.replace("{group}", group_column))
