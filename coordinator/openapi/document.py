"""Completes the OpenAPI document with what the app knows and FastAPI does not: roles, refusals, bodies, examples."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from coordinator.errors import refusals
from coordinator.openapi.examples import Example, examples
from coordinator.operations.access import roles_of
from coordinator.wire.problems import ProblemDocument
from coordinator.wire.rollouts import RolloutBatch
from coordinator.wire.updates import ReserveRequest

Json = dict[str, Any]

NAMED_ONLY: tuple[type[BaseModel], ...] = (ProblemDocument, RolloutBatch, ReserveRequest)
"""Models that the document names although no endpoint has them as a parameter or a response model."""

BODY_REFUSALS = ("too_large", "unsupported_media_type")


def install(app: FastAPI) -> None:
    """Completes the document once, when it is first asked for."""
    make = app.openapi

    def openapi() -> Json:
        if app.openapi_schema is None:
            document = make()
            _add_models(document["components"]["schemas"])
            for route in app.routes:
                if isinstance(route, APIRoute):
                    for method in route.methods:
                        _complete(document["paths"][route.path_format][method.lower()], route)
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


def _complete(operation: Json, route: APIRoute) -> None:
    operation["summary"] = purpose(operation)
    roles = roles_of(route)
    operation["x-roles"] = list(roles or ())
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
