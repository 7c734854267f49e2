"""Who may do what: the table in docs/roles.md, held against the app, call by call and token by token."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from fastapi.routing import APIRoute

from coordinator.wire.tokens import CreateToken, Role
from tests.api.ledger import Api, Ledger, ok, refused
from tests.docs.pages import CALLERS, PAGES

ROLES: tuple[Role, ...] = get_args(Role)
OPEN_TO_ALL = {"GET /healthz", "GET /readyz"}
"""Calls that ask for no token. There is a reason for each, so that none joins them by mistake."""


def table() -> dict[str, dict[str, str]]:
    """What the page says of each call, by who makes it."""
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in PAGES["access"].read_text(encoding="utf-8").splitlines()
        if re.match(r"\| `[A-Z]+ /", line)
    ]
    return {call: dict(zip(CALLERS, cells, strict=True)) for call, *cells in rows}


TABLE = table()


def filled(call: str, document: dict[str, Any]) -> tuple[str, str]:
    """A method and an address with something in each place, of the run `run` and of the worker `w`."""
    method, path = call.split()
    for parameter in document["paths"][path][method.lower()].get("parameters", ()):
        name = parameter["name"]
        known = {"run_id": "run", "worker_id": "w"}
        value = known.get(name, "0" if parameter["schema"].get("type") == "integer" else "a")
        path = path.replace("{" + name + "}", value)
    assert "{" not in path, path
    return method, path + ("?wait_seconds=0" if path.endswith("/stream") else "")


async def answered(api: Api, call: tuple[str, str], token: str | None) -> tuple[int, str | None]:
    """Status and code of a call that sends nothing but a token. Who is let pass is refused for its shape, or served."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    response = await api.http.request(*call, headers=headers)
    refusal = response.headers["content-type"] == "application/problem+json"
    return response.status_code, response.json()["code"] if refusal else None


def let_pass(answer: tuple[int, str | None]) -> bool:
    assert answer[0] not in (401, 403) or answer in ((401, "unauthenticated"), (403, "forbidden"))
    return answer[0] not in (401, 403)


def test_the_table_has_every_call(api: Api) -> None:
    routes = {
        f"{method} {route.path_format}"
        for route in api.app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert routes == TABLE.keys()
    assert {call for call, who in TABLE.items() if who["no token"] == "yes"} == OPEN_TO_ALL
    for call, who in TABLE.items():
        assert set(who.values()) <= {"yes", "no", "run", "own id"}, call
        assert who["admin"] == "yes", call


async def test_nobody_passes_without_a_valid_token(api: Api) -> None:
    await Ledger.create(api)
    good = ok(await api.call("POST", "/tokens", {"name": "good", "role": "admin"}))
    ok(await api.call("DELETE", f"/tokens/{good['token_id']}"))
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    late = ok(await api.call("POST", "/tokens", {"name": "late", "role": "admin", "expires_at": past}))
    token_id = api.secrets["admin"].split("_")[1]
    tokens = {
        "none": None,
        "revoked": good["token"],
        "expired": late["token"],
        "unknown": "rct_0123456789ab_wrong",
        "of another secret": f"rct_{token_id}_wrong",
        "of no form": "let me in",
    }
    for call, who in TABLE.items():
        where = filled(call, api.app.openapi())
        for kind, token in tokens.items():
            answer = await answered(api, where, token)
            assert let_pass(answer) == (who["no token"] == "yes"), (call, kind, answer)
            assert let_pass(answer) or answer == (401, "unauthenticated"), (call, kind, answer)


async def test_every_call_for_every_role_is_as_the_table_says(api: Api) -> None:
    await Ledger.create(api)
    await Ledger.create(api, "other")
    for role in ROLES:
        if role != "admin":
            mine = "w" if role == "worker" else None
            await api.token(role, role, "run", mine)
            await api.token(f"{role}-of-every-run", role, None, mine)
            await api.token(f"{role}-of-another-run", role, "other", mine)
    await api.token("worker-of-another-id", "worker", "run", "v")
    for call, who in TABLE.items():
        where = filled(call, api.app.openapi())
        for role in ROLES:
            cell = who[role]
            expected = {role: cell != "no"}
            if role != "admin":
                expected[f"{role}-of-every-run"] = cell != "no"
                expected[f"{role}-of-another-run"] = cell == "yes"
            if role == "worker":
                expected["worker-of-another-id"] = cell in ("yes", "run")
            for name, passes in expected.items():
                answer = await answered(api, where, api.secrets[name])
                assert let_pass(answer) == passes, (call, name, cell, answer)
                assert passes or answer == (403, "forbidden"), (call, name, answer)


async def test_nobody_has_a_body_read_for_a_call_that_he_may_not_make(api: Api) -> None:
    """A large body takes many times its size to parse: that is for those who may send it."""
    await Ledger.create(api)
    await api.token("viewer", "viewer", "other")

    async def unread() -> AsyncIterator[bytes]:
        pytest.fail("the body was read")
        yield b""

    document = api.app.openapi()
    calls = [call for call in TABLE if "requestBody" in document["paths"][call.split()[1]][call.split()[0].lower()]]
    assert len(calls) > 20
    for call in calls:
        for token, code in ((None, 401), ("rct_0123456789ab_wrong", 401), (api.secrets["viewer"], 403)):
            headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
            method, path = filled(call, document)
            response = await api.http.request(method, path, headers=headers, content=unread())
            assert response.status_code == code, (call, token, response.text)


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
