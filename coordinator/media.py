"""How an endpoint documents a body that it reads or writes by itself: JSON, or the same as one Arrow IPC stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from coordinator.wire.columns import ARROW_MEDIA_TYPE

AGAIN = "It was there already, with this content: nothing changed"
"""What 200 means where the first such call answers 201."""


def json_or_arrow(
    body: type[BaseModel],
    columns: pa.Schema,
    row: type[BaseModel],
    *,
    left_out: frozenset[str] = frozenset(),
    types: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint that takes `body` as JSON, or its rows as Arrow columns.

    Meaning and nullability of each column are those of the JSON model `row`. `left_out` names columns that a stream
    may lack, `types` what else a column may hold, `metadata` what the Arrow schema's metadata holds as JSON.
    """
    model = row.model_json_schema()
    required = model.get("required", ())
    described = [
        _column(field, model, nullable=field.name not in required or _takes_null(model["properties"][field.name]))
        | ({"optional": True} if field.name in left_out else {})
        | ({"also": types[field.name]} if types and field.name in types else {})
        for field in columns
    ]
    content = {
        "application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}},
        ARROW_MEDIA_TYPE: {"schema": _stream(described, metadata or {})},
    }
    return {"requestBody": {"required": True, "content": content}}


def arrow_answer(
    columns: pa.Schema, row: type[BaseModel], *, metadata: Mapping[str, str] | None = None
) -> dict[int | str, dict[str, Any]]:
    """The good answer as Arrow columns, for those who accept it. FastAPI adds the JSON one from the response model."""
    model = row.model_json_schema(mode="serialization")
    described = [_column(field, model, nullable=_takes_null(model["properties"][field.name])) for field in columns]
    for column in described:
        if column.get("items_nullable"):  # a number that is not finite; Arrow has it, JSON has not
            column["items_nullable"] = False
    content = {ARROW_MEDIA_TYPE: {"schema": _stream(described, metadata or {})}}
    return {200: {"description": "Successful Response", "content": content}}


def _stream(columns: list[dict[str, Any]], metadata: Mapping[str, str]) -> dict[str, Any]:
    lines = [
        "One Arrow IPC stream with a row for each rollout, in any number of record batches.",
        "",
        "| column | type | null | null inside | meaning |",
        "|---|---|---|---|---|",
    ]
    for column in columns:
        null = ("yes" if column["nullable"] else "no") + (", may be left out" if "optional" in column else "")
        inside = {None: "", True: "yes", False: "no"}[column.get("items_nullable")]
        kind = f"`{column['type']}`" + (f" or `{column['also']}`" if "also" in column else "")
        lines.append(f"| `{column['name']}` | {kind} | {null} | {inside} | {column['description']} |")
    if metadata:
        lines += ["", "The Arrow schema's metadata holds, each as JSON text:", ""]
        lines += [f"- `{key}`: {meaning}" for key, meaning in metadata.items()]
    return {
        "type": "string",
        "format": "binary",
        "description": "\n".join(lines),
        "x-arrow-columns": columns,
        "x-arrow-metadata": dict(metadata),
    }


def _column(field: pa.Field, model: dict[str, Any], *, nullable: bool) -> dict[str, Any]:
    described = model["properties"][field.name]
    column: dict[str, Any] = {
        "name": field.name,
        "type": _type_name(field.type),
        "nullable": nullable,
        "description": _meaning(field, described),
    }
    if pa.types.is_list(field.type):
        column["items_nullable"] = any(_takes_null(kind.get("items", {})) for kind in _kinds(described))
    return column


def _type_name(kind: pa.DataType) -> str:
    """The type with widths spelled out: Arrow itself calls float32 float and float64 double."""
    if pa.types.is_list(kind):
        return f"list<{_type_name(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {_type_name(field.type)}' for field in kind)}>"
    return {"float": "float32", "double": "float64", "string": "utf8"}.get(str(kind), str(kind))


def _kinds(described: dict[str, Any]) -> list[dict[str, Any]]:
    return [described, *described.get("anyOf", ())]


def _takes_null(described: dict[str, Any]) -> bool:
    return any(kind.get("type") == "null" for kind in _kinds(described))


def _meaning(field: pa.Field, described: dict[str, Any]) -> str:
    reference = next((kind["$ref"] for kind in _kinds(described) if "$ref" in kind), None)
    if reference is not None and pa.types.is_string(field.type):
        return f"{reference.rpartition('/')[2]} as JSON text, the same object as in the JSON body"
    if pa.types.is_binary(field.type):
        return "one opaque blob as it is, not in base64"
    return next((kind["description"] for kind in _kinds(described) if "description" in kind), "")
