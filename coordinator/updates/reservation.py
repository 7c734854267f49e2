"""Reservation: drift is measured on the stored evidence, then one statement decides and binds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.rollouts import differences, groups
from coordinator.rollouts.queries import for_run
from coordinator.rules.freshness import DriftStatistics, NonFiniteLogProbError, drift_statistics
from coordinator.runs.service import Run, get_run
from coordinator.updates import queries
from coordinator.updates.service import lock_update
from coordinator.wire.columns import Ragged, ReserveColumns
from coordinator.wire.updates import GroupVerdict, ReserveAnswer, ReserveVerdict

SUSPECT_SAMPLE = 8
"""Rollouts that must reach the drift check before a call may be refused as `drift_suspect`."""


MEASURES = ("mean_abs", "max_abs", "k3", "outside_share", "effective_sample_size")


@dataclass(frozen=True)
class Drift:
    """Per rollout of a call, in its order: float64 [n], NaN where nothing could be measured."""

    mean_abs: npt.NDArray[np.float64]
    max_abs: npt.NDArray[np.float64]
    k3: npt.NDArray[np.float64]
    outside_share: npt.NDArray[np.float64]
    effective_sample_size: npt.NDArray[np.float64]
    differences: list[bytes | None]
    """By action token, as `coordinator.rollouts.differences` packs them; None where nothing could be measured."""


async def read_evidence(
    connection: AsyncConnection, run_id: str, columns: ReserveColumns
) -> tuple[Run, dict[str, Any]]:
    """The stored masks and behaviour log-probs of the rollouts that are named; they never change."""
    run = await get_run(connection, run_id)
    rows = await connection.execute(queries.NAMED_EVIDENCE, {"run_no": run.run_no, "rollout_ids": columns.rollout_id})
    return run, {row.rollout_id: row for row in rows}


def measure(run: Run, columns: ReserveColumns, evidence: dict[str, Any]) -> Drift:
    """Drift of every named rollout that exists. Blocks: run it in a thread.

    Refuses current log-probs that do not fit the rollout, naming it.
    """
    if len(set(columns.rollout_id)) != len(columns):
        raise Refusal("invalid_request", "a rollout is named twice", field="rollouts")
    measured: list[int] = []
    for n, rollout_id in enumerate(columns.rollout_id):
        row = evidence.get(rollout_id)
        if row is None or row.action_mask is None or (run.settings.drift_gate == "off" and not columns.given[n]):
            continue
        if not columns.given[n]:
            raise Refusal("invalid_log_probs", f"{rollout_id} came without current log-probs", item=rollout_id)
        if len(columns.current_log_probs[n]) != len(row.action_mask):
            raise Refusal(
                "invalid_log_probs",
                f"{rollout_id} has {len(row.action_mask)} tokens; {len(columns.current_log_probs[n])} log-probs came",
                item=rollout_id,
            )
        measured.append(n)
    drift = Drift(**{name: np.full(len(columns), np.nan) for name in MEASURES}, differences=[None] * len(columns))
    if not measured:
        return drift
    rows = [evidence[columns.rollout_id[n]] for n in measured]
    every = len(measured) == len(columns)
    current: Ragged = columns.current_log_probs if every else columns.current_log_probs.take(measured)
    behavior = np.frombuffer(b"".join(row.behavior_log_probs for row in rows), "<f4")
    action_mask = np.frombuffer(b"".join(row.action_mask for row in rows), np.bool_)
    try:
        statistics: DriftStatistics = drift_statistics(behavior, current.values, action_mask, current.offsets)
    except NonFiniteLogProbError as error:
        rollout_id = columns.rollout_id[measured[error.rollout]]
        raise Refusal(
            "invalid_log_probs",
            f"{rollout_id}: the current log-prob at {error.position} is not finite",
            item=rollout_id,
        ) from error
    for name in MEASURES:
        getattr(drift, name)[measured] = getattr(statistics, name)
    packed = differences.pack(behavior, current.values, action_mask, current.offsets)
    for n, of_rollout in zip(measured, packed, strict=True):
        drift.differences[n] = of_rollout
    return drift


def _nullable(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [None if v != v else v for v in values.tolist()]


async def reserve(
    connection: AsyncConnection,
    run_id: str,
    update_id: str,
    columns: ReserveColumns,
    drift: Drift,
    caller: Caller,
) -> ReserveAnswer:
    """Decides each rollout in the order of reasons and binds those that are admissible."""
    run = await get_run(connection, run_id)
    row = await lock_update(connection, run, update_id, columns.owner)
    live = row.state == "open"
    if live:
        named = row.after_commit_no if row.after_commit_no is not None else run.last_commit_no
        if columns.after_commit_no != run.last_commit_no or columns.after_commit_no != named:
            raise Refusal(
                "line_conflict",
                f"the line's last commit is {run.last_commit_no}; the weights contain {columns.after_commit_no}",
            )
        await connection.execute(
            queries.NAME_LINE,
            {"run_no": run.run_no, "update_id": update_id, "after_commit_no": columns.after_commit_no},
        )
    settings = run.settings
    measured = {
        "drifts": _nullable(drift.mean_abs),
        "drift_max": _nullable(drift.max_abs),
        "drift_k3": _nullable(drift.k3),
        "drift_outside": _nullable(drift.outside_share),
        "drift_sample_size": _nullable(drift.effective_sample_size),
    }
    group_ids = await groups.lock_of_rollouts(connection, run, columns.rollout_id)
    rows = (
        await connection.execute(
            for_run(queries.RESERVE, run.group_column),
            {
                "run_no": run.run_no,
                "update_id": update_id,
                "actor": caller.actor,
                "live": live,
                "lag_clock": row.lag_clock,
                "gate_lag": settings.lag_gate == "enforce",
                "max_lag": settings.max_lag,
                "gate_drift": settings.drift_gate == "enforce",
                "max_drift": settings.max_drift,
                "stale_to": settings.stale_to,
                "usable_needed": settings.usable_needed,
                "policy_version": row.policy_version,
                "contract_no": row.contract_no if settings.other_contract == "keep_apart" else run.contract_no,
                "rollout_ids": columns.rollout_id,
                "revisions": columns.revision,
                "uses": columns.use,
                **measured,
            },
        )
    ).all()
    for verdict in rows:
        if verdict.unnamed is not None:
            raise Refusal(
                "partial_group",
                f"group {verdict.group_id} has the rewarded member {verdict.unnamed}, which was not named",
                item=verdict.unnamed,
            )
    if live and settings.drift_gate == "enforce" and not columns.confirm_drift:
        _refuse_if_all_drifted(rows)
    await _keep_to_one(connection, run, update_id, rows)
    await _add_worker_drift(connection, run, rows, live)
    fallen = await groups.refresh(connection, run, group_ids, caller.actor, update_id)
    refused = [n for n, r in enumerate(rows) if r.verdict == "group_refused" and r.rollout_id in fallen]
    if refused:
        await connection.execute(
            for_run(queries.REMEMBER_FALLEN, run.group_column),
            {
                "run_no": run.run_no,
                "update_id": update_id,
                "lag_clock": row.lag_clock,
                "rollout_ids": [columns.rollout_id[n] for n in refused],
                "revisions": [columns.revision[n] for n in refused],
                "uses": [columns.use[n] for n in refused],
                "drifts": [rows[n].drift for n in refused],
                "drift_max": [measured["drift_max"][n] for n in refused],
                "drift_k3": [measured["drift_k3"][n] for n in refused],
                "drift_outside": [measured["drift_outside"][n] for n in refused],
                "drift_sample_size": [measured["drift_sample_size"][n] for n in refused],
            },
        )
    await _keep_differences(connection, run, update_id, columns, drift, rows, refused)
    return ReserveAnswer(
        verdicts=[
            ReserveVerdict(
                rollout_id=r.rollout_id,
                verdict=r.verdict,
                state="offline" if r.rollout_id in fallen else r.state,
                revision=fallen.get(r.rollout_id, r.revision),
                lag=r.lag,
                drift=r.drift,
                would_refuse=r.would_refuse,
            )
            for r in rows
        ],
        groups=_group_verdicts(rows),
    )


async def _keep_to_one(connection: AsyncConnection, run: Run, update_id: str, rows: Any) -> None:
    """An update holds one contract, and one ruleset where the run forbids to mix them."""
    bound = [r for r in rows if r.moved and r.verdict == "reserved"]
    keys = {"run_no": run.run_no, "update_id": update_id}
    if bound and run.settings.other_contract == "keep_apart":
        await connection.execute(queries.PIN_CONTRACT, keys | {"contract_no": bound[0].contract_no})
    if bound and not run.settings.mix_rulesets:
        rulesets = (await connection.scalars(queries.BOUND_RULESETS, keys)).all()
        if len(rulesets) > 1:
            raise Refusal("ruleset_conflict", f"update {update_id} would hold rewards of {', '.join(rulesets)}")


async def _keep_differences(
    connection: AsyncConnection,
    run: Run,
    update_id: str,
    columns: ReserveColumns,
    drift: Drift,
    rows: Any,
    fallen: list[int],
) -> None:
    """Of everything that was measured and is a member of the update by this call, whatever its verdict."""
    members = sorted({n for n, r in enumerate(rows) if r.moved} | set(fallen))
    kept = [(n, packed) for n in members if (packed := drift.differences[n]) is not None]
    if kept:
        await differences.keep(
            connection,
            run,
            update_id,
            [columns.rollout_id[n] for n, _ in kept],
            [columns.revision[n] for n, _ in kept],
            [packed for _, packed in kept],
        )


def _checked(rows: Any) -> list[Any]:
    """Those that reached the drift check in this call: a retry replays what an earlier one said of a rollout."""
    return [r for r in rows if not r.judged_before and r.verdict in ("reserved", "policy_drift", "group_refused")]


async def _add_worker_drift(connection: AsyncConnection, run: Run, rows: Any, live: bool) -> None:
    """What a healthy worker's fresh rollouts drift is its engine's rounding; the sum tells a sick one."""
    fresh = [r for r in _checked(rows) if live and r.lag == 0 and r.measured is not None]
    if fresh:
        await connection.execute(
            queries.ADD_WORKER_DRIFT,
            {
                "run_no": run.run_no,
                "worker_ids": [r.worker_id for r in fresh],
                "incarnations": [r.incarnation for r in fresh],
                "drifts": [r.measured for r in fresh],
            },
        )


def _refuse_if_all_drifted(rows: Any) -> None:
    """One misaligned trainer must not empty the buffer: refuses when every worker has most of its rollouts over."""
    checked = _checked(rows)
    if len(checked) < SUSPECT_SAMPLE:
        return
    over: defaultdict[str, list[bool]] = defaultdict(list)
    for r in checked:
        over[r.worker_id].append(r.verdict == "policy_drift")
    if all(sum(drifted) * 2 > len(drifted) for drifted in over.values()):
        total = sum(r.verdict == "policy_drift" for r in checked)
        raise Refusal(
            "drift_suspect",
            f"{total} of {len(checked)} rollouts are over the drift limit, more than half of every worker's",
        )


def _group_verdicts(rows: Any) -> list[GroupVerdict]:
    usable: dict[str, int] = {}
    refused: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for r in rows:
        if r.group_id is None:
            continue
        got = r.verdict in ("reserved", "idempotent_retry")
        usable[r.group_id] = usable.get(r.group_id, 0) + got
        if not got and r.reward is not None:
            refused[r.group_id][r.rollout_id] = r.reward
    return [
        GroupVerdict(group_id=group_id, usable=n, refused_rewards=refused[group_id]) for group_id, n in usable.items()
    ]
