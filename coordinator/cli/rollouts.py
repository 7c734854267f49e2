"""rollouts list, show, export."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.connection import LIVED_THROUGH_SECONDS, connected, coordinator_at
from coordinator.cli.options import AsJson, Data, RunId, Token, Url
from coordinator.cli.output import age, print_json, print_lines, print_record, print_table, say
from coordinator.wire.rollouts import RolloutList, RolloutView, State

app = typer.Typer(help="Rollouts: list, show, export.", no_args_is_help=True)

InState = Annotated[State | None, typer.Option("--state", help="In this state.")]
OfGroup = Annotated[str | None, typer.Option("--group", help="Of this group.")]
OfVersion = Annotated[int | None, typer.Option("--version", min=0, help="With tokens of this policy version.")]


@app.command("list")
def list_rollouts(
    run: RunId,
    state: InState = None,
    group: OfGroup = None,
    version: OfVersion = None,
    worker: Annotated[str | None, typer.Option(help="Of this worker.")] = None,
    reason: Annotated[str | None, typer.Option(help="Quarantined or set aside for just this reason.")] = None,
    task_source: Annotated[str | None, typer.Option(help="Of tasks from this source.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="How many at most.")] = 100,
    after: Annotated[str | None, typer.Option(help="Continue after this rollout id.")] = None,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List rollouts by id, without their tokens: those that meet every filter."""
    with connected(data, url, token) as coordinator:
        found = coordinator.run(run).rollouts(
            state, group, version=version, worker_id=worker, reason=reason, task_source=task_source, after=after
        )
        rollouts = list(islice(found, limit))
    more = rollouts[-1].rollout_id if len(rollouts) == limit else None
    if as_json:
        print_json(RolloutList(rollouts=rollouts, next_after=more))
        return
    print_table(
        ("rollout", "group", "state", "reason", "versions", "reward", "tokens", "worker", "update", "age"),
        [
            (
                r.rollout_id,
                r.group_id,
                r.state,
                r.reason,
                _versions(r),
                r.reward if r.reward_status in (None, "ok") else r.reward_status,
                r.tokens,
                r.worker_id,
                r.update_id,
                age(r.arrived_at),
            )
            for r in rollouts
        ],
        empty="no rollout is like that",
    )
    if more is not None:
        say(f"there may be more: --after {more}")


@app.command()
def show(
    run: RunId,
    rollout: Annotated[str, typer.Argument(help="The rollout's id.")],
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show a rollout without its tokens, and everything that happened to it."""
    with connected(data, url, token) as coordinator:
        view = coordinator.run(run).rollout(rollout)
        if as_json:
            print_json(view)
            return
        history = coordinator.run(run).history(rollout)
    print_record(
        [
            ("rollout", view.rollout_id),
            ("state", f"{view.state}, revision {view.revision}"),
            ("reason", view.reason),
            ("update", view.update_id),
            ("task", f"{view.task_id} of {view.task_source}"),
            ("group", f"{view.group_id}, sample {view.sample_index}, attempt {view.attempt}"),
            ("worker", f"{view.worker_id}, incarnation {view.incarnation}"),
            *((f"version {s.version}", f"tokens [{s.start}, {s.end}), {s.artifact_hash}") for s in view.spans),
            ("spans by", view.span_source),
            ("tokens", f"{view.tokens}, {view.action_tokens} of them actions, rows at {list(view.row_starts)}"),
            ("reward", view.reward if view.reward_status in (None, "ok") else view.reward_status),
            ("ruleset", view.ruleset_id),
            ("contract", view.contract_hash),
            ("content", view.content_hash),
            ("flags", view.flags),
            ("generation", tuple(f"{k} {v}" for k, v in view.generation.model_dump(exclude_none=True).items())),
            ("side data", view.side_data_digest),
            ("arrived", view.arrived_at),
        ]
    )
    print_lines("")
    print_table(
        ("revision", "at", "event", "to", "reason", "update", "lag", "drift", "by"),
        [
            (t.revision, t.at, t.event, t.to_state, t.reason, t.update_id, t.lag, t.drift, t.actor)
            for t in history.transitions
        ],
        empty="nothing is recorded of it",
    )


@app.command()
def export(
    run: RunId,
    file: Annotated[Path, typer.Argument(help="The Parquet file to be written; it appears whole or not at all.")],
    state: InState = None,
    group: OfGroup = None,
    version: OfVersion = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
) -> None:
    """Write rollouts with their tokens, masks and log-probs to a Parquet file: those that meet every filter.

    They are read and written in pieces, each rollout as it stands at that moment, so that a run of any size fits. Of
    what retention has dropped, the tokens are null. The columns are described in docs/command-line.md.
    """
    from coordinator.cli.export import export as write  # pyarrow's Parquet takes a while to be loaded

    with coordinator_at(data, url, token, retry_seconds=LIVED_THROUGH_SECONDS) as coordinator:
        done = write(coordinator.run(run), file, state=state, group_id=group, version=version, overwrite=overwrite)
    say(f"{done} rollouts are in {file}")


def _versions(rollout: RolloutView) -> tuple[int, ...]:
    return tuple(dict.fromkeys(span.version for span in rollout.spans))
