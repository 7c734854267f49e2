"""The OpenAPI page is what an integrator works with: complete, true, and with examples that work when played."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from fastapi.routing import APIRoute

from coordinator.openapi.document import described
from coordinator.openapi.story import STORY
from coordinator.openapi.words import WORDS
from coordinator.operations.access import Allow
from coordinator.wire.columns import encode_rollouts, rollout_columns
from coordinator.wire.problems import MEDIA_TYPE, PROBLEMS
from coordinator.wire.rollouts import Rollout
from tests.api.ledger import Api, Json, Ledger, ok
from tests.api.story import ANSWERS, Player

JSON = "application/json"
BYTES = "application/octet-stream"
ARROW = "application/vnd.apache.arrow.stream"
WITHOUT_TOKEN = {"healthz", "readyz"}
CARRIES = {"401": "WWW-Authenticate", "416": "Content-Range", "429": "Retry-After", "503": "Retry-After"}


@pytest.fixture
def document(api: Api) -> Json:
    return api.app.openapi()


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def schema_faults(document: Json, schema: Json, value: Any) -> list[str]:
    """What a value lacks to be what the schema says, which may refer to the document's components."""
    validator = jsonschema.Draft202012Validator(
        schema | {"components": document["components"]},
        format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
    )
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


def test_every_call_says_what_it_is_for_and_whom(api: Api, document: Json) -> None:
    routes = {route.name: route for route in api.app.routes if isinstance(route, APIRoute)}
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert sorted(names) == sorted(routes)
    for _, _, operation in operations(document):
        name = operation["operationId"]
        assert 10 <= len(operation["summary"]) <= 110, name
        assert operation["summary"][0].isupper() and not operation["summary"].endswith("."), name
        assert len(operation["tags"]) == 1, name
        (*guards,) = [d.call for d in routes[name].dependant.dependencies if isinstance(d.call, Allow)]
        assert len(guards) == (0 if name in WITHOUT_TOKEN else 1), name
        allowed = guards[0].roles if guards else frozenset()
        assert set(operation["x-roles"]) == allowed, name
        said = re.search(r"Roles: ([a-z, ]+)\.", operation["description"])
        assert set(said[1].split(", ") if said else ()) == allowed, name
        assert ("security" in operation) == bool(guards), name


def test_every_call_says_more_than_its_name_and_what_the_same_again_answers(document: Json) -> None:
    for method, _, operation in operations(document):
        name = operation["operationId"]
        _, second, *rest = operation["description"].split("\n\n")
        assert not second.startswith(("Sent again: ", "Roles: ")), f"{name}: say when it is used, below its first line"
        assert len(second) >= 40, name
        again = [part for part in (second, *rest) if part.startswith("Sent again: ")]
        assert len(again) == 1, f"{name}: say what it answers when it is sent again"
        assert method == "GET" or "reads" in again[0] or len(again[0]) >= 30, name


def test_every_name_is_one_for_a_client(document: Json) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    for name in names:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name), name
    assert len({name.replace("_", "") for name in names}) == len(names)


def test_the_document_introduces_itself(document: Json) -> None:
    info = document["info"]
    assert info["license"] == {"name": "Apache License 2.0", "identifier": "Apache-2.0"}
    assert len(info["description"]) > 400
    assert [server["url"] for server in document["servers"]] == ["/"]
    tags = {tag["name"]: tag["description"] for tag in document["tags"]}
    assert list(tags)[:3] == ["runs", "workers", "rollouts"]
    used = [operation["tags"][0] for _, _, operation in operations(document)]
    assert list(dict.fromkeys(used)) == list(tags), "the paths of one tag stand together, in the order of the tags"
    for tag, description in tags.items():
        assert len(description) >= 20, f"describe the tag {tag} in coordinator.openapi.document.TAGS"
    (scheme,) = document["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    assert "Authorization: Bearer" in scheme["description"]


BOUNDS = {"maxLength", "enum", "format", "const"}


def bounded(schema: Json) -> bool:
    """Whether a value cannot be of any size: texts and numbers have a bound on both sides, whatever they hold."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    return all(
        {"minimum", "maximum"} <= kind.keys()
        if kind.get("type") in ("integer", "number")
        else kind.get("type") == "boolean" or BOUNDS & kind.keys() or not re.search(r"[*+]", kind.get("pattern", "*"))
        for kind in kinds
    )


def test_every_parameter_is_described_with_bounds_and_an_example(document: Json) -> None:
    seen = 0
    for _, _, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            where = (operation["operationId"], parameter["name"])
            schema = parameter["schema"]
            assert parameter["description"], where
            assert bounded(schema), where
            shown = [example["value"] for example in parameter.get("examples", {}).values()]
            shown += [value for kind in (schema, *schema.get("anyOf", ())) for value in kind.get("examples", ())]
            assert shown, where
            for value in shown:
                assert not schema_faults(document, schema, value), where
            seen += 1
    assert seen > 100


def test_every_header_of_an_answer_is_described(document: Json) -> None:
    found = set()
    for _, _, operation in operations(document):
        for status, answer in operation["responses"].items():
            for name, header in answer.get("headers", {}).items():
                assert header["description"], (operation["operationId"], status, name)
                assert not schema_faults(document, header["schema"], header["example"])
                found.add((status, name))
    assert found >= {
        ("200", "ETag"), ("206", "ETag"), ("206", "Content-Range"), ("401", "WWW-Authenticate"),
        ("416", "Content-Range"), ("429", "Retry-After"), ("503", "Retry-After"),
    }  # fmt: skip


def test_every_model_and_every_field_says_what_it_holds(document: Json) -> None:
    for model, schema in document["components"]["schemas"].items():
        assert schema.get("description"), model
        for name, field in schema.get("properties", {}).items():
            assert described(field), f"describe {model}.{name} in its model, or {name} in coordinator.openapi.words"


def test_every_word_is_used(document: Json) -> None:
    said = {
        field.get("description")
        for schema in document["components"]["schemas"].values()
        for field in schema.get("properties", {}).values()
    }
    assert [name for name, meaning in WORDS.items() if meaning not in said] == []


def test_every_call_says_what_it_may_refuse(document: Json) -> None:
    for _, _, operation in operations(document):
        name, answers = operation["operationId"], operation["responses"]
        expected = set() if name in WITHOUT_TOKEN else {"401", "403", "422", "500", "503"}
        if JSON in operation.get("requestBody", {}).get("content", {}):
            expected |= {"413", "415"}
        assert expected <= answers.keys(), name
        for status, answer in answers.items():
            assert answer["description"], (name, status)
            if status.startswith("2"):
                continue
            assert set(answer["content"]) == {MEDIA_TYPE}, (name, status)
            content = answer["content"][MEDIA_TYPE]
            assert content["schema"] == {"$ref": "#/components/schemas/ProblemDocument"}
            assert content["examples"], (name, status)
            for code, example in content["examples"].items():
                assert PROBLEMS[code].status == int(status), (name, code)
                assert example == {"$ref": f"#/components/examples/{code}"}
                shown = document["components"]["examples"][code]["value"]
                assert (shown["code"], shown["next_step"]) == (code, PROBLEMS[code].next_step)
                assert not schema_faults(document, content["schema"], shown)
            header = CARRIES.get(status)
            assert header is None or header in answer["headers"], (name, status)


def test_every_code_is_documented_where_it_may_come_from(document: Json) -> None:
    documented = {
        code
        for _, _, operation in operations(document)
        for status, answer in operation["responses"].items()
        if not status.startswith("2")
        for code in answer["content"][MEDIA_TYPE]["examples"]
    }
    # These come from no endpoint: no such address or method, and bytes that are no HTTP.
    assert documented == PROBLEMS.keys() - {"not_found", "method_not_allowed", "malformed_http", "headers_too_large"}


def test_every_call_has_an_example_of_its_request_and_of_its_good_answer(document: Json) -> None:
    for _, path, operation in operations(document):
        name = operation["operationId"]
        for media, content in operation.get("requestBody", {"content": {}})["content"].items():
            if media == ARROW:
                continue
            assert content["examples"], name
            for example in content["examples"].values():
                assert not schema_faults(document, content["schema"], example["value"]), name
        good = {status: answer for status, answer in operation["responses"].items() if status in ("200", "201")}
        assert good, name
        for status, answer in good.items():
            for media, content in answer["content"].items():
                if media == ARROW:
                    continue
                assert content["examples"], (name, status)
                for example in content["examples"].values():
                    assert not schema_faults(document, content["schema"], example["value"]), (name, status, path)


def test_every_setting_and_every_part_of_the_contract_is_described(document: Json) -> None:
    schemas = document["components"]["schemas"]
    for name in ("RunSettings", "GenerationContract"):
        for field, schema in schemas[name]["properties"].items():
            assert schema.get("description"), f"{name}.{field}"
    for schema, field in (("GenerationContract", "logprobs_mode"), ("Rollout", "span_source")):
        described = schemas[schema]["properties"][field]
        for value in described["enum"]:
            assert f"{value}: " in described["description"], f"{field}: {value}"


def test_bodies_in_arrow_are_described_column_by_column(document: Json) -> None:
    found = set()
    for _, _, operation in operations(document):
        bodies = [operation.get("requestBody", {"content": {}}), operation["responses"].get("200", {"content": {}})]
        for content in (body["content"][ARROW] for body in bodies if ARROW in body["content"]):
            found.add(operation["operationId"])
            columns = content["schema"]["x-arrow-columns"]
            for column in columns:
                assert column.keys() >= {"name", "type", "nullable", "description"}
                assert column["type"].startswith("list") == ("items_nullable" in column)
                assert f"| `{column['name']}` | `{column['type']}`" in content["schema"]["description"]
            evidence = {c["name"]: c["type"] for c in columns if c["name"].endswith("log_probs")}
            assert set(evidence.values()) == {"list<float32>"}
    assert found == {"submit_rollouts", "read_evidence", "get_candidates", "reserve_rollouts"}


def without(table: pa.Table, name: str) -> bytes:
    """The stream of a table whose first row is null in this column."""
    column = table.column(name)
    values = [None, *column.to_pylist()[1:]]
    sink = pa.BufferOutputStream()
    changed = table.set_column(table.column_names.index(name), name, pa.array(values, column.type))
    with pa.ipc.new_stream(sink, changed.schema) as writer:
        writer.write_table(changed)
    return sink.getvalue().to_pybytes()


async def test_a_null_in_an_arrow_column_is_taken_just_where_the_page_says_so(ledger: Ledger, document: Json) -> None:
    path = "/v1/runs/{run_id}/rollouts"
    described = document["paths"][path]["post"]["requestBody"]["content"][ARROW]["schema"]["x-arrow-columns"]
    for number, column in enumerate(described):
        ids = (f"r{number}", f"s{number}")
        rollouts = [Rollout.model_validate(ledger.rollout(r, f"g{number}", i)) for i, r in enumerate(ids)]
        table = pa.ipc.open_stream(encode_rollouts(rollout_columns(rollouts))).read_all()
        content = without(table, column["name"])
        response = await ledger.call("POST", "/rollouts", content=content, headers={"content-type": ARROW})
        first, second = (verdict["verdict"] for verdict in ok(response)["verdicts"])
        assert (first, second) == ("accepted" if column["nullable"] else "rejected", "accepted"), column["name"]
        if column.get("optional"):
            rest = table.drop_columns(column["name"])
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rest.schema) as writer:
                writer.write_table(rest)
            content = sink.getvalue().to_pybytes()
            again = await ledger.call("POST", "/rollouts", content=content, headers={"content-type": ARROW})
            assert {verdict["verdict"] for verdict in ok(again)["verdicts"]} == {"duplicate"}, column["name"]


def same(recorded: Any, live: Any) -> bool:
    """Whether two JSON values are the same; logarithms may differ in their last bits from machine to machine."""
    if isinstance(recorded, dict) and isinstance(live, dict):
        return recorded.keys() == live.keys() and all(same(recorded[key], live[key]) for key in recorded)
    if isinstance(recorded, list) and isinstance(live, list):
        return len(recorded) == len(live) and all(map(same, recorded, live))
    if isinstance(recorded, float):
        return bool(live == pytest.approx(recorded, rel=1e-9))
    return type(recorded) is type(live) and recorded == live


async def test_the_examples_played_in_order_get_the_answers_that_are_shown(api: Api, document: Json) -> None:
    recorded = json.loads(ANSWERS.read_text(encoding="utf-8"))
    assert {step.operation for step in STORY} == {o["operationId"] for _, _, o in operations(document)}
    answers = {o["operationId"]: o["responses"] for _, _, o in operations(document)}
    player = Player(api.app, api.http.request, api.secrets["admin"])
    routes = {route.name: route for route in api.app.routes if isinstance(route, APIRoute)}
    number = 0
    async for step, response, told in player.play():
        shown = recorded[number]
        number += 1
        where = f"step {number}, {step.operation}: run python tests/api/story.py if the story has changed"
        assert (shown["operation"], shown["status"]) == (step.operation, response.status_code), (where, response.text)
        assert same(shown["body"], told), (where, shown["body"], told)
        if step.role is not None:
            assert step.role in routes[step.operation].dependant.dependencies[0].call.roles  # type: ignore[union-attr]
        if {"200", "201"} <= answers[step.operation].keys():
            again = await player.call(step, routes[step.operation])
            assert (again.status_code, again.json()) == (200, response.json()), where
    assert number == len(recorded)
