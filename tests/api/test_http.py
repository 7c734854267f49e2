"""HTTP itself: addresses, methods, content types and ranges are refused by problem documents too."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tests.api.ledger import Api, Ledger, ok, refused

HEARTBEAT = "/workers/w/heartbeat"


@pytest.mark.parametrize("method", ["DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"])
async def test_a_method_that_an_address_does_not_take(api: Api, method: str) -> None:
    for path, methods in (("/runs", "GET, POST"), ("/runs/r", "GET"), ("/runs/r/updates/u", "GET, PUT")):
        response = await api.call(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, methods), (method, path)
        if method != "HEAD":
            refused(response, 405, "method_not_allowed")


@pytest.mark.parametrize("path", ["", "/run", "/runs/", "/runs//updates", "/runs/r/nothing", "/tokens/a/b", "/%00"])
async def test_an_address_that_is_not_there(api: Api, path: str) -> None:
    refused(await api.call("GET", path), 404, "not_found")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "json", ";"])
async def test_a_body_of_another_content_type(ledger: Ledger, kind: str) -> None:
    for path, body in ((HEARTBEAT, {"incarnation": "w-1"}), ("/rollouts", {"rollouts": [ledger.rollout("r")]})):
        content = json.dumps(body).encode()
        refused(
            await ledger.call("POST", path, content=content, headers={"content-type": kind}),
            415,
            "unsupported_media_type",
        )


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/json; charset=utf-8"}])
async def test_json_is_what_a_body_without_a_content_type_is(ledger: Ledger, headers: dict[str, str]) -> None:
    ok(await ledger.call("POST", HEARTBEAT, content=b'{"incarnation": "w-1"}', headers=headers))
    content = json.dumps({"rollouts": [ledger.rollout("r")]}).encode()
    ok(await ledger.call("POST", "/rollouts", content=content, headers=headers))


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/runs/a%00b", "run_id"),
        ("/runs/-a", "run_id"),
        ("/runs/" + "r" * 101, "run_id"),
        ("/runs/run/rollouts/a%20b", "rollout_id"),
        ("/runs/run/rollouts/" + "r" * 201, "rollout_id"),
        ("/runs/run/updates/%E2%82%AC", "update_id"),
        ("/runs/run/policies/2147483648", "version"),
        ("/runs/run/policies/0/files/a%00b", "name"),
        ("/runs/run/policies/0/files/a%5Cb", "name"),
        ("/runs/run/policies/0/files/a//b", "name"),
        ("/runs/run/rollouts?group_id=a%00b", "group_id"),
        ("/runs/run/rollouts?reason=a%00b", "reason"),
        ("/runs/run/rollouts?after=%00", "after"),
        ("/runs/run/rollouts?version=4294967296", "version"),
        ("/runs/run/rollouts?arrived_from=5", "arrived_from"),
        ("/runs/run/rollouts?arrived_from=2030-01-01T00:00:00", "arrived_from"),
        ("/runs/run/audit?at_before=1e9", "at_before"),
        ("/runs/run/audit?after=nowhere", "after"),
        ("/runs/run/lineage?version=0&ruleset_hash=x", "ruleset_hash"),
        ("/runs/run/journal?after=9223372036854775808", "after"),
    ],
)
async def test_what_no_id_filter_or_cursor_can_be(ledger: Ledger, path: str, field: str) -> None:
    assert refused(await ledger.api.call("GET", path), 422, "invalid_request")["field"] == field


async def test_a_download_goes_on_where_it_was_cut_off(ledger: Ledger) -> None:
    content = b"0123456789"
    ok(await ledger.prepare(1, 0, content))
    ok(await ledger.upload(1, content))

    async def get(**headers: str) -> Any:
        return await ledger.call("GET", "/policies/1/files/a/w.bin", headers=headers)

    etag = f'"{hashlib.sha256(content).hexdigest()}"'
    for wanted, part, where in (
        ("bytes=4-", b"456789", "4-9"),
        ("bytes=0-0", b"0", "0-0"),
        ("bytes=8-99", b"89", "8-9"),
    ):
        answer = await get(range=wanted)
        assert (answer.status_code, answer.content) == (206, part)
        assert (answer.headers["content-range"], answer.headers["etag"]) == (f"bytes {where}/10", etag)
    for wanted in ("", "bytes", "bytes=", "bytes=x-", "bytes=5-2", "bytes=1-2,4-5", "bytes=-3", "lines=1-2"):
        answer = await get(range=wanted)
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (200, content, etag), wanted
    beyond = await get(range="bytes=10-")
    refused(beyond, 416, "range_not_satisfiable")
    assert beyond.headers["content-range"] == "bytes */10"
    changed = await get(range="bytes=4-", **{"if-range": '"another"'})
    assert (changed.status_code, changed.content) == (200, content)
