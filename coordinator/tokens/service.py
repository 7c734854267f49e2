"""What can be done with tokens."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import authenticate, hash_token, new_secret, token_id_of
from coordinator.tokens import queries
from coordinator.wire.tokens import CreatedToken, CreateToken, TokenList, TokenView


async def create(connection: AsyncConnection, body: CreateToken) -> CreatedToken:
    """Makes a token. Its secret is in the answer and nowhere else."""
    token_id, token, secret_hash = new_secret()
    row = (
        await connection.execute(
            queries.INSERT_TOKEN, body.model_dump() | {"token_id": token_id, "secret_hash": secret_hash}
        )
    ).one_or_none()
    if row is None:
        raise Refusal("token_conflict", f"a token named {body.name} exists", field="name")
    return CreatedToken(token=token, **row._mapping)


async def list_all(connection: AsyncConnection) -> TokenList:
    """Every token, revoked ones included, without the secrets."""
    rows = await connection.execute(queries.LIST_TOKENS)
    return TokenList(tokens=[TokenView(**row._mapping) for row in rows])


async def revoke(connection: AsyncConnection, token_id: str) -> TokenView:
    """Makes a token invalid from now on."""
    row = (await connection.execute(queries.REVOKE_TOKEN, {"token_id": token_id})).one_or_none()
    if row is None:
        raise Refusal("token_unknown", f"there is no token {token_id}")
    return TokenView(**row._mapping)


async def ensure_given_admin(connection: AsyncConnection, token: str) -> None:
    """Makes a token that the operator chose a valid admin's token. One that was revoked stays revoked."""
    token_id = token_id_of(token)
    await connection.execute(
        queries.ENSURE_ADMIN,
        {"token_id": token_id, "name": f"admin-{token_id}", "secret_hash": hash_token(token)},
    )


async def is_admin(connection: AsyncConnection, token: str) -> bool:
    """Whether this is a valid admin's token."""
    caller = await authenticate(connection, token)
    return caller is not None and caller.role == "admin"


async def any_valid(connection: AsyncConnection) -> bool:
    """Whether there is a token at all."""
    return bool(await connection.scalar(queries.HAS_TOKENS))
