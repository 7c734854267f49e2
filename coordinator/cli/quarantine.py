"""quarantine list, release."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.connection import connected
from coordinator.cli.options import AsJson, Data, RunId, Token, Url
from coordinator.cli.output import age, print_json, print_table, say
from coordinator.wire.rollouts import Quarantine

app = typer.Typer(help="What may not be used: list it by reason, release it.", no_args_is_help=True)


@app.command("list")
def list_quarantine(
    run: RunId,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many lines at most.")] = 100,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Count what is in quarantine, by reason and by the update that put it there, the latest first.

    'coordinator rollouts list RUN --state quarantined --reason REASON' names the rollouts.
    """
    with connected(data, url, token) as coordinator:
        entries = coordinator.run(run).quarantine(limit)
    if as_json:
        print_json(Quarantine(entries=entries))
        return
    print_table(
        ("reason", "update", "rollouts", "first", "last"),
        [(e.reason, e.update_id, e.rollouts, f"{age(e.since)} ago", f"{age(e.until)} ago") for e in entries],
        empty="nothing is in quarantine",
    )


@app.command()
def release(
    run: RunId,
    rollouts: Annotated[list[str] | None, typer.Argument(metavar="[ROLLOUT]...", help="Ids of rollouts.")] = None,
    update: Annotated[str | None, typer.Option(help="The update that put them there; with --reason.")] = None,
    reason: Annotated[str | None, typer.Option(help="The reason it did so for; with --update.")] = None,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Release rollouts by their ids, or all that one update put there for one reason. Takes an admin's token.

    The arrival checks are made again: what they still refuse stays, and its reason is told.
    """
    if bool(rollouts) == (update is not None) or (update is None) != (reason is None):
        raise typer.BadParameter("name rollouts, or --update and --reason")
    with connected(data, url, token) as coordinator:
        of_run = coordinator.run(run)
        if update is not None and reason is not None:
            answer = of_run.release_quarantined_by(update, reason)
        else:
            answer = of_run.release(rollouts or [])
    if as_json:
        print_json(answer)
        return
    print_table(
        ("rollout", "verdict", "state", "reason"),
        [(v.rollout_id, v.verdict, v.state, v.reason) for v in answer.verdicts],
        empty="nothing that this update put into quarantine for that reason is there",
    )
    counted = Counter(verdict.verdict for verdict in answer.verdicts)
    if counted:
        say(", ".join(f"{n} {verdict}" for verdict, n in sorted(counted.items())))
