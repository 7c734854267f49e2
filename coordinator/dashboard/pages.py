"""Serves the dashboard under /dashboard: one page, its modules and styles, and the libraries that it stands on.

There is no build step. What is served are the files of `static`, as they are; everything that the page shows comes from
`/v1` with the token that somebody signed in with. Addresses are relative, so that it works below a proxy's prefix too.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(str(files("coordinator.dashboard"))) / "static"

# Nothing from another host, nothing inline: what came from outside can be text on the page and nothing else.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
YEAR = "public, max-age=31536000, immutable"
ASK_FIRST = "no-cache"
"""A browser may keep the file, and asks each time whether it is still the same: a new release is seen at once."""


class Assets(StaticFiles):
    """Files with the headers of the dashboard. What has its version in its address never changes."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file, or 304 where the browser has it already."""
        response = await super().get_response(path, scope)
        for name, value in HEADERS.items():
            response.headers[name] = value
        response.headers["Cache-Control"] = YEAR if path.startswith("vendor/") else ASK_FIRST
        return response


def install(app: FastAPI) -> None:
    """Adds the dashboard, and leads whoever opens the bare address to it."""

    async def to_dashboard(_: Request) -> Response:
        return RedirectResponse("dashboard/", status_code=307)

    app.add_route("/", to_dashboard, include_in_schema=False)
    app.add_route("/dashboard", to_dashboard, include_in_schema=False)
    app.mount("/dashboard", Assets(directory=STATIC, html=True))
