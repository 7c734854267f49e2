"""When may a policy version become the active one? When it is committed and every worker confirmed it."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

ACTIVATION_REASONS: tuple[str, ...] = (
    "artifact_not_committed",
    "non_monotonic_version",
    "missing_worker_ack",
    "worker_mismatch",
    "activated",
)
"""The verdicts of an activation, in the order in which they are given."""


@dataclass(frozen=True)
class ActivationDecision:
    """One verdict of ``ACTIVATION_REASONS``, with the workers in the way whatever the verdict is."""

    reason: str
    missing: list[str]
    """Required workers that have said nothing, sorted."""
    mismatched: list[str]
    """Required workers that confirmed something other than this version and hash, sorted."""


def decide_activation(
    active_version: int | None,
    version: int,
    artifact_hash: str,
    committed: bool,
    acks: Mapping[str, tuple[object, object] | None],
    required: Collection[str],
) -> ActivationDecision:
    """May ``version`` with ``artifact_hash`` replace ``active_version`` (None: nothing is active yet)?

    ``acks`` maps worker ids to the (version, artifact hash) that they confirmed. No entry, or None, is a
    missing ack; any pair but exactly this version (a plain int) and this hash is a mismatch. Acks of workers
    that are not in ``required`` count for nothing, and an empty ``required`` stands in nobody's way.

    Raises ValueError for a version that is not a non-negative int (a bool is not one), an empty hash, or a
    worker that is required twice.
    """
    if active_version is not None:
        _check_version("the active version", active_version)
    _check_version("the version to activate", version)
    _check_hash("the hash to activate", artifact_hash)
    if len(set(required)) < len(required):
        raise ValueError("a worker is required twice")

    missing = sorted(worker for worker in required if acks.get(worker) is None)
    mismatched = sorted(
        worker
        for worker in required
        if (ack := acks.get(worker)) is not None and not _confirms(ack, version, artifact_hash)
    )
    # `is True`: a row that holds "false" or 1 here has not been committed by anyone.
    if committed is not True:
        reason = "artifact_not_committed"
    elif active_version is not None and version <= active_version:
        reason = "non_monotonic_version"
    elif missing:
        reason = "missing_worker_ack"
    elif mismatched:
        reason = "worker_mismatch"
    else:
        reason = "activated"
    return ActivationDecision(reason, missing, mismatched)


def activate_policy_version(
    active_pointer: Mapping[str, Any],
    artifact: Mapping[str, Any],
    worker_states: Mapping[str, Mapping[str, Any] | None],
    required_workers: Collection[str],
) -> dict[str, Any]:
    """Switch the active pointer to ``artifact`` if it is committed and every required worker confirmed it.

    ``active_pointer`` and each worker's state hold ``version`` and ``artifact_hash``, ``artifact`` also
    ``committed``. A required worker without a state is missing; one whose state differs or lacks a field is
    mismatched. Returns ``activated`` (bool), ``reason``, ``active_pointer`` (a new one with just the two
    keys, or a deep copy of the old), ``missing_workers`` and ``mismatched_workers`` (sorted, filled whatever
    the reason). Reasons, the first that holds: ``artifact_not_committed`` (also where ``committed`` is
    absent), ``non_monotonic_version``, ``missing_worker_ack``, ``worker_mismatch``, ``activated``. No input
    is changed.

    Raises ValueError for a pointer or artifact whose version is not a non-negative int or whose hash is
    empty, and for a worker that is required twice.
    """
    _check_version("the pointer's version", active_pointer.get("version"))
    _check_hash("the pointer's hash", active_pointer.get("artifact_hash"))
    _check_version("the artifact's version", artifact.get("version"))
    _check_hash("the artifact's hash", artifact.get("artifact_hash"))
    version, artifact_hash = artifact["version"], artifact["artifact_hash"]
    decision = decide_activation(
        active_version=active_pointer["version"],
        version=version,
        artifact_hash=artifact_hash,
        committed=artifact.get("committed", False),
        acks={
            worker: None if state is None else (state.get("version"), state.get("artifact_hash"))
            for worker, state in worker_states.items()
        },
        required=required_workers,
    )
    activated = decision.reason == "activated"
    return {
        "activated": activated,
        "reason": decision.reason,
        "active_pointer": (
            {"version": version, "artifact_hash": artifact_hash} if activated else deepcopy(dict(active_pointer))
        ),
        "missing_workers": decision.missing,
        "mismatched_workers": decision.mismatched,
    }


def _confirms(ack: tuple[object, object], version: int, artifact_hash: str) -> bool:
    # True == 1 in Python: a worker that reports a bool has not named a version.
    return type(ack[0]) is int and ack == (version, artifact_hash)


def _check_version(name: str, version: object) -> None:
    if type(version) is not int or version < 0:
        raise ValueError(f"{name} must be a non-negative int, not {version!r}")


def _check_hash(name: str, artifact_hash: object) -> None:
    if not isinstance(artifact_hash, str) or not artifact_hash:
        raise ValueError(f"{name} must be a non-empty string, not {artifact_hash!r}")
