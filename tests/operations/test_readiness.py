"""`/readyz` says yes only while a request could be served, and why when it says no; `/healthz` says yes regardless."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from coordinator.operations import readiness
from tests.api.ledger import Api, refused


async def ready(api: Api) -> httpx.Response:
    assert (await api.http.get("/healthz")).status_code == 200
    return await api.http.get("/readyz")


async def test_a_process_that_can_work_is_ready(api: Api) -> None:
    answer = await ready(api)
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


async def test_one_that_was_told_to_end_is_not(api: Api) -> None:
    api.app.state.readiness.ending = True
    answer = await ready(api)
    refused(answer, 503, "shutting_down")
    assert answer.headers["retry-after"] == "1"


async def test_another_schema_is_not(api: Api) -> None:
    async with api.database.engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    assert "0001" in refused(await ready(api), 503, "not_ready")["detail"]


async def test_a_crowd_that_asks_costs_as_much_as_one(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, release = 0, asyncio.Event()
    read = api.database.read

    async def slow(work: Any, *args: Any) -> Any:
        nonlocal asked
        asked += 1
        await release.wait()
        return await read(work, *args)

    monkeypatch.setattr(api.database, "read", slow)
    crowd = [asyncio.create_task(api.app.state.readiness.check()) for _ in range(20)]
    await asyncio.sleep(0)
    crowd[0].cancel()
    release.set()
    await asyncio.gather(*crowd[1:])
    assert asked == 1
    assert (await ready(api)).status_code == 200
    assert asked == 2


async def test_a_store_that_takes_no_file_is_not(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "artifacts").rename(tmp_path / "away")
    assert "No such file" in refused(await ready(api), 503, "not_ready")["detail"]
    (tmp_path / "away").rename(tmp_path / "artifacts")
    assert (await ready(api)).status_code == 200

    begun, release = threading.Semaphore(0), threading.Event()

    def hanging(_: Path) -> None:
        begun.release()
        release.wait()

    monkeypatch.setattr(readiness, "_write", hanging)
    monkeypatch.setattr(readiness, "PATIENCE_SECONDS", 0.2)
    try:
        for _ in range(3):
            assert "did not take a file" in refused(await ready(api), 503, "not_ready")["detail"]
        assert begun.acquire(blocking=False) and not begun.acquire(blocking=False)  # one thread, not three
    finally:
        release.set()
        await asyncio.sleep(0)


async def test_a_database_that_does_not_answer_is_not(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(readiness, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(readiness, "_revision", silent)
    refused(await ready(api), 503, "unavailable")
