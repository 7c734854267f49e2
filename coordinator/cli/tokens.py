"""token create, list, revoke: on the database itself, so that no server and no other token is needed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.faults import Failure
from coordinator.cli.local import with_database
from coordinator.cli.options import AsJson, Data
from coordinator.cli.output import age, print_json, print_lines, print_record, print_table, say
from coordinator.wire.tokens import CreatedToken, CreateToken, TokenList, TokenView

if TYPE_CHECKING:
    from coordinator.storage.database import Database

app = typer.Typer(help="Bearer tokens: create, list, revoke. On the database itself.", no_args_is_help=True)


@app.command()
def create(
    name: Annotated[str, typer.Option(help="How the audit names its holder.")],
    role: Annotated[str, typer.Option(help="admin, trainer, worker, reward or viewer.")],
    run: Annotated[str | None, typer.Option(help="Bind it to one run, which may be created later.")] = None,
    worker: Annotated[str | None, typer.Option(help="The worker id that a worker's token is bound to.")] = None,
    days: Annotated[
        float | None, typer.Option(min=0.001, max=36_500, help="Days until it expires; left out: never.")
    ] = None,
    data: Data = Path(".data"),
    as_json: AsJson = False,
) -> None:
    """Create a token and print it, once; only its hash is kept.

    This works on the database itself, so it needs no running server and no other token.
    """
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    body = CreateToken.model_validate(
        {"name": name, "role": role, "run_id": run, "worker_id": worker, "expires_at": expires_at}
    )

    async def work(database: Database) -> tuple[CreatedToken, list[str]]:
        from coordinator.runs.service import run_ids
        from coordinator.tokens import service

        return await database.transaction(service.create, body), await database.transaction(run_ids)

    created, runs = with_database(data, work)
    # Not refused: the tokens of a run may be made before it.
    if run is not None and run not in runs:
        known = (
            f"the runs are {', '.join(runs[:20])}{', ...' if runs[20:] else ''}" if runs else "there is no run at all"
        )
        say(f"coordinator: there is no run {run} yet: the token counts once it is created ({known})")
    if as_json:
        print_json(created)
    else:
        print_lines(created.token)


@app.command("list")
def list_tokens(data: Data = Path(".data"), as_json: AsJson = False) -> None:
    """List every token without its secret: what it may do, when it expires, and when it was last used."""
    tokens = with_database(data, _tokens)
    if as_json:
        print_json(tokens)
        return
    print_table(
        ("id", "name", "role", "run", "worker", "state", "expires", "last used"),
        [
            (t.token_id, t.name, t.role, t.run_id, t.worker_id, _state(t), t.expires_at or "never", _last_use(t))
            for t in tokens.tokens
        ],
        empty="there is no token: 'coordinator token create' makes one",
    )


@app.command()
def revoke(
    which: Annotated[str, typer.Argument(metavar="TOKEN", help="The token's name or id; its secret is no part of it.")],
    data: Data = Path(".data"),
    as_json: AsJson = False,
) -> None:
    """End a token. Requests with it are refused from now on; one that had ended before stays so."""

    async def work(database: Database) -> TokenView:
        from coordinator.tokens import service

        tokens = (await _tokens(database)).tokens
        found = {t.token_id for t in tokens if which == t.token_id} or {t.token_id for t in tokens if which == t.name}
        if not found:
            raise Failure(
                f"token_unknown: there is no token with the name or id {which}", "'coordinator token list' shows all."
            )
        return await database.transaction(service.revoke, found.pop())

    revoked = with_database(data, work)
    if as_json:
        print_json(revoked)
    else:
        print_record([("name", revoked.name), ("id", revoked.token_id), ("revoked", revoked.revoked_at)])


async def _tokens(database: Database) -> TokenList:
    from coordinator.tokens import service

    return await database.transaction(service.list_all)


def _state(token: TokenView) -> str:
    if token.revoked_at is not None:
        return "revoked"
    return "expired" if token.expires_at is not None and token.expires_at <= datetime.now(UTC) else "valid"


def _last_use(token: TokenView) -> str:
    ago = age(token.last_used_at)
    return "never" if ago is None else f"{ago} ago"
