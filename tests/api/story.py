"""Plays the story of the OpenAPI page against a live app. `python tests/api/story.py` records the answers anew."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute

from coordinator.app import create_app
from coordinator.openapi.story import STORY, VIEWER_TOKEN, Step
from coordinator.storage.database import connect
from coordinator.storage.migrations import upgrade
from coordinator.storage.postgres import EmbeddedPostgres
from coordinator.tokens import service as tokens
from coordinator.wire.tokens import CreateToken

ANSWERS = Path(__file__).parents[2] / "coordinator" / "openapi" / "answers.json"
TOKEN_IDS = {"gpu-0": "8c41f09d2e6a", "trainer": "d05b7723ce91", "verifier": "61e8aa9043bf", "page": VIEWER_TOKEN}
ADMIN_TOKEN_ID = "0b7d52e8a146"
SECRET = "shown-this-once-and-kept-nowhere-000000000000"
BEGIN = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)
SECONDS_A_STEP = 5
SENT = {datetime(2035, 12, 31, 23, 59, 59, tzinfo=UTC)}
"""Times that the story sends by itself, and gets back as they are."""

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)")

Send = Callable[..., Awaitable[httpx.Response]]


@dataclass
class Clock:
    """Gives every moment of a play a moment of the story: one step takes five seconds there."""

    begins: list[datetime] = field(default_factory=list)
    told: dict[datetime, str] = field(default_factory=dict)

    def step(self) -> None:
        self.begins.append(datetime.now(UTC))

    def tell(self, found: re.Match[str]) -> str:
        moment = datetime.fromisoformat(found[0])
        return found[0] if moment in SENT else self.of(moment)

    def seconds(self, live: float, end: datetime) -> float:
        """What the story tells of a span of so many seconds that ended then."""
        begin = end - timedelta(seconds=live)
        return (datetime.fromisoformat(self.of(end)) - datetime.fromisoformat(self.of(begin))).total_seconds()

    def of(self, moment: datetime) -> str:
        """The story's time of a moment."""
        if moment not in self.told:
            ahead = max(round((moment - datetime.now(UTC)).total_seconds()), 0)
            step = len(self.begins) if ahead else sum(begin <= moment for begin in self.begins)
            story = BEGIN + timedelta(seconds=SECONDS_A_STEP * step + ahead)
            self.told[moment] = story.isoformat().replace("+00:00", "Z")
        return self.told[moment]


@dataclass
class Player:
    """One play of the story. `answers` are as they would be recorded."""

    app: FastAPI
    send: Send
    admin_token: str
    clock: Clock = field(default_factory=Clock)
    secrets: dict[str, str] = field(default_factory=dict)
    live_ids: dict[str, str] = field(default_factory=dict)

    async def play(self) -> AsyncIterator[tuple[Step, httpx.Response, Any]]:
        """Every step, its answer, and what the story tells of the answer's body."""
        routes = {route.name: route for route in self.app.routes if isinstance(route, APIRoute)}
        for step in STORY:
            self.clock.step()
            response = await self.call(step, routes[step.operation])
            yield step, response, self.told(step, response)

    async def call(self, step: Step, route: APIRoute) -> httpx.Response:
        """Sends one step with the token of its role."""
        (method,) = route.methods
        path = route.path_format.format(
            **{name: self.live_ids.get(str(value), value) for name, value in step.path.items()}
        )
        headers = {}
        if step.role is not None:
            secret = self.admin_token if step.role == "admin" else self.secrets[step.role]
            headers["authorization"] = f"Bearer {secret}"
        body: dict[str, Any] = {}
        if step.file is not None:
            headers["content-type"] = "application/octet-stream"
            body = {"content": step.file.encode()}
        elif step.body is not None:
            body = {"json": step.body}
        return await self.send(method, path, headers=headers, params=dict(step.query), **body)

    def told(self, step: Step, response: httpx.Response) -> Any:
        """The answer's body with the story's times, token ids and secrets in place of the live ones."""
        if response.headers["content-type"] != "application/json":
            return self._told(response.text)
        body = response.json()
        if step.operation == "create_token" and response.status_code == 201:
            self.secrets[body["role"]] = body["token"]
            self.live_ids[TOKEN_IDS[body["name"]]] = body["token_id"]
        return self._told(body)

    def _told(self, value: Any) -> Any:
        if isinstance(value, dict):
            told = {name: self._told(inner) for name, inner in value.items()}
            if {"at", "seconds"} <= value.keys():
                told["seconds"] = self.clock.seconds(value["seconds"], datetime.fromisoformat(value["at"]))
            if "token_id" in value:
                told["token_id"] = TOKEN_IDS.get(value["name"], ADMIN_TOKEN_ID)
                # Written down a few seconds after the use, whenever that is: the story tells it of one token.
                revoked = value.get("revoked_at") is not None
                told["last_used_at"] = self.clock.of(self.clock.begins[-2]) if revoked else None
            if "token" in value:
                told["token"] = f"rct_{told['token_id']}_{SECRET}"
            return told
        if isinstance(value, list):
            return [self._told(inner) for inner in value]
        return TIME.sub(self.clock.tell, value) if isinstance(value, str) else value


async def _record(database_url: str, artifacts: Path) -> list[dict[str, Any]]:
    database = connect(database_url, pool_size=4)
    app = create_app(database, artifacts)
    async with app.router.lifespan_context(app):
        body = CreateToken.model_validate({"name": "admin", "role": "admin"})
        admin = await database.transaction(tokens.create, body)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://story") as http:
            answers = []
            async for step, response, body_told in Player(app, http.request, admin.token).play():
                assert response.is_success, f"{step.operation}, {step.title}: {response.text}"
                answers.append({"operation": step.operation, "status": response.status_code, "body": body_told})
            return answers


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="coordinator-story-"))
    folder.chmod(0o755)  # as root, Postgres runs as another user
    postgres = EmbeddedPostgres(folder / "postgres", progress=print)
    try:
        url = postgres.start()
        upgrade(url)
        recorded = asyncio.run(_record(url, folder / "artifacts"))
    finally:
        postgres.stop()
        shutil.rmtree(folder)
    ANSWERS.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
