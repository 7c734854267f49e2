"""Reading a request's body by its content type, within the size that is allowed."""

from __future__ import annotations

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.errors import Refusal


async def read_body(request: Request, *kinds: str) -> tuple[str, bytes]:
    """The content type, one of `kinds` (the first is the default), and the body."""
    header = request.headers.get("content-type", kinds[0])
    kind = header.partition(";")[0].strip().lower()
    if kind not in kinds:
        raise Refusal("unsupported_media_type", f"{kind} is not understood here; send {' or '.join(kinds)}")
    return kind, await request.body()


class BodyLimit:
    """Refuses a body that is larger than allowed, before it is parsed. Artifact files stream past it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"] == "PUT" and "/files/" in scope["path"]):
            await self.app(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self.max_bytes:
                    # Not a Refusal: FastAPI turns any other exception while it reads a body into "unparsable".
                    raise HTTPException(413, f"a body has at most {self.max_bytes} bytes")
            return message

        await self.app(scope, limited, send)
