"""Diagnosis: one read of everything that training may wait for."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastapi import APIRouter
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.addresses import RunId
from coordinator.errors import refusals
from coordinator.operations.access import Anyone, DatabaseHere, GuardedRoute
from coordinator.policies import activation
from coordinator.policies.queries import OPEN_ACTIVATION
from coordinator.rollouts.queries import for_run
from coordinator.runs.service import Run, get_run
from coordinator.updates import queries
from coordinator.wire.diagnosis import (
    ActivationStanding,
    Blocker,
    BlockerCode,
    Diagnosis,
    GroupsStanding,
    OpenUpdateStanding,
    Producers,
    RewardsWaiting,
)
from coordinator.workers import queries as worker_queries

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["runs"], route_class=GuardedRoute)

RECENT_SECONDS = 300.0

# Whether the active version was withdrawn, since when, and the version that could follow it.
WITHDRAWN = text("""
    SELECT v.version, v.ended_at, (
        SELECT max(n.version) FROM policy_versions n
        WHERE n.run_no = v.run_no AND n.version > v.version AND n.state IN ('prepared', 'committed')) AS next_version
    FROM runs r JOIN policy_versions v ON v.run_no = r.run_no AND v.version = r.active_version
    WHERE r.run_no = :run_no AND v.state = 'withdrawn'
""")

GROUPS = text("""
    SELECT count(*) FILTER (WHERE NOT stale AND whole AND NOT held) AS ready,
        count(*) FILTER (WHERE NOT stale AND NOT whole) AS incomplete,
        count(*) FILTER (WHERE stale) AS stale,
        count(*) FILTER (WHERE held AND NOT stale) AS held,
        min(first_arrival_at) AS oldest,
        max(held_until) FILTER (WHERE held) AS held_until
    FROM (
        SELECT g.first_arrival_at, g.held_until,
            COALESCE(g.held_until > clock_timestamp(), false) AND EXISTS (
                SELECT FROM updates u WHERE u.run_no = g.run_no AND u.update_id = g.held_by
                    AND u.state = 'open' AND u.lease_until > clock_timestamp()) AS held,
            :gate_lag AND g.freshest_clock < CAST(:active_clock AS int) - CAST(:max_lag AS int) AS stale,
            g.rewarded >= :usable_needed AND (g.settled OR g.deadline_at <= clock_timestamp()) AS whole
        FROM groups g WHERE g.run_no = :run_no AND g.state = 'open' AND g.rewarded > 0
    ) AS g
""")

UNREWARDED = """
    SELECT count(*) FILTER (WHERE r.state = 'generated') AS waiting,
        min(r.arrived_at) FILTER (WHERE r.state = 'generated') AS oldest,
        count(*) FILTER (WHERE r.state = 'reward_failed') AS failed
    FROM groups g JOIN rollouts r ON r.run_no = g.run_no AND r.{group} = g.group_id
    WHERE g.run_no = :run_no AND g.state = 'open' AND r.state IN ('generated', 'reward_failed')
"""

REFUSED = text("""
    SELECT reason, count(*) AS n FROM rollout_audit
    WHERE run_no = :run_no AND at > clock_timestamp() - make_interval(secs => :seconds)
      AND event IN ('quarantine', 'set_aside')
    GROUP BY reason ORDER BY reason
""")

OPEN_UPDATES = text("""
    SELECT u.update_id, u.owner, u.policy_version, u.opened_at, u.lease_until,
        (SELECT count(*) FROM update_members m JOIN rollouts r USING (run_no, rollout_id)
         WHERE m.run_no = u.run_no AND m.update_id = u.update_id AND m.verdict = 'reserved'
           AND r.state = 'reserved' AND r.update_id = u.update_id) AS reserved
    FROM updates u WHERE u.run_no = :run_no AND u.state = 'open' AND u.lease_until > clock_timestamp()
    ORDER BY u.opened_at, u.update_id
""")

TICKETS = text("""
    SELECT count(*) AS tickets, clock_timestamp() AS now FROM tickets
    WHERE run_no = :run_no AND expires_at > clock_timestamp()
""")


@router.get("/diagnosis", responses=refusals("run_unknown"))
async def get_diagnosis(run_id: RunId, caller: Anyone, database: DatabaseHere) -> Diagnosis:
    """Say why training is not moving: producers, rewards, groups, updates and activation, each with its age.

    `blockers` come in the order in which a rollout meets them, each with what to do: look at the first.
    """
    return await database.transaction(diagnose, run_id)


async def diagnose(connection: AsyncConnection, run_id: str) -> Diagnosis:
    """How the run stands, and what it waits for."""
    run = await get_run(connection, run_id)
    keys = {"run_no": run.run_no}
    settings = run.settings
    lost_after = keys | {"lost_after_seconds": settings.lost_after_seconds}
    workers = (await connection.execute(worker_queries.LIST_WORKERS, lost_after)).all()
    groups = (
        await connection.execute(
            GROUPS,
            keys
            | {
                "gate_lag": settings.lag_gate == "enforce",
                "active_clock": run.active_clock,
                "max_lag": settings.max_lag,
                "usable_needed": settings.usable_needed,
            },
        )
    ).one()
    unrewarded = (await connection.execute(for_run(UNREWARDED, run.group_column), keys)).one()
    refused = await connection.execute(REFUSED, keys | {"seconds": RECENT_SECONDS})
    updates = [
        OpenUpdateStanding.model_validate(dict(row._mapping)) for row in await connection.execute(OPEN_UPDATES, keys)
    ]
    tickets = (await connection.execute(TICKETS, keys)).one()
    opened = await _activation(connection, run)
    withdrawn = (await connection.execute(WITHDRAWN, keys)).one_or_none()
    last_commit_at: datetime | None = await connection.scalar(queries.LAST_BOUND, keys)
    present = [w for w in workers if w.deregistered_at is None]
    producers = Producers(
        live=sum(not w.lost and not w.draining for w in present),
        draining=sum(not w.lost and w.draining for w in present),
        lost=sum(w.lost for w in present),
        fenced=sum(w.fenced_reason is not None for w in present),
        suspect=[w.worker_id for w in present if w.suspect_reason is not None],
        last_heartbeat=max((w.heartbeat_at for w in workers), default=None),
    )
    serving = sum(not w.lost and not w.draining and w.fenced_reason is None for w in present)
    rewards = RewardsWaiting.model_validate(dict(unrewarded._mapping))
    standing = GroupsStanding(
        ready=groups.ready, incomplete=groups.incomplete, stale=groups.stale, held=groups.held, oldest=groups.oldest
    )
    return Diagnosis(
        at=tickets.now,
        blockers=_blockers(
            withdrawn,
            producers,
            serving,
            rewards,
            standing,
            updates,
            opened,
            groups.held_until,
            last_commit_at,
            {w.worker_id: w.fenced_reason for w in present},
        ),
        producers=producers,
        rewards=rewards,
        groups=standing,
        refused={row.reason: row.n for row in refused},
        updates=updates,
        activation=opened,
        tickets=tickets.tickets,
        last_commit_no=run.last_commit_no,
        last_commit_at=last_commit_at,
    )


async def _activation(connection: AsyncConnection, run: Run) -> ActivationStanding | None:
    row: Any = (await connection.execute(OPEN_ACTIVATION, {"run_no": run.run_no})).one_or_none()
    if row is None:
        return None
    verdict = await activation.judge(connection, run, row)
    return ActivationStanding(
        activation_id=row.activation_id,
        version=row.version,
        artifact_committed=verdict.reason != "artifact_not_committed",
        missing_workers=list(verdict.missing_workers),
        mismatched_workers=list(verdict.mismatched_workers),
        opened_at=row.opened_at,
        deadline_at=row.deadline_at,
    )


def _blockers(
    withdrawn: Any,
    producers: Producers,
    serving: int,
    rewards: RewardsWaiting,
    groups: GroupsStanding,
    updates: list[OpenUpdateStanding],
    opened: ActivationStanding | None,
    held_until: datetime | None,
    last_commit_at: datetime | None,
    fences: Mapping[str, str | None],
) -> list[Blocker]:
    """What stands in the way, in the order in which a rollout meets it."""
    found: list[Blocker] = []

    def add(code: BlockerCode, detail: str, since: datetime | None, next_step: str) -> None:
        found.append(Blocker(code=code, detail=detail, since=since, next_step=next_step))

    if withdrawn is not None:
        number = withdrawn.next_version
        add(
            "active_withdrawn",
            f"version {withdrawn.version} was withdrawn: what is made with it is quarantined",
            withdrawn.ended_at,
            f"Open an activation of version {number}."
            if number is not None
            else "Prepare and activate a version; where every version is withdrawn, one without a parent.",
        )
    nothing_ready = groups.ready == 0 and not any(update.reserved for update in updates)
    if not producers.live and not producers.draining and not producers.lost:
        add("no_workers", "no worker is registered", producers.last_heartbeat, "Start a worker agent.")
    elif not producers.live:
        add(
            "no_live_producers",
            f"{producers.lost} lost, {producers.draining} draining",
            producers.last_heartbeat,
            "Look at the workers' logs and restart them; a lost one is live again with its next heartbeat.",
        )
    elif not serving:
        add(
            "workers_fenced",
            ", ".join(f"{name} ({reason})" for name, reason in fences.items() if reason is not None),
            None,
            "Look why; let them load and ack the active version whole, as they do after a restart.",
        )
    if opened is not None:
        silent = ", ".join(
            f"{name} (fenced: {fences[name]})" if fences.get(name) else name
            for name in [*opened.missing_workers, *opened.mismatched_workers]
        )
        waits = f"the acks of {silent}" if silent else "its artifact" if not opened.artifact_committed else "the switch"
        add(
            "activation_open",
            f"version {opened.version} waits for {waits}, until {opened.deadline_at.isoformat()}",
            opened.opened_at,
            "Look at those workers and at the run's failures, or give the activation up; the old version stays active "
            "meanwhile.",
        )
    rewarded = groups.incomplete or groups.stale or groups.held
    if nothing_ready and (rewards.waiting or (rewards.failed and not rewarded)):
        add(
            "waiting_for_rewards",
            f"{rewards.waiting} rollouts have no reward yet, {rewards.failed} failed",
            rewards.oldest,
            "Look at the reward service, and at the run's failures of the stage reward.",
        )
    elif nothing_ready and not rewarded:
        add("nothing_generated", "no open group has a member", last_commit_at, "Give the workers tasks.")
    if nothing_ready and groups.incomplete:
        add(
            "groups_incomplete",
            f"{groups.incomplete} groups wait for members, until their deadline",
            groups.oldest,
            "Finish the missing members, or report them as failed.",
        )
    if nothing_ready and groups.stale:
        add(
            "all_stale",
            f"{groups.stale} groups are older than max_lag allows",
            groups.oldest,
            "Workers must generate with a newer version: look at the activation and at capacity tickets.",
        )
    if nothing_ready and groups.held:
        add(
            "held_by_updates",
            f"{groups.held} groups are held, at the latest until {held_until and held_until.isoformat()}",
            None,
            "Reserve or abort the updates that hold them; holds end by themselves.",
        )
    if groups.ready and not updates:
        add("no_open_update", f"{groups.ready} groups are ready", last_commit_at, "Look at the trainer.")
    return found
