"""The API as its callers use it: one HTTP client per role, and bodies made by hand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute
from sqlalchemy import text
from starlette.routing import Match

from coordinator.storage.database import Database
from coordinator.tokens import service as tokens
from coordinator.wire.problems import MEDIA_TYPE
from coordinator.wire.tokens import CreateToken

Json = dict[str, Any]
H = hashlib.sha256(b"x").hexdigest()
CONTRACT: Json = {
    "tokenizer_hash": H,
    "chat_template_hash": H,
    "temperature": 1.0,
    "top_p": 1.0,
    "logprobs_mode": "raw",
    "dtype": "float32",
}
BASE: Json = {"name": "tiny", "revision": "1", "sha256": H}
BEHAVIOR = -0.5


@dataclass
class Api:
    """The app, its database, and who calls."""

    app: FastAPI
    database: Database
    http: httpx.AsyncClient
    secrets: dict[str, str]

    async def token(self, name: str, role: str, run_id: str | None = None, worker_id: str | None = None) -> str:
        body = CreateToken.model_validate({"name": name, "role": role, "run_id": run_id, "worker_id": worker_id})
        created = await self.database.transaction(tokens.create, body)
        self.secrets[name] = created.token
        return created.token

    async def call(
        self, method: str, path: str, body: Any = None, *, who: str | None = "admin", **more: Any
    ) -> httpx.Response:
        headers = dict(more.pop("headers", {}))
        if who is not None:
            headers["authorization"] = f"Bearer {self.secrets.get(who, who)}"
        if body is not None:
            more["json"] = body
        response = await self.http.request(method, f"/v1{path}", headers=headers, **more)
        assert_documented(self.app, response)
        return response

    async def rows(self, statement: str, **parameters: Any) -> list[Any]:
        async with self.database.engine.connect() as connection:
            return list((await connection.execute(text(statement), parameters)).all())


def assert_documented(app: FastAPI, response: httpx.Response) -> None:
    """Whether the OpenAPI document has the answer's status for this call, and the code if it is a refusal."""
    scope = {"type": "http", "method": response.request.method, "path": unquote(response.request.url.path)}
    routes = (route for route in app.routes if isinstance(route, APIRoute) and route.matches(scope)[0] is Match.FULL)
    route = next(routes, None)
    if route is None:
        assert response.status_code in (404, 405), response.text
        return
    answers = app.openapi()["paths"][route.path_format][scope["method"].lower()]["responses"]
    answer = answers.get(str(response.status_code))
    assert answer is not None, f"{route.name} does not document {response.status_code}: {response.text}"
    if response.status_code >= 400:
        code = response.json()["code"]
        assert code in answer["content"][MEDIA_TYPE]["examples"], f"{route.name} does not document {code}"


def ok(response: httpx.Response) -> Json:
    """The body of a good answer."""
    assert response.status_code in (200, 201), response.text
    body: Json = response.json()
    return body


def refused(response: httpx.Response, status: int, code: str) -> Json:
    """The problem document of a refusal of this kind."""
    assert (response.status_code, response.json().get("code")) == (status, code), response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: Json = response.json()
    assert document["detail"]
    assert document["next_step"]
    assert document["status"] == status
    return document


class Ledger:
    """One run and short words for what its people do."""

    def __init__(self, api: Api, run_id: str, view: Json) -> None:
        self.api = api
        self.run_id = run_id
        self.view = view
        self.hashes: dict[int, str] = {view["active"]["version"]: view["active"]["artifact_hash"]}

    @classmethod
    async def create(cls, api: Api, run_id: str = "run", **settings: Any) -> Ledger:
        body = {
            "run_id": run_id,
            "settings": {"group_size": 2} | settings,
            "contract": CONTRACT,
            "vocab_size": 100,
            "policy": {"version": 0, "base_model": BASE},
        }
        return cls(api, run_id, ok(await api.call("POST", "/runs", body)))

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return await self.api.call(method, f"/runs/{self.run_id}{path}", body, **more)

    async def get(self, path: str) -> Json:
        return ok(await self.call("GET", path))

    async def worker(self, worker_id: str = "w", incarnation: str | None = None, *, ack: bool = True) -> str:
        incarnation = incarnation or f"{worker_id}-1"
        body = {"incarnation": incarnation, "engine": "hand", "engine_version": "1"}
        ok(await self.call("PUT", f"/workers/{worker_id}", body))
        if ack:
            active = (await self.get(""))["active"]
            assert (await self.ack(worker_id, active["version"], incarnation=incarnation))["matching"]
        return incarnation

    async def ack(
        self,
        worker_id: str,
        version: int,
        artifact_hash: str | None = None,
        incarnation: str | None = None,
        **more: Any,
    ) -> Json:
        body = {
            "incarnation": incarnation or f"{worker_id}-1",
            "version": version,
            "artifact_hash": artifact_hash or self.hashes[version],
        }
        return ok(await self.call("POST", f"/workers/{worker_id}/acks", body | more))

    def rollout(self, rollout_id: str, group: str = "g", index: int = 0, version: int = 0, **changes: Any) -> Json:
        """Six tokens, the last three of them actions."""
        return {
            "rollout_id": rollout_id,
            "task_id": "task",
            "task_source": "hand",
            "group_id": group,
            "sample_index": index,
            "spans": [{"version": version, "artifact_hash": self.hashes.get(version, H), "start": 0, "end": 6}],
            "span_source": "dispatch",
            "worker_id": "w",
            "incarnation": "w-1",
            "contract": CONTRACT,
            "token_ids": [1, 2, 3, 4, 5, 6],
            "action_mask": [False, False, False, True, True, True],
            "behavior_log_probs": [None, None, None, BEHAVIOR, BEHAVIOR, BEHAVIOR],
        } | changes

    async def submit(self, *rollouts: Json) -> list[Json]:
        verdicts: list[Json] = ok(await self.call("POST", "/rollouts", {"rollouts": rollouts}))["verdicts"]
        return verdicts

    async def reward(self, rollout_id: str, value: float | None = 1.0, **changes: Any) -> Json:
        item = {"rollout_id": rollout_id, "status": "ok", "value": value, "ruleset_id": "rules", "ruleset_hash": H}
        item |= changes
        verdict: Json = ok(await self.call("POST", "/rewards", {"rewards": [item]}))["verdicts"][0]
        return verdict

    async def group(self, name: str, version: int = 0, size: int = 2, **changes: Any) -> list[str]:
        """A whole rewarded group; answers its rollout ids."""
        ids = [f"{name}:{i}" for i in range(size)]
        verdicts = await self.submit(*(self.rollout(r, name, i, version, **changes) for i, r in enumerate(ids)))
        assert {(v["verdict"], v["state"]) for v in verdicts} == {("accepted", "generated")}, verdicts
        for i, rollout_id in enumerate(ids):
            assert (await self.reward(rollout_id, float(i)))["verdict"] == "stored"
        return ids

    async def open(self, update_id: str = "u", version: int = 0, owner: str = "t-1", **more: Any) -> httpx.Response:
        body = {"owner": owner, "policy_version": version, "artifact_hash": self.hashes[version]}
        return await self.call("PUT", f"/updates/{update_id}", body | more)

    async def candidates(self, update_id: str = "u", groups: int = 8, owner: str = "t-1", wait: float = 0) -> Json:
        body = {"owner": owner, "groups": groups, "wait_seconds": wait}
        return ok(await self.call("POST", f"/updates/{update_id}/candidates", body))

    async def try_reserve(
        self,
        *rollouts: str | tuple[str, int],
        update: str = "u",
        owner: str = "t-1",
        shift: float = 0.0,
        after: int = 0,
        **more: Any,
    ) -> httpx.Response:
        """Reserves these at revision 1, or at the one that is named, with every log-prob moved by `shift`."""
        named = [r if isinstance(r, tuple) else (r, 1) for r in rollouts]
        body = {
            "owner": owner,
            "after_commit_no": after,
            "rollouts": [
                {
                    "rollout_id": rollout_id,
                    "revision": revision,
                    "current_log_probs": [None, None, None, *[BEHAVIOR + shift] * 3],
                }
                for rollout_id, revision in named
            ],
        }
        return await self.call("POST", f"/updates/{update}/reserve", body | more)

    async def reserve(self, *rollouts: str | tuple[str, int], **more: Any) -> list[str]:
        return [v["verdict"] for v in ok(await self.try_reserve(*rollouts, **more))["verdicts"]]

    async def commit(self, update: str = "u", after: int = 0, owner: str = "t-1", **more: Any) -> httpx.Response:
        return await self.call("POST", f"/updates/{update}/commit", {"owner": owner, "after_commit_no": after} | more)

    async def state(self, rollout_id: str) -> tuple[str, str | None, int]:
        view = await self.get(f"/rollouts/{rollout_id}")
        return view["state"], view["reason"], view["revision"]

    async def prepare(self, version: int, parent: int | None, content: bytes = b"w", **more: Any) -> httpx.Response:
        file = {"name": "a/w.bin", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        body = {"version": version, "parent_version": parent, "base_model": BASE, "files": [file]}
        response = await self.call("POST", "/policies", body | more)
        if response.status_code in (200, 201):
            self.hashes[version] = response.json()["artifact_hash"]
        return response

    async def versions(self) -> dict[int, str]:
        """Every policy version with its state."""
        return {policy["version"]: policy["state"] for policy in (await self.get("/policies"))["policies"]}

    async def upload(self, version: int, content: bytes = b"w", name: str = "a/w.bin") -> httpx.Response:
        return await self.call("PUT", f"/policies/{version}/files/{name}", content=content)

    async def publish(self, version: int, parent: int, content: bytes | None = None) -> None:
        content = content if content is not None else f"weights {version}".encode()
        ok(await self.prepare(version, parent, content))
        ok(await self.upload(version, content))
        ok(await self.call("POST", f"/policies/{version}/commit"))

    async def activation(self, version: int, activation_id: str | None = None, **more: Any) -> httpx.Response:
        body = {"activation_id": activation_id or f"act-{version}"} | more
        return await self.call("POST", f"/policies/{version}/activations", body)

    async def activate(self, version: int, parent: int, *workers: str) -> None:
        await self.publish(version, parent)
        ok(await self.activation(version))
        for worker in workers or ("w",):
            await self.ack(worker, version)
        assert (await self.get(""))["active"]["version"] == version
