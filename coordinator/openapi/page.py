"""The page /docs, whole from this server: where nothing leads out of the machine it works as well as anywhere."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from starlette.requests import Request
from starlette.responses import Response

# Swagger UI as the package fastapi-offline carries it. Its own app is not used: it would add its pages to the API.
ASSETS = Path(str(files("fastapi_offline"))) / "static"

# A browser that keeps to this asks no other host for anything, whatever the scripts would like.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "style-src 'self' 'unsafe-inline'",
        "script-src 'self' 'unsafe-inline'",  # FastAPI writes the call that starts the page into it
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


def install(app: FastAPI) -> None:
    """Adds /docs and its assets. Addresses are relative, so that the page works below a proxy's prefix too."""

    async def docs(_: Request) -> Response:
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url="docs/assets/swagger-ui-bundle.js",
            swagger_css_url="docs/assets/swagger-ui.css",
            swagger_favicon_url="docs/assets/favicon.png",
            swagger_ui_parameters={"validatorUrl": None},  # else it asks swagger.io what it thinks of the document
        )
        page.headers["Content-Security-Policy"] = POLICY
        return page

    app.add_route("/docs", docs, include_in_schema=False)
    app.mount("/docs/assets", StaticFiles(directory=ASSETS))
