"""rewind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from coordinator.cli.connection import connected
from coordinator.cli.options import AsJson, Data, RunId, Token, Url, Yes
from coordinator.cli.output import confirm, print_json, print_record, say


def rewind(
    run: RunId,
    commit_no: Annotated[int, typer.Argument(min=0, help="The last commit that stays; 0: none stays.")],
    reason: Annotated[str, typer.Option(help="Why, for the record.")],
    consumed: Annotated[
        Literal["release", "spent"],
        typer.Option(help="What later updates had consumed is released to be used again, or stays spent."),
    ] = "release",
    rewind_id: Annotated[str | None, typer.Option(help="An id of your own, to be given again after a fault.")] = None,
    yes: Yes = False,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Go back to the commit that a restored checkpoint contains. Takes a trainer's or an admin's token.

    Every later commit is undone, open updates are fenced, and versions that they led to are withdrawn.
    """
    with connected(data, url, token) as coordinator:
        last = coordinator.run(run).view().last_commit_no
    confirm(f"Rewind run {run} from commit {last} to commit {commit_no}, and undo {max(last - commit_no, 0)}?", yes)
    with connected(data, url, token) as coordinator:
        done = coordinator.run(run).rewind(commit_no, reason, consumed=consumed, rewind_id=rewind_id)
    if as_json:
        print_json(done)
        return
    print_record(
        [
            ("rewind", done.rewind_id),
            ("last commit", done.to_commit_no),
            ("undone updates", tuple(done.rewound_updates)),
            ("fenced updates", tuple(done.fenced_updates)),
            ("withdrawn versions", tuple(done.withdrawn_versions)),
            ("rollouts", f"{done.released} came back, {done.quarantined} quarantined"),
            ("restoring version", done.restoring and done.restoring.version),
        ]
    )
    if done.restoring is not None:
        command = f"coordinator activate {run} {done.restoring.version}"
        say(f"the active version was withdrawn: '{command}' puts the restoring one in its place")
    elif done.no_restorable_version:
        say("the active version was withdrawn, and no durable ancestor is left: the trainer must publish the next one")
