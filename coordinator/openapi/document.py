"""Completes the OpenAPI document with what the app knows and FastAPI does not: roles, refusals, bodies, examples."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from coordinator.errors import refusals
from coordinator.openapi.examples import Example, examples
from coordinator.openapi.words import WORDS
from coordinator.operations.access import roles_of
from coordinator.wire.problems import MEDIA_TYPE, PROBLEMS, ProblemDocument
from coordinator.wire.rollouts import RolloutBatch
from coordinator.wire.updates import ReserveRequest

Json = dict[str, Any]

NAMED_ONLY: tuple[type[BaseModel], ...] = (ProblemDocument, RolloutBatch, ReserveRequest)
"""Models that the document names although no endpoint has them as a parameter or a response model."""

BODY_REFUSALS = ("too_large", "unsupported_media_type")

TAGS = {
    "runs": "One run is one experiment: its admission rule, its journal, and what it waits for.",
    "workers": "A worker process beside an engine: it registers, lives, confirms policy versions and asks for work.",
    "rollouts": "Trajectories with their whole identity, their rewards, and everything that happened to them.",
    "updates": "One training step: candidates are held, reserved with measured drift, and consumed by one commit.",
    "policies": "Policy versions, their files, and the activations that make one of them active.",
    "rewinds": "The ways back: a line of commits rewound, a policy rolled back, a version withdrawn.",
    "tokens": "Who may call, in which role.",
    "health": "Probes, without a token.",
}
"""What each tag holds, in the order in which a reader meets them."""

LICENSE = {"name": "Apache License 2.0", "identifier": "Apache-2.0"}
SERVERS = [{"url": "/", "description": "the coordinator that serves this document"}]

READS = "Sent again: it only reads."


def install(app: FastAPI) -> None:
    """Completes the document once, when it is first asked for."""
    make = app.openapi

    def openapi() -> Json:
        if app.openapi_schema is None:
            document = make()
            document["info"]["license"] = LICENSE
            document["servers"] = SERVERS
            _add_models(document["components"]["schemas"])
            for route in app.routes:
                if isinstance(route, APIRoute) and route.include_in_schema:
                    for method in route.methods:
                        _complete(document["paths"][route.path_format][method.lower()], route)
            _explain(document["components"]["schemas"])
            _share_refusals(document)
            _order(document)
            _drop_titles(document["components"])
            _drop_titles(document["paths"])
        return make()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def purpose(operation: Json) -> str:
    """What a call does, in one phrase: the first sentence of its endpoint's docstring."""
    first: str = operation["description"].split("\n\n", 1)[0].replace("\n", " ").split(". ", 1)[0]
    return first.removesuffix(".")


def _add_models(schemas: Json) -> None:
    for model in NAMED_ONLY:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        for name, nested in schema.pop("$defs", {}).items():
            schemas.setdefault(name, nested)
        schemas[model.__name__] = schema
    schemas["ProblemCode"] = {
        "type": "string",
        "enum": list(PROBLEMS),
        "x-open": True,
        "description": "What was refused, for programs. Later releases may add codes: treat one that is not known by "
        "its status.",
    }
    schemas["ProblemDocument"]["properties"]["code"] = {"$ref": "#/components/schemas/ProblemCode"}


def _explain(schemas: Json) -> None:
    """Says what each field holds of which its model does not."""
    for model, schema in schemas.items():
        for name, field in schema.get("properties", {}).items():
            if not described(field) and (meaning := WORDS.get(f"{model}.{name}", WORDS.get(name))):
                field["description"] = meaning


def described(field: Json) -> bool:
    """Whether it says what it holds: by itself, or by the model that it refers to."""
    kinds = [field, *field.get("anyOf", ()), *([field["items"]] if "items" in field else [])]
    return any("description" in kind or "$ref" in kind for kind in kinds)


def _share_refusals(document: Json) -> None:
    """Puts the example of each refusal into the components once, where every call that may refuse so names it."""
    shared = document["components"].setdefault("examples", {})
    for item in document["paths"].values():
        for operation in item.values():
            for answer in operation["responses"].values():
                content = answer.get("content", {}).get(MEDIA_TYPE, {})
                for code, example in content.get("examples", {}).items():
                    shared[code] = example
                    content["examples"][code] = {"$ref": f"#/components/examples/{code}"}


def _order(document: Json) -> None:
    """Tags as `TAGS` has them, those that it lacks last, and the paths of one tag together."""
    used = {operation["tags"][0] for item in document["paths"].values() for operation in item.values()}
    names = [*TAGS, *sorted(used - TAGS.keys())]
    document["tags"] = [{"name": name, "description": TAGS.get(name, "")} for name in names if name in used]

    def place(path: tuple[str, Json]) -> int:
        return min(names.index(operation["tags"][0]) for operation in path[1].values())

    document["paths"] = dict(sorted(document["paths"].items(), key=place))


def _drop_titles(value: Any) -> None:
    """Takes out the titles that pydantic makes of the names of fields: in a client they stand before every comment."""
    if isinstance(value, list):
        for inner in value:
            _drop_titles(inner)
    elif isinstance(value, dict):
        if isinstance(value.get("title"), str):
            del value["title"]
        for name, inner in value.items():
            if name not in ("example", "examples", "default", "const", "enum"):
                _drop_titles(inner)


def _complete(operation: Json, route: APIRoute) -> None:
    operation["summary"] = purpose(operation)
    roles = roles_of(route)
    operation["x-roles"] = list(roles or ())
    if "GET" in route.methods:
        operation["description"] += f"\n\n{READS}"
    operation["description"] += f"\n\nRoles: {', '.join(roles)}." if roles else "\n\nNeeds no token."
    if roles and "worker" in roles and "{worker_id}" in route.path:
        operation["description"] += " A worker's token only for its own id."
    body = operation.get("requestBody", {}).get("content", {})
    if "application/json" in body:
        for status, answer in refusals(*BODY_REFUSALS, among=()).items():
            operation["responses"].setdefault(str(status), answer)
    operation["responses"] = dict(sorted(operation["responses"].items()))
    for example in examples(operation["operationId"]):
        _show(operation, example)


def _show(operation: Json, example: Example) -> None:
    """Puts one example into the request's body, its parameters, and the answer."""
    for parameter in operation.get("parameters", ()):
        if parameter["name"] in example.parameters:
            shown = parameter.setdefault("examples", {})
            shown[example.key] = {"summary": example.title, "value": example.parameters[parameter["name"]]}
    if example.request is not None:
        content = operation["requestBody"]["content"]
        media = "application/json" if "application/json" in content else "application/octet-stream"
        content[media].setdefault("examples", {})[example.key] = {"summary": example.title, "value": example.request}
    # Where the first call answers 201, the same again answers 200 with the same body.
    for status in {str(example.status), "200"} & operation["responses"].keys():
        for media, content in operation["responses"][status]["content"].items():
            if media in ("application/json", "application/octet-stream", "text/event-stream"):
                value = {"summary": example.title, "value": example.answer}
                content.setdefault("examples", {})[example.key] = value
