"""A door in front of a real vLLM server that lets through what an older or plainer one would have."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Change = Callable[[str, dict[str, Any]], dict[str, Any] | None]


@contextmanager
def in_front_of(url: str, hidden: tuple[str, ...] = (), change: Change = lambda path, body: body) -> Iterator[str]:
    """The address of the door. Paths in `hidden` are 404; `change` may replace a request's body, None: it is answered
    with success and goes no further."""

    async def forward(request: Request) -> Response:
        path = request.url.path
        if path in hidden:
            return Response("not found", 404)
        content = await request.body()
        if request.method == "POST" and content:
            body = change(path, json.loads(content))
            if body is None:
                return Response("Success")
            content = json.dumps(body).encode()
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            query = request.url.query
            answer = await client.request(
                request.method,
                f"{url}{path}" + (f"?{query}" if query else ""),
                content=content,
                headers={"content-type": "application/json"},
            )
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
