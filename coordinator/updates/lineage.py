"""Lineage: from an update to everything it was made from, and from a version or a ruleset to its updates."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.runs.service import get_run
from coordinator.updates import queries
from coordinator.updates.service import find_row, update_view
from coordinator.wire.updates import (
    Lineage,
    LineageMember,
    LineageRefusal,
    LineageSpan,
    LineageUse,
    LineageUses,
)

# A member's tokens can only be of a version that was prepared before it was bound, which the index on time uses.
USES = """
    SELECT u.update_id, u.state, u.commit_no, u.policy_version, count(*) AS rollouts
    FROM update_members m JOIN updates u USING (run_no, update_id)
    WHERE m.run_no = :run_no AND m.verdict = 'reserved' AND u.state IN ('open', 'committed', 'rewound') {conditions}
    GROUP BY u.update_id, u.state, u.commit_no, u.policy_version, u.opened_at
    ORDER BY u.opened_at, u.update_id
"""

OF_VERSION = """
    AND m.versions @> CAST(ARRAY[CAST(:version AS int)] AS int[])
    AND m.at >= (SELECT p.prepared_at FROM policy_versions p WHERE p.run_no = :run_no AND p.version = :version)
"""

OF_RULESET = """
    AND m.ruleset_no IN (SELECT s.ruleset_no FROM rulesets s WHERE s.run_no = :run_no AND s.ruleset_id = :ruleset_id
                         AND (CAST(:ruleset_hash AS text) IS NULL OR s.ruleset_hash = :ruleset_hash))
"""

_OUTCOMES = {
    "commit": "consumed",
    "discard": "discarded",
    "abort": "released",
    "quarantine": "quarantined",
    None: "reserved",
}


async def of_update(connection: AsyncConnection, run_id: str, update_id: str) -> Lineage:
    """Everything that an update was made from, what it refused, and the versions that it made."""
    run = await get_run(connection, run_id)
    keys = {"run_no": run.run_no, "update_id": update_id}
    update = update_view(run, await find_row(connection, run, update_id))
    members: list[LineageMember] = []
    refused: list[LineageRefusal] = []
    for row in await connection.execute(queries.MEMBERS, keys):
        if row.verdict != "reserved":
            refused.append(
                LineageRefusal(
                    rollout_id=row.rollout_id,
                    group_id=row.group_id,
                    verdict=row.verdict,
                    lag=row.lag,
                    drift=row.drift,
                )
            )
            continue
        policies = tuple(
            LineageSpan(version=version, artifact_hash=artifact_hash)
            for version, artifact_hash in zip(row.versions, row.hashes, strict=True)
        )
        names = LineageMember.model_fields.keys() - {"policies", "outcome"}
        members.append(
            LineageMember.model_validate(
                {name: getattr(row, name) for name in names}
                | {"policies": policies, "outcome": _OUTCOMES[row.ended_by]}
            )
        )
    made = (await connection.scalars(queries.MADE_VERSIONS, keys)).all()
    return Lineage(update=update, members=members, refusals=refused, made_versions=list(made))


async def uses(
    connection: AsyncConnection, run_id: str, version: int | None, ruleset_id: str | None, ruleset_hash: str | None
) -> LineageUses:
    """The updates that bound rollouts with tokens of a version, or with rewards of a ruleset, or both."""
    if version is None and ruleset_id is None:
        raise Refusal("invalid_request", "send version, or ruleset_id, or both", field="version")
    if ruleset_hash is not None and ruleset_id is None:
        raise Refusal("invalid_request", "ruleset_hash needs ruleset_id", field="ruleset_id")
    run = await get_run(connection, run_id)
    conditions = (OF_VERSION if version is not None else "") + (OF_RULESET if ruleset_id is not None else "")
    rows = await connection.execute(
        text(USES.format(conditions=conditions)),
        {"run_no": run.run_no, "version": version, "ruleset_id": ruleset_id, "ruleset_hash": ruleset_hash},
    )
    return LineageUses(uses=[LineageUse.model_validate(dict(row._mapping)) for row in rows])
