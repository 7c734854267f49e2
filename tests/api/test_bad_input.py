"""Bad input gets a clear refusal with a stable code, never a 5xx, and changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
from sqlalchemy import text

from coordinator.wire.columns import ARROW_MEDIA_TYPE
from tests.api.ledger import Ledger, ok, refused

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"{}", b'{"rollouts": []}', b'{"rollouts": {}}', b'{"rollouts": "x"}', b"\xff\xfe",
        b"[" * 100_000, b'{"rollouts": ' + b"[" * 100_000, b'{"rollouts": [' + b'{"a":' * 50_000,
    ],
)  # fmt: skip
async def test_a_body_that_is_no_batch(ledger: Ledger, body: bytes) -> None:
    refused(await ledger.call("POST", "/rollouts", content=body, headers=JSON), 422, "invalid_request")


async def test_a_body_that_is_no_json_is_named_as_the_body(ledger: Ledger) -> None:
    ok(await ledger.open())
    ids = {
        "run_id": ledger.run_id,
        "update_id": "u",
        "worker_id": "w",
        "version": "1",
        "rewind_id": "r",
        "rollback_id": "r",
    }
    seen = 0
    for path, item in ledger.api.app.openapi()["paths"].items():
        for method, operation in item.items():
            if "application/json" not in operation.get("requestBody", {}).get("content", {}):
                continue
            address = re.sub(r"{(\w+)}", lambda name: ids.get(name[1], "x"), path).removeprefix("/v1")
            for body in (b"", b'{"rollouts": tru}', b'{"a": 1', b"\xff\xfe"):
                response = await ledger.api.call(method.upper(), address, content=body, headers=JSON)
                told = refused(response, 422, "invalid_request")
                assert (told["field"], told["detail"][:6]) == ("body", "body: "), (path, body, told)
                seen += 1
    assert seen > 60


async def test_a_field_beside_the_batch(ledger: Ledger) -> None:
    for rollout in (ledger.rollout("r"), {}):
        body = {"rollouts": [rollout], "rollout": {}}
        refused(await ledger.call("POST", "/rollouts", body), 422, "invalid_request")


@pytest.mark.parametrize("item", [None, 1, "x", [], {}, {"rollout_id": {}}, {"rollout_id": "r", "token_ids": "x"}])
async def test_an_item_that_is_no_rollout(ledger: Ledger, item: Any) -> None:
    assert (await ledger.submit(item))[0]["verdict"] == "rejected"


async def test_half_a_surrogate_pair_costs_no_more_than_its_call(ledger: Ledger) -> None:
    for body in (b'{"rollouts": [{"rollout_id": "\\ud800"}]}', b'{"rollouts": [{"\\ud800": 1}]}'):
        response = await ledger.call("POST", "/rollouts", content=body, headers=JSON)
        assert response.status_code in (200, 422), response.text


async def test_components_whose_sum_is_too_large_are_rejected(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("r"))
    assert (await ledger.reward("r", None, components={"a": 1.7e308, "b": 1.7e308}))["verdict"] == "rejected"


@pytest.mark.parametrize("path", ["/rollouts", "/updates/u/reserve"])
async def test_arrow_that_is_none(ledger: Ledger, path: str) -> None:
    ok(await ledger.open())
    headers = {"content-type": ARROW_MEDIA_TYPE}
    for content in (b"", b"ARROW1", b"\xff\xff\xff\xff" * 8, b"\x00" * 64):
        refused(await ledger.call("POST", path, content=content, headers=headers), 422, "invalid_arrow")


async def test_content_type_and_size(ledger: Ledger) -> None:
    headers = {"content-type": "text/csv"}
    refused(await ledger.call("POST", "/rollouts", content=b"a,b", headers=headers), 415, "unsupported_media_type")
    refused(await ledger.call("POST", "/rollouts", content=b" " * (2**20 + 1), headers=JSON), 413, "too_large")
    refused(await ledger.call("POST", "/rewards", content=b" " * (2**20 + 1), headers=JSON), 413, "too_large")


async def test_a_nul_character_is_refused_wherever_it_stands(ledger: Ledger) -> None:
    ok(await ledger.open())
    await ledger.submit(ledger.rollout("r"))
    abort = {"owner": "t-1", "reason": "a\u0000b"}
    refused(await ledger.call("POST", "/updates/u/abort", abort), 422, "invalid_request")
    reward = {"rollout_id": "r", "status": "error", "ruleset_id": "x", "ruleset_hash": "0" * 64, "message": "\u0000"}
    refused(await ledger.call("POST", "/rewards", {"rewards": [reward]}), 422, "invalid_request")
    (verdict,) = await ledger.submit(ledger.rollout("s", "h", generation={"finish_reason": "\u0000"}))
    assert (verdict["verdict"], verdict["reason"]) == ("rejected", "invalid_field")
    refused(await ledger.call("GET", "/rollouts/%00"), 422, "invalid_request")
    refused(await ledger.call("GET", "/rollouts?group_id=%00"), 422, "invalid_request")
    assert (await ledger.get("/updates/u"))["state"] == "open"
    assert await ledger.state("r") == ("generated", None, 0)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/updates/u", {"owner": "o", "policy_version": 0, "artifact_hash": "x"}),
        ("PUT", "/updates/u", {"owner": "o", "policy_version": True, "artifact_hash": "0" * 64}),
        ("PUT", "/updates/u", {"owner": "o", "policy_version": 2**31, "artifact_hash": "0" * 64}),
        ("PUT", "/updates/u%20v", {"owner": "o", "policy_version": 0, "artifact_hash": "0" * 64}),
        ("PUT", "/workers/a%2Fb", {"incarnation": "i", "engine": "e", "engine_version": "1"}),
        ("PUT", "/workers/..", {"incarnation": "i", "engine": "e", "engine_version": "1"}),
        ("POST", "/rewards", {"rewards": []}),
        ("POST", "/rewards", {"rewards": [], "extra": 1}),
        ("POST", "/policies", {"version": 1}),
        ("GET", "/policies/-1", None),
        ("GET", "/policies/99999999999999999999", None),
        ("GET", "/journal?after=-1", None),
        ("GET", f"/journal?after={10**30}", None),
        ("GET", "/rollouts?limit=0", None),
        ("GET", "/rollouts?state=gone", None),
        ("GET", "/watch?wait_seconds=nan", None),
    ],
)
async def test_fields_and_paths_of_the_wrong_shape(ledger: Ledger, method: str, path: str, body: Any) -> None:
    events = len((await ledger.get("/journal"))["entries"])
    response = await ledger.call(method, path, body)
    assert response.status_code in (404, 405, 422), response.text
    refused(response, response.status_code, response.json()["code"])
    assert len((await ledger.get("/journal"))["entries"]) == events


async def test_a_fault_of_the_server_tells_nothing_of_its_inside(ledger: Ledger) -> None:
    """A table that is gone is a fault that no check foresees."""
    async with ledger.api.database.engine.begin() as connection:
        await connection.execute(text("DROP TABLE rewinds"))
    problem = refused(await ledger.call("GET", "/rewinds"), 500, "internal_error")
    assert "rewinds" not in str(problem)
    assert (await ledger.get(""))["run_id"] == "run"


async def test_what_is_not_there(ledger: Ledger) -> None:
    refused(await ledger.api.call("GET", "/runs/none"), 404, "run_unknown")
    refused(await ledger.call("GET", "/rollouts/none"), 404, "rollout_unknown")
    refused(await ledger.call("GET", "/rollouts/none/history"), 404, "rollout_unknown")
    refused(await ledger.call("GET", "/rollouts/none/evidence"), 404, "rollout_unknown")
    refused(await ledger.call("GET", "/updates/none"), 404, "update_unknown")
    refused(await ledger.call("GET", "/policies/7"), 404, "policy_version_unknown")
    refused(await ledger.call("GET", "/activations/none"), 404, "activation_unknown")
    refused(await ledger.call("POST", "/workers/none/heartbeat", {"incarnation": "x"}), 404, "worker_unknown")
    refused(await ledger.api.call("GET", "/nothing"), 404, "not_found")
    refused(await ledger.api.call("PATCH", "/runs"), 405, "method_not_allowed")


async def test_the_openapi_document_holds_together(ledger: Ledger) -> None:
    document = (await ledger.api.http.get("/openapi.json")).json()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str):
                target: Any = document
                for part in reference.removeprefix("#/").split("/"):
                    target = target[part]
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    names = []
    for path, operations in document["paths"].items():
        for operation in operations.values():
            names.append(operation["operationId"])
            assert operation.get("description"), path
            if path.startswith("/v1"):
                assert {"401", "403", "422"} <= operation["responses"].keys()
    assert len(names) == len(set(names))
