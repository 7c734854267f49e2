"""The whole OpenAPI document against the app: what it promises holds for requests that nobody would think of.

Every call gets the examples of its page, values at and beyond the edges of its schema, and derandomized random ones,
half of them with ids of the run that the page's story made. Bodies in Arrow are left out: their document says only
that they are bytes, and random bytes are covered with real streams in tests/wire and test_mutated_arrow.
"""

from __future__ import annotations

import asyncio
import copy
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from schemathesis.checks import load_all_checks
from schemathesis.config import SchemathesisConfig
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    negative_data_rejection,
    positive_data_acceptance,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema

from coordinator.app import create_app
from coordinator.openapi.story import STORY
from coordinator.storage.database import Database, connect
from coordinator.tokens import service as tokens
from coordinator.wire.columns import ARROW_MEDIA_TYPE
from coordinator.wire.tokens import CreateToken
from tests.api.story import Player
from tests.database import Databases

EXAMPLES = 20
"""Random requests for each call, beside examples and edges."""

UNSAYABLE: dict[tuple[str, str, str | None], str] = {
    ("create_run", "invalid_request", "settings"): "min_usable lies within group_size, one retention within the other",
    ("prepare_policy", "invalid_file_name", "files"): "no two files have one name, and none is another's folder",
    ("prepare_policy", "invalid_request", "files"): "one sha256 has one size",
    ("prepare_policy", "invalid_request", "body"): "a stream has a hash and no files, others have files and no hash",
    ("prepare_policy", "artifact_uri_not_allowed", "uri"): "a URI lies below a prefix of the coordinator's settings",
    ("rescore_group", "invalid_request", "rewards"): "no rollout is named twice, and sums are finite",
    ("rescore_group", "partial_group", None): "every rewarded member is named",
    ("reserve_rollouts", "invalid_request", "rollouts"): "no rollout is named twice",
    ("reserve_rollouts", "invalid_log_probs", None): "there is one log-prob for each stored token",
    ("reserve_rollouts", "partial_group", None): "every rewarded member is named",
    ("get_audit", "invalid_request", "after"): "a cursor is what an earlier answer gave",
    ("stream_events", "invalid_request", "after"): "the run has come to that event",
    ("stream_events", "invalid_request", "Last-Event-ID"): "the run has come to that event",
    ("get_uses", "invalid_request", "version"): "one of the filters is given",
    ("get_uses", "invalid_request", "ruleset_id"): "ruleset_hash comes with ruleset_id",
}
"""Call, code and field of what is refused although it fits its schema: rules that JSON Schema cannot say."""

ALSO_AN_ID = {"report_generation_failures", "release_rollouts", "read_evidence"}
"""Their addresses, /rollouts/failures for one, are also that of a rollout of this id: Allow has GET beside POST."""


CONFIG = {
    "seed": 20260302,
    "generation": {"deterministic": True, "database": "none", "max-examples": EXAMPLES},
    "checks": {
        "negative_data_rejection": {"expected-statuses": [400, 401, 403, 404, 405, 409, 413, 415, 422]},
    },
}
PATHS = {step.operation: dict(step.path) for step in STORY}


@dataclass(frozen=True)
class Served:
    """The app over a database of this module's own, after the story, and an admin's token."""

    app: FastAPI
    token: str


async def _token(database: Database) -> str:
    body = CreateToken.model_validate({"name": "fuzzer", "role": "admin"})
    return (await database.transaction(tokens.create, body)).token


async def _tell(served: Served) -> None:
    """Plays the story, so that there is something to call, over the same client that the cases go through."""
    with asgi.get_client(served.app) as client:

        async def send(method: str, path: str, **kwargs: Any) -> httpx.Response:
            kwargs["data"] = kwargs.pop("content", None)
            found = client.request(method, f"http://{asgi.HOST}{path}", **kwargs)
            return httpx.Response(found.status_code, headers=dict(found.headers), content=found.content)

        async for step, response, _ in Player(served.app, send, served.token).play():
            assert response.is_success, f"{step.operation}: {response.text}"


@pytest.fixture(scope="module")
def served(postgres: Databases) -> Iterator[Served]:
    url = postgres.migrated()
    artifacts = Path(tempfile.mkdtemp(prefix="coordinator-fuzz-"))

    async def token() -> str:
        database = connect(url, pool_size=1)
        try:
            return await _token(database)
        finally:
            await database.close()

    served = Served(create_app(connect(url, pool_size=4), artifacts), asyncio.run(token()))
    asyncio.run(_tell(served))
    yield served
    asgi.shutdown_lifespans()
    shutil.rmtree(artifacts)


@pytest.fixture(scope="module")
def page(served: Served) -> OpenApiSchema:
    """The document without bodies in Arrow."""
    document = copy.deepcopy(served.app.openapi())
    for item in document["paths"].values():
        for operation in item.values():
            operation.get("requestBody", {"content": {}})["content"].pop(ARROW_MEDIA_TYPE, None)
    page = schemathesis.openapi.from_dict(document, config=SchemathesisConfig.from_dict(CONFIG))
    page.app = served.app
    return page


def whole_numbers(value: Any) -> Any:
    """2 for 2.0, which JSON Schema takes for an integer and the coordinator does not."""
    if isinstance(value, dict):
        return {name: whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def settle(case: schemathesis.Case) -> None:
    """Lets a case meet what the story made, and lets none wait."""
    assert case.meta is not None
    mode = case.meta.generation.mode
    if mode.is_positive and case.method == case.operation.method.upper():
        case.body = whole_numbers(case.body)
        if zlib.crc32(repr((case.body, case.query)).encode()) % 2:
            case.path_parameters = dict(PATHS[case.operation.definition.raw["operationId"]])
    if case.operation.definition.raw["operationId"] == "stream_events":
        case.query.setdefault("wait_seconds", 0)
    for part in (case.body, case.query):
        if isinstance(part, MutableMapping) and re.fullmatch(r"\d+(\.\d+)?", str(part.get("wait_seconds"))):
            part["wait_seconds"] = type(part["wait_seconds"])(0)


def check(case: schemathesis.Case, served: Served) -> None:
    """Sends one request and applies every check of schemathesis to what came back."""
    name = case.operation.definition.raw["operationId"]
    headers = {"Authorization": f"Bearer {served.token}"}
    settle(case)
    response = case.call(headers=headers)
    excluded = []
    if response.status_code == 422:
        problem = response.json()
        if (name, problem["code"], problem.get("field")) in UNSAYABLE:
            excluded.append(positive_data_acceptance)
    if name == "submit_rollouts" and response.status_code == 200:
        # A batch is answered item by item.
        assert case.meta is not None
        if case.meta.generation.mode.is_negative:
            assert "rejected" in {verdict["verdict"] for verdict in response.json()["verdicts"]}
            excluded.append(negative_data_rejection)
    if name in ALSO_AN_ID:
        excluded.append(allow_header_conformance)
    case.validate_response(response, headers=headers, excluded_checks=excluded, transport_kwargs={"headers": headers})


@pytest.mark.parametrize("name", PATHS)
def test_what_the_page_promises_holds(name: str, page: OpenApiSchema, served: Served) -> None:
    def test(case: schemathesis.Case) -> None:
        check(case, served)

    # What schemathesis' decorators do: with pytest 9.2 they fail, or give the tests of all calls one id.
    load_all_checks()
    (found,) = get_all_tests(schema=page.include(operation_id=name), test_func=test, settings=None, given_kwargs={})
    _, run = found.ok()
    run()
