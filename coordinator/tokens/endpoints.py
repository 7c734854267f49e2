"""The addresses of tokens."""

from __future__ import annotations

from fastapi import APIRouter, status

from coordinator.addresses import TokenId
from coordinator.errors import refusals
from coordinator.operations.access import Admin, DatabaseHere, GuardedRoute
from coordinator.tokens import service
from coordinator.wire.tokens import CreatedToken, CreateToken, TokenList, TokenView

router = APIRouter(prefix="/v1/tokens", tags=["tokens"], route_class=GuardedRoute)


@router.post("", status_code=status.HTTP_201_CREATED, responses=refusals("token_conflict"))
async def create_token(body: CreateToken, caller: Admin, database: DatabaseHere) -> CreatedToken:
    """Create a token of one role, bound to a run or, for a worker, to its id.

    Its secret is in this answer and nowhere else: keep it where the process that sends it can read it.

    Sent again: 409 `token_conflict`, since the secret is not kept. Where the answer was lost, revoke that token (list
    them for its id) and create one under another name.
    """
    return await database.transaction(service.create, body)


@router.get("", responses=refusals())
async def list_tokens(caller: Admin, database: DatabaseHere) -> TokenList:
    """List tokens without their secrets.

    In the order of their creation, revoked and expired ones included.
    """
    return await database.transaction(service.list_all)


@router.delete("/{token_id}", responses=refusals("token_unknown"))
async def revoke_token(token_id: TokenId, caller: Admin, database: DatabaseHere) -> TokenView:
    """Revoke a token; it is invalid from now on.

    On every replica with its next call, and a stream of events that it opened ends.

    Sent again: the token as it stands, revoked when it first was.
    """
    return await database.transaction(service.revoke, token_id)
