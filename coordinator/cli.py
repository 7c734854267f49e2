"""The command line: serve, migrate, verify, tokens, demo."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

# The script is there in every installation, what it needs only with the extra.
try:
    import typer
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    from coordinator.errors import Refusal, is_connection_fault, is_refused_entry
    from coordinator.operations.verify import RunUnknownError
    from coordinator.operations.verify.report import report
    from coordinator.runs.service import run_ids
    from coordinator.server import ServerError, database_url, serve_forever
    from coordinator.settings import Settings
    from coordinator.storage.database import DatabaseError, connect
    from coordinator.storage.migrations import check_schema, newest, upgrade
    from coordinator.storage.postgres import EmbeddedPostgresError
    from coordinator.tokens import service as token_service
    from coordinator.wire.tokens import CreatedToken, CreateToken
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.split(".")[0] == "coordinator":
        raise
    sys.exit(f"coordinator: {missing.name} is not installed: pip install 'rollout-coordinator[server]'")

app = typer.Typer(
    help="Coordinates rollouts and policies of online RL post-training.\n\n"
    "Without DATABASE_URL every command uses an embedded Postgres in the data folder.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
tokens = typer.Typer(help="Create bearer tokens.", no_args_is_help=True)
app.add_typer(tokens, name="token")

Data = Annotated[
    Path,
    typer.Option(
        "--data",
        envvar="COORDINATOR_DATA",
        help="Folder of the embedded Postgres, the artifacts, and the files 'address' and 'admin.token'.",
    ),
]


def _say(line: str) -> None:
    typer.echo(line, err=True)


@app.command()
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
    serve_forever(Settings(data=data), host, port, _say)


@app.command()
def migrate(data: Data = Path(".data")) -> None:
    """Bring the database to the schema of this release. Safe to run again, and from several machines at once."""
    with database_url(Settings(data=data), _say) as url:
        upgrade(url)
    _say(f"the schema is at revision {newest()}")


@app.command()
def verify(
    run: Annotated[str | None, typer.Option(help="Verify this run only; left out: every run.")] = None,
    data: Data = Path(".data"),
) -> None:
    """Prove from the audit that nothing was lost, consumed twice, or used against the rules.

    It reads one moment of the database and may run while the coordinator serves. Each breach is a line on standard
    output, and so is each of the seven statements of each run, with how much was looked at; what it is doing goes to
    standard error. Exit code 0: every statement holds; 1: there are breaches; 2: it could not be found out.
    """
    settings = Settings(data=data)
    if settings.database_url is None and not (data / "postgres").is_dir():
        raise typer.BadParameter(f"there is no database in {data}; name its folder, or set DATABASE_URL")
    try:
        with database_url(settings, _say) as url:
            breaches = asyncio.run(report(url, run, typer.echo, _say))
    except (DatabaseError, EmbeddedPostgresError, RunUnknownError, SQLAlchemyError, OSError) as error:
        # Not the exit code of a breach: a monitor must be able to tell the two apart.
        _say(f"coordinator: cannot verify: {error.orig if isinstance(error, DBAPIError) else error}")
        raise typer.Exit(2) from error
    raise typer.Exit(1 if breaches else 0)


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Option(help="How the audit names its holder.")],
    role: Annotated[str, typer.Option(help="admin, trainer, worker, reward or viewer.")],
    run: Annotated[str | None, typer.Option(help="Bind it to one run, which may be created later.")] = None,
    worker: Annotated[str | None, typer.Option(help="The worker id that a worker's token is bound to.")] = None,
    days: Annotated[float | None, typer.Option(min=0.001, help="Days until it expires; left out: never.")] = None,
    data: Data = Path(".data"),
) -> None:
    """Create a token and print it, once; only its hash is kept.

    This works on the database itself, so it needs no running server and no other token.
    """
    from datetime import UTC, datetime

    from pydantic import ValidationError

    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    try:
        body = CreateToken.model_validate(
            {"name": name, "role": role, "run_id": run, "worker_id": worker, "expires_at": expires_at}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise typer.BadParameter(f"{where + ': ' if where else ''}{first['msg']}") from error
    settings = Settings(data=data)
    if settings.database_url is None and not (data / "postgres").is_dir():
        raise typer.BadParameter(
            f"there is no database in {data}; name the folder of a coordinator, run 'coordinator migrate' to make one "
            "there, or set DATABASE_URL"
        )
    with database_url(settings, _say) as url:
        created, runs = asyncio.run(_create_token(url, body))
    # Not refused: the tokens of a run may be made before it.
    if run is not None and run not in runs:
        known = (
            f"the runs are {', '.join(runs[:20])}{', ...' if runs[20:] else ''}" if runs else "there is no run at all"
        )
        _say(f"coordinator: there is no run {run} yet: the token counts once it is created ({known})")
    typer.echo(created.token)


async def _create_token(url: str, body: CreateToken) -> tuple[CreatedToken, list[str]]:
    """The token, and the ids of all runs, the newest first."""
    database = connect(url, pool_size=1)
    try:
        await check_schema(database)
        return await database.transaction(token_service.create, body), await database.transaction(run_ids)
    finally:
        await database.close()


@app.command()
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
        _say(
            f"coordinator: the demo lacks {', '.join(lacking)}: 'make setup' in a checkout installs all of it, "
            "or pip install 'rollout-coordinator[server,worker-cpu]' as requirements/cpu.lock has it"
        )
        raise typer.Exit(1)
    arguments = ["--data", str(data), *(["--keep"] if keep else [])]
    # In place of this process, so that Ctrl-C and a kill reach the demo itself.
    os.execv(sys.executable, [sys.executable, "-m", "worker_agent.demo", *arguments])


def main() -> None:
    """The entry point: faults that a person can mend end in one line and exit code 1."""
    try:
        app()
    except (ServerError, DatabaseError, EmbeddedPostgresError, Refusal) as error:
        typer.echo(f"coordinator: {error}", err=True)
        raise SystemExit(1) from error
    except OSError as error:
        typer.echo(f"coordinator: cannot reach the database or a file: {error}", err=True)
        raise SystemExit(1) from error
    except DBAPIError as error:
        if not (is_connection_fault(error) or is_refused_entry(error)):
            raise
        typer.echo(f"coordinator: the database takes no connection: {error.orig}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
