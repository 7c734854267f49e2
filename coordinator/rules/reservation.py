"""From a rollout to one update: the order of reasons, what a refusal does, and the compare-and-set itself."""

from collections.abc import Mapping, MutableMapping, Sequence
from copy import deepcopy
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.lifecycle import targets

RESERVE_REASONS: tuple[str, ...] = (
    "missing_rollout",
    "idempotent_retry",
    "update_fenced",
    "revision_conflict",
    "not_rewarded",
    "contract_mismatch",
    "policy_withdrawn",
    "candidate_not_active",
    "future_policy",
    "stale_policy",
    "policy_drift",
    "group_refused",
    "reserved",
)
"""The verdicts of a reservation. The first that holds is given; the last holds when no other does."""

REFUSAL_EVENTS: dict[str, tuple[str, str]] = {
    "policy_withdrawn": ("quarantine", "policy_withdrawn"),
    "stale_policy": ("set_aside", "stale_policy"),
    "policy_drift": ("quarantine", "policy_drift"),
    "group_refused": ("set_aside", "group_refused"),
}
"""The refusals that move a rollout: verdict -> (event, the reason recorded with it).

``stale_policy`` is set aside by default; a run may have stale rollouts quarantined instead.
"""

REFUSAL_STATES: dict[str, str] = {
    verdict: state for verdict, (event, _) in REFUSAL_EVENTS.items() for state in targets("rewarded", event)
}
"""Where each moving refusal puts a rewarded rollout, as the lifecycle has it."""

MOVES_NOTHING: frozenset[str] = frozenset(RESERVE_REASONS) - REFUSAL_EVENTS.keys() - {"reserved"}
"""The verdicts after which a rollout is as it was, at the revision it had."""


def first_reason(
    conditions: Mapping[str, NDArray[np.bool_]], order: Sequence[str] = RESERVE_REASONS
) -> NDArray[np.object_]:
    """The first reason of ``order`` whose condition holds, for each of n items.

    ``conditions`` maps reasons to bool columns of shape [n]; a reason of ``order`` without a column never
    holds. The last entry of ``order`` is the verdict where nothing else holds. Returns an object column [n]
    of plain strings. Raises ValueError for no condition at all, a reason that is not in ``order``, a column
    that is not one-dimensional bool, or columns of different lengths.
    """
    columns = {reason: np.asarray(column) for reason, column in conditions.items()}
    if not columns:
        raise ValueError("at least one condition is needed to know how many items there are")
    unknown = sorted(columns.keys() - set(order))
    if unknown:
        raise ValueError(f"conditions for reasons outside the order: {', '.join(unknown)}")
    for reason, column in columns.items():
        if column.ndim != 1 or column.dtype != np.bool_:
            raise ValueError(f"the condition {reason} is not a one-dimensional bool column")
    lengths = {column.size for column in columns.values()}
    if len(lengths) > 1:
        raise ValueError(f"conditions differ in length: {sorted(lengths)}")

    verdicts = np.full(lengths.pop(), order[-1], dtype=object)
    for reason in reversed(order):
        if reason in columns:
            verdicts[columns[reason]] = reason
    return verdicts


def compare_and_reserve(
    ledger: MutableMapping[str, dict[str, Any]], rollout_id: str, expected_revision: int, update_id: str
) -> dict[str, Any]:
    """Bind one rollout to one update if it is rewarded and still at the revision that the trainer saw.

    ``ledger`` maps rollout ids to records with ``lifecycle_state``, ``revision`` (int) and ``reserved_by``
    (an update id or None); other keys of a record survive. Returns ``reserved`` (bool), ``reason`` and
    ``record``: a deep copy of the record as it now stands, None where there is none. Reasons, the first that
    holds: ``missing_rollout``, ``idempotent_retry`` (this update holds it already), ``revision_conflict``,
    ``not_rewarded``, ``reserved``.

    The ledger changes only on ``reserved``: the revision grows by one, once, however often the call is
    repeated. Raises ValueError when ``update_id`` is not a non-empty string.
    """
    _check_update_id(update_id)
    record = ledger.get(rollout_id)
    seen = record if record is not None else {}
    state = seen.get("lifecycle_state")
    conditions = {
        "missing_rollout": record is None,
        "idempotent_retry": state == "reserved" and seen.get("reserved_by") == update_id,
        "revision_conflict": not _same_revision(seen.get("revision"), expected_revision),
        "not_rewarded": state != "rewarded",
    }
    reason = str(first_reason({name: np.array([holds], dtype=np.bool_) for name, holds in conditions.items()})[0])
    if reason == "reserved":
        record = {
            **seen,
            "lifecycle_state": "reserved",
            "revision": seen["revision"] + 1,
            "reserved_by": update_id,
        }
        ledger[rollout_id] = record
    return {"reserved": reason == "reserved", "reason": reason, "record": deepcopy(record)}


def _check_update_id(update_id: object) -> None:
    if not isinstance(update_id, str) or not update_id:
        raise ValueError(f"update_id must be a non-empty string, not {update_id!r}")


def _same_revision(stored: object, expected: object) -> bool:
    # True == 1 and 1.0 == 1 in Python: neither is a revision that somebody read.
    return all(isinstance(n, Integral) and not isinstance(n, bool) for n in (stored, expected)) and stored == expected
