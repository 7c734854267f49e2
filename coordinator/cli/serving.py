"""serve, migrate, verify, demo."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.faults import Failure
from coordinator.cli.local import existing_database, settings_of
from coordinator.cli.options import Data
from coordinator.cli.output import patience, say


def serve(
    data: Data = Path(".data"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. Beyond loopback a token must exist first.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one, the same at every start on this data."),
    ] = 8000,
) -> None:
    """Serve the HTTP API until it is stopped; the OpenAPI page is at /docs.

    With DATABASE_URL it serves that Postgres, which 'coordinator migrate' must have prepared. Without, it starts
    an embedded Postgres in the data folder and migrates it. An admin's token is written to DATA/admin.token,
    readable by its owner only, and the address to DATA/address: other commands and the client find both there.
    """
    from coordinator.server import serve_forever

    serve_forever(settings_of(data), host, port, say)


def migrate(data: Data = Path(".data")) -> None:
    """Bring the database to the schema of this release. Safe to run again, and from several machines at once."""
    from coordinator.server import database_url
    from coordinator.storage.migrations import newest, upgrade

    with database_url(settings_of(data), say) as url, patience("the schema is being migrated"):
        upgrade(url)
    say(f"the schema is at revision {newest()}")


def verify(
    run: Annotated[str | None, typer.Option(help="Verify this run only; left out: every run.")] = None,
    data: Data = Path(".data"),
) -> None:
    """Prove from the audit that nothing was lost, consumed twice, or used against the rules.

    It reads one moment of the database and may run while the coordinator serves. Each breach is a line on standard
    output, and so is each of the seven statements of each run, with how much was looked at; what it is doing goes to
    standard error. Exit code 0: every statement holds; 1: there are breaches; 2: it could not be found out.
    """
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    from coordinator.operations.verify import RunUnknownError
    from coordinator.operations.verify.report import report
    from coordinator.storage.database import DatabaseError
    from coordinator.storage.postgres import EmbeddedPostgresError

    try:
        with existing_database(data) as url:
            breaches = asyncio.run(report(url, run, typer.echo, say))
    except (DatabaseError, EmbeddedPostgresError, RunUnknownError, SQLAlchemyError, OSError) as error:
        # Not the exit code of a breach: a monitor must be able to tell the two apart.
        say(f"coordinator: cannot verify: {error.orig if isinstance(error, DBAPIError) else error}")
        raise typer.Exit(2) from error
    raise typer.Exit(1 if breaches else 0)


def demo(
    data: Data = Path(".data"),
    keep: Annotated[bool, typer.Option("--keep", help="Leave the coordinator serving at the end.")] = False,
) -> None:
    """Run the whole chain on this machine: two vLLM workers, a reward step and a verl trainer, with a summary.

    Needs the extras 'server' and 'worker-cpu' (or 'worker' on a GPU). Takes about three minutes on two cores.
    """
    lacking = [
        name for name in ("filelock", "peft", "torch", "transformers", "verl", "vllm") if find_spec(name) is None
    ]
    if lacking:
        raise Failure(
            f"the demo lacks {', '.join(lacking)}: 'make setup' in a checkout installs all of it, "
            "or pip install 'rollout-coordinator[server,worker-cpu]' as requirements/cpu.lock has it"
        )
    arguments = ["--data", str(data), *(["--keep"] if keep else [])]
    # In place of this process, so that Ctrl-C and a kill reach the demo itself.
    os.execv(sys.executable, [sys.executable, "-m", "worker_agent.demo", *arguments])
