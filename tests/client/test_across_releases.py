"""Client and coordinator of neighbouring releases: a request names what was given, an answer may say more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

from coordinator.app import create_app
from coordinator.client import Coordinator
from coordinator.client.connection import read_text
from coordinator.openapi.story import STORY, Step
from coordinator.storage.database import connect
from coordinator.wire.base import WireModel
from coordinator.wire.columns import CANDIDATE_SCHEMA, EVIDENCE_SCHEMA, decode_candidates, decode_evidence
from coordinator.wire.rollouts import RolloutBatch
from coordinator.wire.updates import ReserveRequest
from tests.api.story import ANSWERS
from tests.client.runs import new_run
from tests.client.server_process import ServerProcess

READ_BY_HAND: dict[str, type[BaseModel]] = {"submit_rollouts": RolloutBatch, "reserve_rollouts": ReserveRequest}
"""Bodies that come as JSON or Arrow, which the endpoint reads itself."""


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, APIRoute]:
    """Every endpoint by its name. The app needs no database for that, only the address of one."""
    database = connect("postgresql://nobody@127.0.0.1:1/none", pool_size=1)
    app = create_app(database, tmp_path_factory.mktemp("artifacts"))
    return {route.name: route for route in app.routes if isinstance(route, APIRoute)}


def named(value: Any, at: str = "") -> Iterator[str]:
    """The place of every field of a JSON value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{at}.{name}"
            yield from named(inner, f"{at}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from named(inner, f"{at}[{number}]")


def bodies(routes: dict[str, APIRoute]) -> Iterator[tuple[Step, type[WireModel]]]:
    for step in STORY:
        if step.body is not None:
            field = routes[step.operation].body_field
            model = READ_BY_HAND[step.operation] if field is None else field.field_info.annotation
            assert isinstance(model, type) and issubclass(model, WireModel), step.operation
            yield step, model


def test_a_request_names_only_what_was_given(routes: dict[str, APIRoute]) -> None:
    seen = set()
    for step, model in bodies(routes):
        given = model.model_validate(step.body)
        # As when a function hands on every one of its arguments, those that nobody gave too.
        spelled_out = model.model_validate_json(given.model_dump_json())
        sent = spelled_out.request_body()
        assert set(named(json.loads(sent))) <= set(named(step.body)), step.title
        assert model.model_validate_json(sent) == given, step.title
        seen.add(step.operation)
    with_body = {name for name, route in routes.items() if route.body_field is not None} | READ_BY_HAND.keys()
    assert with_body == seen


def test_the_client_sends_no_more(server: ServerProcess) -> None:
    sent: dict[str, Any] = {}

    def keep(request: httpx.Request) -> None:
        if request.headers.get("content-type") == "application/json":
            sent[request.url.path.rpartition("/")[2]] = json.loads(request.content)

    with Coordinator(server.url, server.token, owner="t-1") as coordinator:
        coordinator._connection._http.event_hooks["request"].append(keep)
        run = new_run(coordinator, "sparse")
        worker = run.worker("w", "w-1")
        worker.register("hand", "1")
        active = run.view().active
        worker.ack(active.version, active.artifact_hash)
        worker.heartbeat()
        with run.update("u") as update:
            update.candidates(groups=1)
            update.abort("nothing to do")
    assert sent["runs"].keys() == {"run_id", "contract", "vocab_size", "settings", "policy"}
    assert sent["runs"]["settings"] == {"group_size": 2}
    assert sent["w"].keys() == {"incarnation", "engine", "engine_version"}
    assert sent["acks"].keys() == {"incarnation", "version", "artifact_hash"}
    assert sent["heartbeat"].keys() == {"incarnation"}
    assert sent["u"].keys() == {"owner"}
    assert sent["candidates"].keys() == {"owner", "groups"}
    assert sent["abort"].keys() == {"owner", "reason"}


def with_more(value: Any) -> Any:
    """The JSON of a model as a newer server may answer it: with one field more in every object that has fixed ones."""
    if isinstance(value, WireModel):
        fields = {name: with_more(getattr(value, name)) for name in type(value).model_fields}
        return fields | {"new_in_a_later_release": {"some": ["thing"]}}
    if isinstance(value, list | tuple):
        return [with_more(inner) for inner in value]
    return json.loads(json.dumps(value, default=str))


def test_an_answer_may_have_fields_that_the_client_does_not_know(routes: dict[str, APIRoute]) -> None:
    read = 0
    for recorded in json.loads(Path(ANSWERS).read_text(encoding="utf-8")):
        model = routes[recorded["operation"]].response_model
        if isinstance(model, type) and issubclass(model, WireModel):
            known = read_text(json.dumps(recorded["body"]), model)
            assert read_text(json.dumps(with_more(known)), model) == known, recorded["operation"]
            with pytest.raises(ValueError, match="new_in_a_later_release"):
                model.model_validate(with_more(known))
            read += 1
    assert read > 60


@pytest.mark.parametrize(
    ("schema", "decode"), [(CANDIDATE_SCHEMA, decode_candidates), (EVIDENCE_SCHEMA, decode_evidence)]
)
def test_an_answer_in_arrow_may_have_columns_that_the_client_does_not_know(schema: pa.Schema, decode: Any) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema.append(pa.field("new_in_a_later_release", pa.int8()))):
        pass
    assert decode(sink.getvalue().to_pybytes()).rollout_id == []
