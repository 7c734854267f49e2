"""diagnose."""

from __future__ import annotations

from pathlib import Path

import typer

from coordinator.cli.connection import connected
from coordinator.cli.faults import BLOCKED
from coordinator.cli.options import AsJson, Data, RunId, Token, Url
from coordinator.cli.output import age, print_json, print_lines, print_record, seconds_in_words
from coordinator.wire.diagnosis import Diagnosis


def diagnose(
    run: RunId, data: Data = Path(".data"), url: Url = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Say why training is not moving, and what to do about it.

    What blocks it comes first, the thing to look at first at the head, then how everything stands. Exit code 4:
    something blocks it.
    """
    with connected(data, url, token) as coordinator:
        diagnosis = coordinator.run(run).diagnosis()
    if as_json:
        print_json(diagnosis)
    else:
        _print_blockers(run, diagnosis)
        print_lines("")
        print_record(_standing(diagnosis))
    if diagnosis.blockers:
        raise typer.Exit(BLOCKED)


def _print_blockers(run: str, diagnosis: Diagnosis) -> None:
    if not diagnosis.blockers:
        print_lines(f"nothing blocks run {run}")
        return
    print_lines(f"run {run} waits for this, the first to be looked at first:")
    for number, blocker in enumerate(diagnosis.blockers, 1):
        since = age(blocker.since, diagnosis.at)
        print_lines(
            f"{number}. {blocker.code}{f', for {since}' if since else ''}: {blocker.detail}",
            f"   {blocker.next_step}",
        )


def _standing(diagnosis: Diagnosis) -> list[tuple[str, object]]:
    now = diagnosis.at
    producers, rewards, groups = diagnosis.producers, diagnosis.rewards, diagnosis.groups
    heard = age(producers.last_heartbeat, now)
    oldest_reward, oldest_group = age(rewards.oldest, now), age(groups.oldest, now)
    committed = age(diagnosis.last_commit_at, now)
    opened = diagnosis.activation
    return [
        (
            "workers",
            f"{producers.live} live, {producers.draining} draining, {producers.lost} lost, {producers.fenced} fenced"
            + (f"; last heartbeat {heard} ago" if heard else ""),
        ),
        ("suspect workers", tuple(producers.suspect)),
        (
            "rewards",
            f"{rewards.waiting} rollouts wait, {rewards.failed} failed"
            + (f"; the oldest for {oldest_reward}" if oldest_reward else ""),
        ),
        (
            "groups",
            f"{groups.ready} ready, {groups.incomplete} incomplete, {groups.held} held, {groups.stale} stale"
            + (f"; the oldest is {oldest_group} old" if oldest_group else ""),
        ),
        ("refused in 5 min", tuple(f"{n} {reason}" for reason, n in sorted(diagnosis.refused.items()))),
        *(
            (
                f"update {update.update_id}",
                f"on version {update.policy_version}, holds {update.reserved}, open for {age(update.opened_at, now)}, "
                f"its lease ends in {seconds_in_words((update.lease_until - now).total_seconds())}; of {update.owner}",
            )
            for update in diagnosis.updates
        ),
        (
            "activation",
            opened
            and f"{opened.activation_id} of version {opened.version}, open for {age(opened.opened_at, now)}, its "
            f"deadline is in {seconds_in_words((opened.deadline_at - now).total_seconds())}",
        ),
        ("tickets", diagnosis.tickets),
        ("last commit", f"{diagnosis.last_commit_no}, {committed} ago" if committed else diagnosis.last_commit_no),
    ]
