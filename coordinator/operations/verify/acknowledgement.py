"""Statement 4: what was acknowledged is there, as a row or, after retention, as a tombstone."""

from __future__ import annotations

from collections.abc import AsyncIterator

from coordinator.operations.verify.findings import Acknowledged, Finding
from coordinator.operations.verify.ledger import SETTLED, Ledger, Search
from coordinator.operations.verify.line import Line
from coordinator.operations.verify.pointer import Pointer

# Whatever names a rollout was written together with it, before its arrival was acknowledged, or after.
LOST = Search(
    """
    SELECT t.rollout_id AS subject, string_agg(DISTINCT t.trace, ', ' ORDER BY t.trace) AS traces
    FROM (
        SELECT rollout_id, 'audit' AS trace FROM rollout_audit WHERE run_no = :run_no
        UNION ALL SELECT rollout_id, 'evidence' FROM rollout_evidence WHERE run_no = :run_no
        UNION ALL SELECT rollout_id, 'rewards' FROM rewards WHERE run_no = :run_no
        UNION ALL SELECT rollout_id, 'members' FROM update_members WHERE run_no = :run_no
    ) AS t
    WHERE NOT EXISTS (SELECT FROM rollouts r WHERE r.run_no = :run_no AND r.rollout_id = t.rollout_id)
      AND NOT EXISTS (SELECT FROM tombstones d WHERE d.run_no = :run_no AND d.rollout_id = t.rollout_id)
    GROUP BY t.rollout_id
    """,
    {"is gone: no row and no tombstone, but {traces}": "true"},
)

DROPPED = Search(
    "SELECT rollout_id AS subject, state FROM tombstones WHERE run_no = :run_no",
    {"was dropped while it was {state}": "state <> ALL(CAST(:settled AS text[]))"},
)

TOKENS = Search(
    """
    SELECT r.rollout_id AS subject, r.state, e.token_ids IS NULL AS gone
    FROM rollouts r LEFT JOIN rollout_evidence e USING (run_no, rollout_id)
    WHERE r.run_no = :run_no AND r.state <> ALL(CAST(:settled AS text[]))
    """,
    {"is {state}, and its tokens are gone": "gone"},
)

REWARDS = Search(
    """
    SELECT r.rollout_id AS subject, r.reward, w.value
    FROM rollouts r
    LEFT JOIN (
        SELECT DISTINCT ON (rollout_id) rollout_id, value FROM rewards
        WHERE run_no = :run_no ORDER BY rollout_id, reward_no DESC
    ) AS w USING (rollout_id)
    WHERE r.run_no = :run_no
    """,
    {"its reward is {reward}, the last that came for it was {value}": "reward IS DISTINCT FROM value"},
)

TOLD_ROLLOUTS = Search(
    """
    SELECT t.id AS subject,
           EXISTS (SELECT FROM rollouts r WHERE r.run_no = :run_no AND r.rollout_id = t.id)
           OR EXISTS (SELECT FROM tombstones d WHERE d.run_no = :run_no AND d.rollout_id = t.id) AS there
    FROM unnest(CAST(:ids AS text[])) AS t (id)
    """,
    {"was acknowledged and is gone": "NOT there"},
)

TOLD_REWARDS = Search(
    """
    SELECT t.id AS subject, t.value,
           EXISTS (SELECT FROM rewards w WHERE w.run_no = :run_no AND w.rollout_id = t.id AND w.value = t.value)
           OR EXISTS (SELECT FROM tombstones d WHERE d.run_no = :run_no AND d.rollout_id = t.id) AS there
    FROM unnest(CAST(:ids AS text[]), CAST(:values AS float8[])) AS t (id, value)
    """,
    {"its acknowledged reward {value} is gone": "NOT there"},
)

TOLD_RESERVES = Search(
    """
    SELECT t.id AS subject, t.update_id, t.revision,
           EXISTS (SELECT FROM rollout_audit a WHERE a.run_no = :run_no AND a.rollout_id = t.id
                   AND a.revision = t.revision AND a.event = 'reserve' AND a.update_id = t.update_id) AS there
    FROM unnest(CAST(:update_ids AS text[]), CAST(:ids AS text[]), CAST(:revisions AS int[]))
        AS t (update_id, id, revision)
    """,
    {"{update_id} was told to hold it at revision {revision}; its audit has no such reserve": "NOT there"},
)

TOLD_COMMITS = Search(
    """
    SELECT t.update_id AS subject, t.commit_no, u.commit_no AS stored
    FROM unnest(CAST(:update_ids AS text[]), CAST(:numbers AS int[])) AS t (update_id, commit_no)
    LEFT JOIN updates u ON u.run_no = :run_no AND u.update_id = t.update_id
    """,
    {"was told commit {commit_no}; it has {stored}": "stored IS DISTINCT FROM commit_no"},
)


def checked(told: Acknowledged | None) -> dict[str, int]:
    """How much was acknowledged, beside what the database tells by itself."""
    if told is None:
        return {}
    return {
        "acknowledged rollouts": len(told.rollouts),
        "acknowledged rewards": len(told.rewards),
        "acknowledged reserves": len(told.reserves),
        "acknowledged commits": len(told.commits),
    }


async def check(ledger: Ledger, line: Line, pointer: Pointer, told: Acknowledged | None) -> AsyncIterator[Finding]:
    """Each breach of the statement, from what the database tells and from what clients were told."""
    searches = [
        LOST.run(ledger),
        DROPPED.run(ledger, settled=list(SETTLED)),
        TOKENS.run(ledger, settled=list(SETTLED)),
        REWARDS.run(ledger),
    ]
    if told is not None:
        reserves = sorted(told.reserves)
        searches += [
            TOLD_ROLLOUTS.run(ledger, ids=sorted(told.rollouts)),
            TOLD_REWARDS.run(ledger, ids=list(told.rewards), values=list(told.rewards.values())),
            TOLD_RESERVES.run(
                ledger,
                update_ids=[reserve[0] for reserve in reserves],
                ids=[reserve[1] for reserve in reserves],
                revisions=[reserve[2] for reserve in reserves],
            ),
            TOLD_COMMITS.run(ledger, update_ids=list(told.commits), numbers=list(told.commits.values())),
        ]
    for search in searches:
        async for finding in search:
            yield finding
    if told is None:
        return
    for update_id, number in sorted(told.commits.items()):
        commit = line.commits.get(update_id)
        if commit is None or commit.number != number:
            yield Finding(update_id, f"was told commit {number}; the journal has {commit and commit.number}")
    for version in sorted(told.versions - pointer.switched):
        yield Finding(f"version {version}", "was said to be active; the journal has no switch to it")
