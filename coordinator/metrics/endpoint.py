"""`GET /metrics`: who may read it, and in which of Prometheus' formats."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import cast

from fastapi.security import HTTPBearer
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.errors import Refusal, is_connection_fault
from coordinator.operations.access import hash_token, identify
from coordinator.operations.numbers import Numbers

CHECK_SECONDS = 30.0
"""A token is looked up again after this time; a revoked one is good for so long."""
PATIENCE_SECONDS = 3.0
MOST_TOKENS = 16

_bearer = HTTPBearer(auto_error=False)


class Readers:
    """Tokens that were good when they were looked up last. While the database is away they stay so: that is when the
    metrics are needed."""

    def __init__(self) -> None:
        self._good: OrderedDict[bytes, float] = OrderedDict()

    async def check(self, request: Request) -> None:
        """Refuses who has no token; any role may read, bound to no run."""
        credentials = await _bearer(request)
        digest = hash_token(credentials.credentials) if credentials else b""
        checked_at = self._good.get(digest)
        if checked_at is not None and time.monotonic() - checked_at < CHECK_SECONDS:
            return
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                caller = await identify(request, credentials)
        except Refusal:
            self._good.pop(digest, None)
            raise
        except Exception as error:
            if checked_at is not None and is_connection_fault(error):
                return
            raise
        if caller.run_id is not None:
            raise Refusal("forbidden", f"the token is bound to run {caller.run_id}, and metrics are of all runs")
        self._good[digest] = time.monotonic()
        while len(self._good) > MOST_TOKENS:
            self._good.popitem(last=False)


def metrics_route(readers: Readers | None) -> Route:
    """The address; without `readers` it is open to all."""

    async def metrics(request: Request) -> Response:
        if readers is not None:
            await readers.check(request)
        numbers = cast(Numbers, request.app.state.numbers)
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(await asyncio.to_thread(encode, numbers.registry), headers={"Content-Type": media_type})

    return Route("/metrics", metrics, methods=["GET"], name="metrics", include_in_schema=False)
