"""The command line. Each file has the commands of one noun; `main` is the entry point."""

from __future__ import annotations

import sys

# The script is there in every installation, what it needs only with the extra.
try:
    import typer

    from coordinator.cli import serving, tokens
    from coordinator.cli.faults import EXIT_CODES, INTERRUPTED, PIPE_CLOSED, explained
    from coordinator.cli.output import printable, say
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.split(".")[0] == "coordinator":
        raise
    sys.exit(f"coordinator: {missing.name} is not installed: pip install 'rollout-coordinator[server]'")

app = typer.Typer(
    help="Coordinates rollouts and policies of online RL post-training.\n\n"
    "Commands that call the API take the address and a token from --url and --token, else from COORDINATOR_URL and "
    "COORDINATOR_TOKEN, else from the data folder of a coordinator on this machine. serve, migrate, verify, demo and "
    "token work on the database itself: without DATABASE_URL, on an embedded Postgres in the data "
    "folder.",
    epilog="\n\n".join(["Exit codes:", *(f"{code}: {meaning}." for code, meaning in EXIT_CODES.items())]),
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for command in (serving.serve, serving.migrate, serving.verify, serving.demo):
    app.command()(command)
app.add_typer(tokens.app, name="token")


def main() -> None:
    """The entry point: what a person can mend ends in words on standard error and one of the exit codes."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
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
        say(f"coordinator: {printable(failure.what)}")
        if failure.next_step:
            say(f"  {printable(failure.next_step)}")
        raise SystemExit(failure.code) from error
