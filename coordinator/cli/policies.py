"""policies list, show; activate, give-up, rollback."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.connection import LIVED_THROUGH_SECONDS, connected, coordinator_at
from coordinator.cli.faults import INTERRUPTED
from coordinator.cli.options import AsJson, Data, RunId, Token, Url, Yes
from coordinator.cli.output import (
    confirm,
    print_json,
    print_lines,
    print_record,
    print_table,
    printable,
    say,
    seconds_in_words,
)
from coordinator.client import NotActivated, Run
from coordinator.client.waiting import waits_for
from coordinator.wire.policies import ActivationView, PolicyList

app = typer.Typer(help="Policy versions: list, show.", no_args_is_help=True)

Version = Annotated[int, typer.Argument(min=0, help="The policy version's number.")]
_REMIND_SECONDS = 10.0


@app.command("list")
def list_policies(
    run: RunId, data: Data = Path(".data"), url: Url = None, token: Token = None, as_json: AsJson = False
) -> None:
    """List the run's policy versions, lowest number first."""
    with connected(data, url, token) as coordinator:
        policies = coordinator.run(run).policies()
    if as_json:
        print_json(PolicyList(policies=policies))
        return
    print_table(
        ("version", "state", "kind", "parent", "hash", "size", "updates", "committed", "activated", "ended"),
        [
            (
                p.version,
                p.state,
                p.kind,
                p.parent_version,
                p.artifact_hash[:12],
                f"{sum(file.size for file in p.files) / 2**20:.1f} MiB" if p.files else None,
                p.updates,
                p.committed_at,
                p.activated_at,
                p.ended_at,
            )
            for p in policies
        ],
        empty="there is no version",
    )


@app.command()
def show(
    run: RunId,
    version: Version,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show a policy version with the manifest of its artifact."""
    with connected(data, url, token) as coordinator:
        view = coordinator.run(run).policy(version)
    if as_json:
        print_json(view)
        return
    reading = view.verification
    print_record(
        [
            ("version", view.version),
            ("state", view.state),
            ("kind", view.kind),
            ("hash", view.artifact_hash),
            ("parent", view.parent_version),
            ("rollback version", view.rollback_version),
            ("lag clock", view.lag_clock),
            ("base model", f"{view.base_model.name} at {view.base_model.revision}, {view.base_model.sha256}"),
            ("updates", view.updates),
            ("files at", view.uri or ("the coordinator" if view.files else None)),
            *((f"file {file.name}", f"{file.size} bytes, {file.sha256}") for file in view.files),
            ("verification", reading and f"{reading.state}, {reading.bytes_done} of {reading.bytes_total} bytes"),
            ("digests", tuple(f"{layout} {digest}" for layout, digest in view.digests.items())),
            ("prepared", view.prepared_at),
            ("committed", view.committed_at),
            ("activated", view.activated_at),
            ("ended", view.ended_at),
            ("files removed", view.files_removed_at),
        ]
    )


class _Stages:
    """Tells on standard error what is new of an activation, and whom it waits for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._told = 0
        self._waits = ""
        self._waits_at = datetime.min.replace(tzinfo=UTC)
        self.activation: ActivationView | None = None

    def look(self, activation: ActivationView) -> None:
        """Called with the activation whenever it may have changed."""
        self.activation = activation
        timeline = self._run.activation_timeline(activation.activation_id)
        steps = [(step, "") for step in timeline.steps]
        steps += [(step, worker.worker_id) for worker in timeline.workers for step in worker.steps]
        for step, who in sorted(steps, key=lambda pair: pair[0].event_no):
            if step.event_no > self._told:
                self._told = step.event_no
                detail = f": {printable(step.detail)}" if step.detail else ""
                say(f"{step.seconds:>z9.1f} s  {who or f'version {activation.version}'}  {step.step}{detail}")
        if activation.state not in ("waiting", "open"):
            return
        now, waits = datetime.now(UTC), waits_for(activation)
        if waits != self._waits or (now - self._waits_at).total_seconds() >= _REMIND_SECONDS:
            self._waits, self._waits_at = waits, now
            left = activation.deadline_at and seconds_in_words((activation.deadline_at - now).total_seconds())
            say(f"waits for {printable(waits)}{f'; {left} to its deadline' if left else ''}")


def activate(
    run: RunId,
    version: Version,
    wait_seconds: Annotated[
        float | None, typer.Option(min=0, help="How long to wait; left out: until it has ended.")
    ] = None,
    supersede: Annotated[
        bool, typer.Option("--supersede", help="End the activation that is open, and abandon its version.")
    ] = False,
    activation_id: Annotated[
        str | None,
        typer.Option(help="Its id; left out: that of an activation of this version that is under way, or a new one."),
    ] = None,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Have every required worker confirm a version, and follow that until it is active.

    Its stages, and whom it waits for, are told on standard error meanwhile. Ctrl-C leaves the activation as it is;
    the same command follows it again. Exit code 1: it ended without the switch; 5: it goes on after --wait-seconds.
    """
    with coordinator_at(data, url, token, retry_seconds=LIVED_THROUGH_SECONDS) as coordinator:
        of_run = coordinator.run(run)
        stages = _Stages(of_run)
        try:
            ended = of_run.activate(version, activation_id, wait_seconds, supersede=supersede, progress=stages.look)
        except KeyboardInterrupt:
            opened = stages.activation
            named = f"activation {opened.activation_id}" if opened else "the activation, if it was opened,"
            say(f"{named} goes on as it is; 'coordinator activate {run} {version}' follows it again")
            raise typer.Exit(INTERRUPTED) from None
        except NotActivated as error:
            stages.look(error.activation)
            if as_json:
                print_json(error.activation)
            raise
        stages.look(ended)
    if as_json:
        print_json(ended)
    else:
        print_lines(f"version {ended.version} is active")


def give_up(
    run: RunId,
    activation: Annotated[str, typer.Argument(help="The activation's id, which 'coordinator diagnose' tells.")],
    reason: Annotated[str, typer.Option(help="Why, for the record.")],
    yes: Yes = False,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """End an activation that is open or waits. The active version stays, and the other is abandoned.

    Takes a trainer's or an admin's token.
    """
    confirm(f"Give up activation {activation} of run {run}, and abandon its version?", yes)
    with connected(data, url, token) as coordinator:
        ended = coordinator.run(run).give_up(activation, reason)
    if as_json:
        print_json(ended)
    else:
        print_lines(f"activation {ended.activation_id} of version {ended.version} is {ended.state}")


def rollback(
    run: RunId,
    reason: Annotated[str, typer.Option(help="Why, for the record.")],
    version: Annotated[
        int | None,
        typer.Argument(
            min=0,
            help="The version whose artifact comes back; left out: the active one's rollback version, or its nearest "
            "durable ancestor.",
        ),
    ] = None,
    activate_it: Annotated[
        bool, typer.Option("--activate/--no-activate", help="Open the new version's activation at once.")
    ] = True,
    rollback_id: Annotated[str | None, typer.Option(help="An id of your own, to be given again after a fault.")] = None,
    yes: Yes = False,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Bring the artifact of an earlier version back under a new number. Takes an admin's token.

    Every version that is no ancestor of it is withdrawn; open updates on those are fenced, and rollouts made with them
    are quarantined. The activation takes the place of any that is open; 'coordinator activate' follows it.
    """
    with connected(data, url, token) as coordinator:
        of_run = coordinator.run(run)
        active = of_run.view().active.version
    back = "the version that it names for that" if version is None else f"version {version}"
    confirm(f"Roll run {run} back from version {active} to {back}, and withdraw what is no ancestor of it?", yes)
    with connected(data, url, token) as coordinator:
        of_run = coordinator.run(run)
        activation_id = f"rollback-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}" if activate_it else None
        done = of_run.roll_back(version, reason, rollback_id=rollback_id, activation_id=activation_id)
    if as_json:
        print_json(done)
        return
    print_record(
        [
            ("rollback", done.rollback_id),
            ("restored", f"version {done.to_version}, as version {done.restoring.version}"),
            ("withdrawn", tuple(done.withdrawn_versions)),
            ("fenced updates", tuple(done.fenced_updates)),
            ("rollouts", f"{done.released} came back, {done.quarantined} quarantined"),
            ("activation", done.activation_id),
        ]
    )
    verb = "follows" if activate_it else "begins"
    say(f"'coordinator activate {run} {done.restoring.version}' {verb} its activation")
