"""How far each token's log-prob moved: d = log pi_current - log pi_behaviour, as updates measured it, kept and read.

Stored are the action tokens alone, in their order, as little-endian float16: 2 bytes each, right to one part in 2048.
What float16 cannot hold is the number next to it that it can: nothing that is not finite is ever stored. The drift that
a rollout is judged by is the mean at full precision, not that of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.runs.service import Run, get_run
from coordinator.wire.rollouts import MeasuredDifferences, RolloutDifferences

_LARGEST = float(np.finfo(np.float16).max)

# One for each member of the update that was measured, in the transaction that writes the member.
KEEP = text("""
    INSERT INTO token_differences (run_no, rollout_id, update_id, revision, differences)
    SELECT :run_no, d.rollout_id, :update_id, d.revision, d.differences
    FROM unnest(CAST(:rollout_ids AS text[]), CAST(:revisions AS int[]), CAST(:differences AS bytea[]))
        AS d (rollout_id, revision, differences)
    ORDER BY d.rollout_id
""")

MASK = text("""
    SELECT action_mask FROM rollout_evidence
    WHERE run_no = :run_no AND rollout_id = :rollout_id AND token_ids IS NOT NULL
""")

MEASURED = text("""
    SELECT m.update_id, m.revision, m.verdict, m.drift, m.at, d.differences
    FROM token_differences d
    CROSS JOIN LATERAL (
        SELECT * FROM update_members
        WHERE run_no = d.run_no AND update_id = d.update_id AND rollout_id = d.rollout_id AND revision = d.revision
        LIMIT 1
    ) m
    WHERE d.run_no = :run_no AND d.rollout_id = :rollout_id
    ORDER BY m.revision, m.update_id
""")


def pack(
    behavior: npt.NDArray[np.floating[Any]],
    current: npt.NDArray[np.floating[Any]],
    action_mask: npt.NDArray[np.bool_],
    offsets: npt.NDArray[np.integer[Any]],
) -> list[bytes]:
    """The differences of every rollout of a batch, as they are stored.

    Columns as `coordinator.rules.freshness.drift_statistics` takes them, which has found the action tokens' log-probs
    finite: log-probs are floating [N], `action_mask` is bool [N], `offsets` integer [n_rollouts + 1].
    """
    with np.errstate(over="ignore"):
        d = current[action_mask].astype(np.float64, copy=False) - behavior[action_mask]
    stored = np.clip(d, -_LARGEST, _LARGEST).astype("<f2").tobytes()
    actions = np.concatenate(([0], np.cumsum(action_mask)))
    ends = (2 * actions[offsets]).tolist()
    return [stored[start:end] for start, end in pairwise(ends)]


def unpack(stored: bytes, action_mask: npt.NDArray[np.bool_]) -> list[float | None]:
    """One entry per token, null where it is masked. `action_mask` is bool [tokens]."""
    differences: npt.NDArray[np.object_] = np.full(len(action_mask), None, dtype=object)
    differences[action_mask] = np.frombuffer(stored, "<f2").tolist()
    return list(differences)


async def keep(
    connection: AsyncConnection,
    run: Run,
    update_id: str,
    rollout_ids: Sequence[str],
    revisions: Sequence[int],
    differences: Sequence[bytes],
) -> None:
    """Stores what this update measured of these rollouts, each at the revision that it saw."""
    await connection.execute(
        KEEP,
        {
            "run_no": run.run_no,
            "update_id": update_id,
            "rollout_ids": list(rollout_ids),
            "revisions": list(revisions),
            "differences": list(differences),
        },
    )


async def get_differences(connection: AsyncConnection, run_id: str, rollout_id: str) -> RolloutDifferences:
    """What every update that measured the rollout found, the first one first."""
    run = await get_run(connection, run_id)
    key = {"run_no": run.run_no, "rollout_id": rollout_id}
    mask = (await connection.execute(MASK, key)).scalar_one_or_none()
    if mask is None:
        raise Refusal("rollout_unknown", f"run {run_id} stores no tokens of a rollout {rollout_id}")
    action_mask = np.frombuffer(mask, np.bool_)
    rows = (await connection.execute(MEASURED, key)).all()
    return RolloutDifferences(
        rollout_id=rollout_id,
        measured=[
            MeasuredDifferences(
                update_id=row.update_id,
                revision=row.revision,
                verdict=row.verdict,
                drift=row.drift,
                at=row.at,
                differences=unpack(row.differences, action_mask),
            )
            for row in rows
        ],
    )
