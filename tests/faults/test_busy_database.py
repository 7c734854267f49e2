"""A database that is too busy is a reason to try again, never an internal error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import asyncpg
import httpx
import pytest
from sqlalchemy import Connection, event
from sqlalchemy.exc import TimeoutError as PoolTimeout

from coordinator.app import create_app
from coordinator.errors import is_connection_fault
from coordinator.storage.database import connect
from coordinator.tokens import service as tokens
from coordinator.wire.tokens import CreateToken
from tests.api.ledger import Api, Ledger, refused


@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout"])
async def test_a_lock_that_is_not_had_in_time_is_answered_503(database_url: str, tmp_path: Path, setting: str) -> None:
    database = connect(database_url, pool_size=2)

    @event.listens_for(database.engine.sync_engine, "begin")
    def hurry(connection: Connection) -> None:
        connection.exec_driver_sql(f"SET LOCAL {setting} = '300ms'")

    app = create_app(database, tmp_path / "artifacts")
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http,
    ):
        api = Api(app, database, http, {})
        created = await database.transaction(tokens.create, CreateToken(name="admin", role="admin"))
        api.secrets["admin"] = created.token
        ledger = await Ledger.create(api)
        other = await asyncpg.connect(database_url.replace("+asyncpg", ""))
        try:
            async with other.transaction():
                await other.execute("SELECT FROM runs FOR UPDATE")
                answer = await ledger.open()
                refused(answer, 503, "unavailable")
                assert answer.headers["retry-after"] == "1"
        finally:
            await other.close()
        assert (await ledger.open()).status_code == 201


@pytest.mark.parametrize("make", [PoolTimeout, asyncpg.CannotConnectNowError, asyncpg.TooManyConnectionsError])
def test_what_comes_unwrapped_while_connecting_is_a_connection_fault(make: Callable[[str], Exception]) -> None:
    assert is_connection_fault(make("not now"))
