"""The addresses of tokens."""

from __future__ import annotations

from fastapi import APIRouter, status

from coordinator.addresses import TokenId
from coordinator.errors import refusals
from coordinator.operations.access import Admin, DatabaseHere
from coordinator.tokens import service
from coordinator.wire.tokens import CreatedToken, CreateToken, TokenList, TokenView

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])


@router.post("", status_code=status.HTTP_201_CREATED, responses=refusals("token_conflict"))
async def create_token(body: CreateToken, caller: Admin, database: DatabaseHere) -> CreatedToken:
    """Create a token of one role, bound to a run or, for a worker, to its id. Its secret is shown this once."""
    return await database.transaction(service.create, body)


@router.get("", responses=refusals())
async def list_tokens(caller: Admin, database: DatabaseHere) -> TokenList:
    """List tokens without their secrets."""
    return await database.transaction(service.list_all)


@router.delete("/{token_id}", responses=refusals("token_unknown"))
async def revoke_token(token_id: TokenId, caller: Admin, database: DatabaseHere) -> TokenView:
    """Revoke a token; it is invalid from now on."""
    return await database.transaction(service.revoke, token_id)
