"""The real app over a real Postgres, its lifespan running, called over ASGI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from coordinator.app import create_app
from coordinator.storage.database import connect
from tests.api.ledger import Api, Json, Ledger


@pytest.fixture(scope="session")
def whole_document(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """The OpenAPI document, the same for every app: to make it takes longer than most tests do."""
    nowhere = connect("postgresql://nobody@127.0.0.1:1/none", pool_size=1)
    return create_app(nowhere, tmp_path_factory.mktemp("document")).openapi()


@pytest.fixture
async def api(database_url: str, tmp_path: Path, whole_document: Json) -> AsyncIterator[Api]:
    database = connect(database_url, pool_size=8)
    app = create_app(database, tmp_path / "artifacts", max_body_bytes=2**20)
    app.openapi_schema = whole_document
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as http:
            api = Api(app, database, http, {})
            await api.token("admin", "admin")
            yield api


@pytest.fixture
async def ledger(api: Api) -> Ledger:
    """A run with groups of two and one worker `w` that confirmed version 0."""
    ledger = await Ledger.create(api)
    await ledger.worker()
    return ledger
