"""Candidates and reservations as a trainer holds them: numpy arrays, one row per rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coordinator.wire.columns import CandidateColumns
from coordinator.wire.updates import EmptyReason, GroupVerdict, ReserveVerdict

TAKEN = frozenset({"reserved", "idempotent_retry"})
"""Verdicts after which an update holds the rollout."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One rollout that an update may reserve.

    `token_ids` is int64, `action_mask` bool and `behavior_log_probs` float32, all of shape [tokens];
    `behavior_log_probs[i]` scores `token_ids[i]` given everything before it, and is NaN where a masked token
    has none. `policy_version` and `lag` are of the oldest action token. `row_starts` says where each training row
    begins, usually at 0 alone.
    """

    rollout_id: str
    revision: int
    group_id: str
    task_id: str
    task_source: str
    sample_index: int
    attempt: int
    policy_version: int
    lag: int
    reward: float
    token_ids: npt.NDArray[np.int64]
    action_mask: npt.NDArray[np.bool_]
    behavior_log_probs: npt.NDArray[np.float32]
    row_starts: tuple[int, ...]
    side_data: bytes | None


@dataclass(frozen=True, eq=False)
class Candidates:
    """Trajectories in whole groups; false when there is none, and `empty` then says why and since when."""

    trajectories: tuple[Trajectory, ...]
    empty: EmptyReason | None = None
    contract_hash: str | None = None

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __getitem__(self, index: int) -> Trajectory:
        return self.trajectories[index]

    @property
    def groups(self) -> dict[str, tuple[Trajectory, ...]]:
        """The trajectories of each group, groups in the order of the answer."""
        gathered: dict[str, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            gathered.setdefault(trajectory.group_id, []).append(trajectory)
        return {group_id: tuple(members) for group_id, members in gathered.items()}

    @property
    def group_ids(self) -> list[str]:
        """The group of each trajectory."""
        return [trajectory.group_id for trajectory in self.trajectories]

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """float64 [trajectories]."""
        return np.array([trajectory.reward for trajectory in self.trajectories], dtype=np.float64)

    @property
    def token_ids(self) -> list[npt.NDArray[np.int64]]:
        """int64 [tokens] for each trajectory."""
        return [trajectory.token_ids for trajectory in self.trajectories]

    @property
    def action_masks(self) -> list[npt.NDArray[np.bool_]]:
        """bool [tokens] for each trajectory."""
        return [trajectory.action_mask for trajectory in self.trajectories]

    @property
    def behavior_log_probs(self) -> list[npt.NDArray[np.float32]]:
        """float32 [tokens] for each trajectory."""
        return [trajectory.behavior_log_probs for trajectory in self.trajectories]


@dataclass(frozen=True, eq=False)
class Reserved:
    """What a reservation came to.

    `verdicts` has one entry per candidate, in their order. `admitted` are those that the update now holds,
    and `current_log_probs` theirs (float64 [tokens] each; None where none were sent). `groups` says for
    each group how many members are usable and the rewards of members that were refused, for a baseline over
    all of them.
    """

    verdicts: tuple[ReserveVerdict, ...]
    admitted: Candidates
    current_log_probs: list[npt.NDArray[np.float64]] | None
    groups: dict[str, GroupVerdict]

    @property
    def usable(self) -> dict[str, int]:
        """Usable members of each group."""
        return {group_id: verdict.usable for group_id, verdict in self.groups.items()}


def candidates(columns: CandidateColumns) -> Candidates:
    """The columns of an answer, cut into trajectories that share their memory."""
    return Candidates(
        tuple(
            Trajectory(
                rollout_id=columns.rollout_id[i],
                revision=columns.revision[i],
                group_id=columns.group_id[i],
                task_id=columns.task_id[i],
                task_source=columns.task_source[i],
                sample_index=columns.sample_index[i],
                attempt=columns.attempt[i],
                policy_version=columns.policy_version[i],
                lag=columns.lag[i],
                reward=columns.reward[i],
                token_ids=columns.token_ids[i],
                action_mask=columns.action_mask[i],
                behavior_log_probs=columns.behavior_log_probs[i],
                row_starts=tuple(columns.row_starts[i]),
                side_data=columns.side_data[i],
            )
            for i in range(len(columns))
        ),
        columns.empty,
        columns.contract_hash,
    )
