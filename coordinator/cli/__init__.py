"""The command line. Each file has the commands of one noun; `main` is the entry point."""

from __future__ import annotations

import sys

# The script is there in every installation, what it needs only with the extra.
try:
    import typer

    from coordinator.cli import (
        diagnosis,
        doctor,
        policies,
        prune,
        quarantine,
        rewinds,
        rollouts,
        runs,
        serving,
        tokens,
        updates,
        workers,
    )
    from coordinator.cli.faults import EXIT_CODES, INTERRUPTED, PIPE_CLOSED, explained
    from coordinator.cli.output import printable, say
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.split(".")[0] == "coordinator":
        raise
    sys.exit(f"coordinator: {missing.name} is not installed: pip install 'rollout-coordinator[server]'")

app = typer.Typer(
    help="Coordinates rollouts and policies of online RL post-training.\n\n"
    "Commands that call the API take the address and a token from --url and --token, else from COORDINATOR_URL and "
    "COORDINATOR_TOKEN, else from the data folder of a coordinator on this machine. serve, migrate, verify, demo, "
    "token, doctor and prune work on the database itself: without DATABASE_URL, on an embedded Postgres in the data "
    "folder.",
    epilog="\n\n".join(["Exit codes:", *(f"{code}: {meaning}." for code, meaning in EXIT_CODES.items())]),
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (
    serving.serve,
    serving.migrate,
    serving.verify,
    serving.demo,
    policies.activate,
    policies.give_up,
    policies.rollback,
    rewinds.rewind,
    diagnosis.diagnose,
    doctor.doctor,
    prune.prune,
):
    app.command()(command)
for name, noun in {
    "run": runs,
    "rollouts": rollouts,
    "updates": updates,
    "policies": policies,
    "workers": workers,
    "quarantine": quarantine,
    "token": tokens,
}.items():
    app.add_typer(noun.app, name=name)


def main() -> None:
    """The entry point: what a person can mend ends in words on standard error and one of the exit codes."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(prog_name="coordinator")
    except SystemExit as ended:
        # Typer has taken care of the stream already, and calls it a failure.
        if isinstance(ended.__context__, BrokenPipeError):
            raise SystemExit(PIPE_CLOSED) from None
        raise
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        failure = explained(error)
        if failure is None:
            raise
        for line in f"coordinator: {failure.what}".split("\n"):
            say(printable(line))
        if failure.next_step:
            say(f"  {printable(failure.next_step)}")
        raise SystemExit(failure.code) from error
