"""The app behind a real socket, since an answer that goes on cannot be had without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.api.ledger import Api, Ledger
from tests.watching.serving import serving


@pytest.fixture
async def api(database_url: str, tmp_path: Path) -> AsyncIterator[Api]:
    async with (
        serving(database_url, tmp_path / "artifacts") as served,
        httpx.AsyncClient(base_url=served.url, timeout=30, trust_env=False) as http,
    ):
        api = Api(served.app, served.database, http, {})
        await api.token("admin", "admin")
        yield api


@pytest.fixture
async def ledger(api: Api) -> Ledger:
    """A run with groups of two and one worker `w` that confirmed version 0."""
    ledger = await Ledger.create(api)
    await ledger.worker()
    return ledger
