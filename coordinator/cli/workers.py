"""workers list, drain, fence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.connection import connected
from coordinator.cli.faults import Failure
from coordinator.cli.options import AsJson, Data, RunId, Token, Url, Yes
from coordinator.cli.output import age, confirm, print_json, print_table
from coordinator.wire.workers import WorkerList, WorkerView

app = typer.Typer(help="Workers: list, drain, fence.", no_args_is_help=True)

WorkerId = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id.")]


@app.command("list")
def list_workers(
    run: RunId, data: Data = Path(".data"), url: Url = None, token: Token = None, as_json: AsJson = False
) -> None:
    """List every worker that registered in the run, by id."""
    with connected(data, url, token) as coordinator:
        workers = coordinator.run(run).workers()
    if as_json:
        print_json(WorkerList(workers=workers))
    else:
        _print(workers)


@app.command()
def drain(
    run: RunId,
    worker: WorkerId,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Take a worker out of the open activation and those to come. Takes an admin's token.

    It gets no tickets any more; its rollouts are still taken. It is a full member again once it registers anew, as it
    does when it is restarted.
    """
    with connected(data, url, token) as coordinator:
        of_run = coordinator.run(run)
        found = [view for view in of_run.workers() if view.worker_id == worker]
        if not found:
            raise Failure(
                f"worker_unknown: run {run} has no worker {worker}", f"'coordinator workers list {run}' shows all."
            )
        # Of this life only: one that has just been restarted is not meant.
        drained = of_run.worker(worker, found[0].incarnation).drain()
    if as_json:
        print_json(drained)
    else:
        _print([drained])


@app.command()
def fence(
    run: RunId,
    worker: WorkerId,
    reason: Annotated[str, typer.Option(help="Why, for the record.")],
    yes: Yes = False,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Take a worker out until it loads a version whole and acks it. Takes an admin's token.

    Until then it gets no tickets, and no activation counts what it confirmed or requires it. Rollouts that it hands
    in are still taken: to refuse those as well, revoke its token.
    """
    confirm(f"Fence worker {worker} of run {run}, until it loads and acks a version anew?", yes)
    with connected(data, url, token) as coordinator:
        fenced = coordinator.run(run).fence(worker, reason)
    if as_json:
        print_json(fenced)
    else:
        _print([fenced])


def _print(workers: list[WorkerView]) -> None:
    print_table(
        ("worker", "state", "heartbeat", "fenced", "suspect", "engine", "registered", "incarnation"),
        [
            (
                w.worker_id,
                f"asleep until {w.asleep_until:%H:%M:%SZ}" if w.asleep_until else w.state,
                f"{age(w.heartbeat_at)} ago",
                w.fenced_reason,
                w.suspect_reason,
                f"{w.engine} {w.engine_version}",
                f"{age(w.registered_at)} ago",
                w.incarnation,
            )
            for w in workers
        ],
        empty="no worker has registered",
    )
