"""Who may do what: bearer tokens, hashed at rest, each with one role and bound to a run or a worker."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, cast

from fastapi import Depends, Request, Response, Security
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.good_tokens import GoodTokens
from coordinator.operations.limits import Limits, unknown_token
from coordinator.operations.token_uses import TokenUses
from coordinator.storage.changes import Changes
from coordinator.storage.database import Database
from coordinator.wire.tokens import Role

PREFIX = "rct"
ALL_ROLES: tuple[Role, ...] = ("admin", "trainer", "worker", "reward", "viewer")

_bearer = HTTPBearer(
    auto_error=False,
    bearerFormat=f"{PREFIX}_<token id>_<secret>",
    description="Send `Authorization: Bearer <token>` with a token from `coordinator token create` or from "
    "`POST /v1/tokens`. It has one role, may be bound to a run and, a worker's, to its worker id, and may expire; "
    "`x-roles` of each call says which roles it lets pass. 401: the token is missing, unknown, expired or revoked. "
    "403: it may not do that.",
)


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    token_id: str
    name: str
    role: Role
    run_id: str | None
    worker_id: str | None

    @property
    def actor(self) -> str:
        """How the audit names the caller."""
        return f"{self.role}:{self.name}"

    def require_worker(self, worker_id: str) -> None:
        """Refuses a worker's token that is bound to another worker id."""
        if self.role == "worker" and self.worker_id != worker_id:
            raise Refusal("forbidden", f"this token is bound to worker {self.worker_id}, not {worker_id}")


def new_secret() -> tuple[str, str, bytes]:
    """A fresh token: its id, the token itself, and the hash to keep."""
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    token = f"{PREFIX}_{token_id}_{secret}"
    return token_id, token, hash_token(token)


def hash_token(token: str) -> bytes:
    """sha256 of the token: it is random and long, so no slower hash is needed."""
    return hashlib.sha256(token.encode()).digest()


_VALID = "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())"

FIND_TOKEN = text(f"""
    SELECT token_id, name, role, run_id, worker_id, secret_hash
    FROM tokens
    WHERE token_id = :token_id AND {_VALID}
""")

VALID_TOKENS = text(f"SELECT token_id FROM tokens WHERE token_id = ANY(CAST(:token_ids AS text[])) AND {_VALID}")

VALID_HASHES = text(f"SELECT secret_hash FROM tokens WHERE {_VALID}")


async def authenticate(connection: AsyncConnection, token: str) -> Caller | None:
    """The caller whose token this is; none if it is unknown, expired or revoked."""
    row = (await connection.execute(FIND_TOKEN, {"token_id": token_id_of(token)})).one_or_none()
    if row is None or not hmac.compare_digest(row.secret_hash, hash_token(token)):
        return None
    return Caller(row.token_id, row.name, cast(Role, row.role), row.run_id, row.worker_id)


async def still_valid(connection: AsyncConnection, token_ids: Collection[str]) -> frozenset[str]:
    """Those of these tokens that are neither revoked nor expired."""
    return frozenset((await connection.scalars(VALID_TOKENS, {"token_ids": sorted(token_ids)})).all())


async def valid_hashes(connection: AsyncConnection) -> frozenset[bytes]:
    """The hashes of all tokens that are neither revoked nor expired."""
    return frozenset((await connection.scalars(VALID_HASHES)).all())


def token_id_of(token: str) -> str:
    """The id that a token is kept under: the one inside it, or one made from a token that somebody else chose."""
    parts = token.split("_", 2)
    if len(parts) == 3 and parts[0] == PREFIX:
        return parts[1]
    return "given-" + hash_token(token).hex()[:12]


class Allow:
    """Lets only these roles pass, and an admin always; a bound token only to its own run.

    Every endpoint depends on one, so that its roles can be read off the app.
    """

    def __init__(self, *roles: Role) -> None:
        self.roles: frozenset[Role] = frozenset(roles) | {"admin"}

    async def __call__(
        self,
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)],
    ) -> Caller:
        caller = await identify(request, credentials)
        if caller.role not in self.roles:
            raise Refusal(
                "forbidden",
                f"this call is for {', '.join(sorted(self.roles))}; the token's role is {caller.role}",
            )
        run_id = request.path_params.get("run_id")
        if caller.run_id is not None and run_id is not None and caller.run_id != run_id:
            raise Refusal("forbidden", f"the token is bound to run {caller.run_id}")
        worker_id = request.path_params.get("worker_id")
        if worker_id is not None:
            caller.require_worker(worker_id)
        return caller


async def identify(request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:
    """Who sent this request, within the limits of the token and of its address. Refuses who is nobody.

    It is found out once for each request.
    """
    known: Caller | None = getattr(request.state, "caller", None)
    if known is not None:
        return known
    if credentials is None:
        raise Refusal("unauthenticated", "the request carries no bearer token")
    digest = hash_token(credentials.credentials)
    limits: Limits = request.app.state.limits
    address = request.client.host if request.client else ""
    good: GoodTokens = request.app.state.good_tokens
    await limits.admit(digest, address, good.holds)
    caller = await (await database_of(request)).read(authenticate, credentials.credentials)
    if caller is None:
        limits.failed(digest, address)
        raise unknown_token()
    limits.passed(digest)
    (await token_uses_of(request)).note((caller.token_id,))
    request.state.actor, request.state.caller = caller.actor, caller
    return caller


def _guards(dependant: Dependant) -> Iterator[Allow]:
    for inner in dependant.dependencies:
        if isinstance(inner.call, Allow):
            yield inner.call
        yield from _guards(inner)


class GuardedRoute(APIRoute):
    """A call whose body is read only when its sender is known and may make it.

    FastAPI itself reads and parses a body before it asks for anything else: whoever reaches the port could have the
    largest one parsed, which takes many times its size in memory, and everybody's time.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI makes, behind the guards of the endpoint."""
        handle, guards = super().get_route_handler(), tuple(_guards(self.dependant))

        async def guarded(request: Request) -> Response:
            for guard in guards:
                await guard(request, await _bearer(request))
            return await handle(request)

        return guarded


def roles_of(route: APIRoute) -> tuple[Role, ...] | None:
    """The roles that an endpoint lets pass, as its `Allow` has them; none: it asks for no token."""
    allowed = [guard.roles for guard in _guards(route.dependant)]
    return tuple(role for role in ALL_ROLES if all(role in roles for roles in allowed)) if allowed else None


# Dependencies are coroutines, though they wait for nothing: FastAPI runs any other function in a thread.


async def database_of(request: Request) -> Database:
    """The app's database."""
    return cast(Database, request.app.state.database)


async def changes_of(request: Request) -> Changes:
    """The app's waiters."""
    return cast(Changes, request.app.state.changes)


async def token_uses_of(request: Request) -> TokenUses:
    """The app's record of who signed in."""
    return cast(TokenUses, request.app.state.token_uses)


DatabaseHere = Annotated[Database, Depends(database_of)]
ChangesHere = Annotated[Changes, Depends(changes_of)]
Anyone = Annotated[Caller, Depends(Allow(*ALL_ROLES))]
Admin = Annotated[Caller, Depends(Allow("admin"))]
Trainer = Annotated[Caller, Depends(Allow("trainer"))]
WorkerCaller = Annotated[Caller, Depends(Allow("worker"))]
RewardCaller = Annotated[Caller, Depends(Allow("reward"))]
