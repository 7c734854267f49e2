"""Who may do what, read off the app's own routes, so that a new endpoint is walked too."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from coordinator.operations.access import Allow
from coordinator.wire.tokens import CreateToken, Role
from tests.api.ledger import Api, Ledger, ok, refused

ROLES: tuple[Role, ...] = get_args(Role)
OPEN_TO_ALL = {"/healthz", "/readyz"}


def endpoints(app: FastAPI) -> Iterator[tuple[str, str, frozenset[Role]]]:
    """Every method and path of the API with the roles that its `Allow` names."""
    for route in app.routes:
        if not isinstance(route, APIRoute) or route.path in OPEN_TO_ALL:
            continue
        roles = [guard.roles for guard in guards(route.dependant)]
        assert len(roles) == 1, f"{route.path} states its roles {len(roles)} times"
        for method in route.methods:
            yield method, route.path, roles[0]


def guards(dependant: Dependant) -> Iterator[Allow]:
    for inner in dependant.dependencies:
        if isinstance(inner.call, Allow):
            yield inner.call
        yield from guards(inner)


def filled(path: str) -> str:
    values = {
        "run_id": "run", "worker_id": "w", "version": "0", "name:path": "a", "rollout_id": "r", "update_id": "u",
        "activation_id": "a", "token_id": "t", "rewind_id": "r", "rollback_id": "r",
    }  # fmt: skip
    for name, value in values.items():
        path = path.replace("{" + name + "}", value)
    assert "{" not in path, path
    return path.removeprefix("/v1") + ("?wait_seconds=0" if path.endswith("/stream") else "")


async def test_every_endpoint_for_every_role(api: Api) -> None:
    await Ledger.create(api)
    for role in ROLES:
        if role != "admin":
            await api.token(role, role, "run", "w" if role == "worker" else None)
    walked = 0
    for method, path, roles in endpoints(api.app):
        where = filled(path)
        refused(await api.call(method, where, who=None), 401, "unauthenticated")
        refused(await api.call(method, where, who="rct_0123456789ab_wrong"), 401, "unauthenticated")
        assert "admin" in roles
        for role in ROLES:
            response = await api.call(method, where, who=role)
            if role in roles:
                assert response.status_code not in (401, 403), (method, path, role, response.text)
            else:
                refused(response, 403, "forbidden")
            walked += 1
    assert walked >= 35 * len(ROLES)


async def test_a_bound_token_is_refused_by_every_endpoint_of_another_run_or_worker(api: Api) -> None:
    await Ledger.create(api)
    await Ledger.create(api, "other")
    for role in ROLES:
        if role != "admin":
            await api.token(f"elsewhere-{role}", role, "other", "w" if role == "worker" else None)
    await api.token("neighbour", "worker", "run", "v")
    walked = 0
    for method, path, roles in endpoints(api.app):
        if "{run_id}" in path:
            for role in roles - {"admin"}:
                refused(await api.call(method, filled(path), who=f"elsewhere-{role}"), 403, "forbidden")
                walked += 1
        if "{worker_id}" in path and "worker" in roles:
            refused(await api.call(method, filled(path), who="neighbour"), 403, "forbidden")
            walked += 1
    assert walked >= 60


async def test_bound_tokens_stay_in_their_run_and_with_their_worker(ledger: Ledger) -> None:
    api = ledger.api
    await Ledger.create(api, "other")
    await api.token("trainer", "trainer", "run")
    await api.token("worker", "worker", "run", "w")
    refused(await api.call("GET", "/runs/other", who="trainer"), 403, "forbidden")
    assert [r["run_id"] for r in ok(await api.call("GET", "/runs", who="trainer"))["runs"]] == ["run"]
    body = {"incarnation": "w-1"}
    ok(await api.call("POST", "/runs/run/workers/w/heartbeat", body, who="worker"))
    refused(await api.call("POST", "/runs/run/workers/v/heartbeat", body, who="worker"), 403, "forbidden")
    foreign = ledger.rollout("r", worker_id="v")
    answer = ok(await api.call("POST", "/runs/run/rollouts", {"rollouts": [foreign]}, who="worker"))
    assert (answer["verdicts"][0]["verdict"], answer["verdicts"][0]["reason"]) == ("rejected", "wrong_worker")


async def test_the_audit_says_who(ledger: Ledger) -> None:
    await ledger.api.token("gpu-7", "worker", "run", "w")
    await ledger.call("POST", "/rollouts", {"rollouts": [ledger.rollout("r")]}, who="gpu-7")
    assert (await ledger.get("/rollouts/r/history"))["transitions"][0]["actor"] == "worker:gpu-7"


async def test_expired_and_revoked_tokens_are_refused(api: Api) -> None:
    created = ok(await api.call("POST", "/tokens", {"name": "a", "role": "viewer"}))
    ok(await api.call("GET", "/runs", who=created["token"]))
    ok(await api.call("DELETE", f"/tokens/{created['token_id']}"))
    refused(await api.call("GET", "/runs", who=created["token"]), 401, "unauthenticated")
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    late = ok(await api.call("POST", "/tokens", {"name": "b", "role": "viewer", "expires_at": past}))
    refused(await api.call("GET", "/runs", who=late["token"]), 401, "unauthenticated")
    refused(await api.call("POST", "/tokens", {"name": "b", "role": "viewer"}), 409, "token_conflict")
    refused(await api.call("DELETE", "/tokens/none"), 404, "token_unknown")


async def test_no_secret_is_stored(api: Api) -> None:
    rows = await api.rows("SELECT row_to_json(t)::text AS row FROM tokens t")
    secret = api.secrets["admin"].split("_", 2)[2]
    assert rows
    assert not any(secret in row.row for row in rows)


@pytest.mark.parametrize(
    "body",
    [
        {"name": "a", "role": "worker"},
        {"name": "a", "role": "trainer", "worker_id": "w"},
        {"name": "a", "role": "admin", "run_id": "run"},
        {"name": "a", "role": "owner"},
        {"name": "a", "role": "viewer", "expires_at": "2030-01-01T00:00:00"},
    ],
)
async def test_tokens_that_make_no_sense_are_refused(api: Api, body: dict[str, str]) -> None:
    refused(await api.call("POST", "/tokens", body), 422, "invalid_request")
    with pytest.raises(ValueError, match=r"."):
        CreateToken.model_validate(body)
