"""updates list, show."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.connection import connected
from coordinator.cli.options import AsJson, Data, RunId, Token, Url
from coordinator.cli.output import age, print_json, print_record, print_table, say
from coordinator.wire.updates import LineageMember, LineageRefusal, UpdateList, UpdateState

app = typer.Typer(help="Updates, which are training steps: list, show.", no_args_is_help=True)


@app.command("list")
def list_updates(
    run: RunId,
    state: Annotated[UpdateState | None, typer.Option(help="In this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="How many at most.")] = 20,
    oldest_first: Annotated[bool, typer.Option("--oldest-first", help="Begin with the first of the run.")] = False,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List the run's updates, the one that was opened last first."""
    with connected(data, url, token) as coordinator:
        updates = coordinator.run(run).updates(state, newest_first=not oldest_first, limit=limit)
    more = updates[-1].update_id if len(updates) == limit else None
    if as_json:
        print_json(UpdateList(updates=updates, next_after=more))
        return
    print_table(
        ("update", "state", "version", "commit", "after", "holds", "owner", "opened", "lease until", "reason"),
        [
            (
                u.update_id,
                u.state,
                u.policy_version,
                u.commit_no,
                u.after_commit_no,
                u.reserved,
                u.owner,
                f"{age(u.opened_at)} ago",
                u.lease_until if u.state == "open" else None,
                u.reason,
            )
            for u in updates
        ],
        empty="no update is like that",
    )
    if more is not None:
        say(f"there may be more: --limit {2 * limit}")


@app.command()
def show(
    run: RunId,
    update: Annotated[str, typer.Argument(help="The update's id.")],
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show an update, what became of what it reserved and refused, and the versions that it made."""
    with connected(data, url, token) as coordinator:
        if as_json:
            print_json(coordinator.run(run).update_view(update))
            return
        lineage = coordinator.run(run).lineage(update)
    view = lineage.update
    outcomes = Counter(member.outcome for member in lineage.members)
    refused = Counter(refusal.verdict for refusal in lineage.refusals)
    judged: list[LineageMember | LineageRefusal] = [*lineage.members, *lineage.refusals]
    lags = [member.lag for member in judged if member.lag is not None]
    drifts = [member.drift for member in judged if member.drift is not None]
    print_record(
        [
            ("update", view.update_id),
            ("state", view.state),
            ("reason", view.reason),
            ("owner", view.owner),
            ("weights", f"version {view.policy_version}, {view.artifact_hash}"),
            ("commit", view.commit_no),
            ("after commit", view.after_commit_no),
            ("opened", f"{view.opened_at:%Y-%m-%d %H:%M:%SZ}, {age(view.opened_at)} ago"),
            ("lease until", view.lease_until),
            ("ended", view.ended_at),
            ("holds now", view.reserved),
            ("reserved", tuple(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))),
            ("refused", tuple(f"{n} {verdict}" for verdict, n in sorted(refused.items()))),
            ("lag", f"{min(lags)} to {max(lags)}" if lags else None),
            ("drift", f"{min(drifts):.4g} to {max(drifts):.4g}" if drifts else None),
            ("made versions", tuple(lineage.made_versions)),
        ]
    )
