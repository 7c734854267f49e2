"""What a change of the OpenAPI document means for the clients that are out there: does it break one?

A request must go on being taken: what the new document takes is at least what the old one took. An answer must go on
being understood: what it says is at most what the old one said, but for fields, and for the values of an enum that says
`x-open`, as the codes of refusals do (the document asks readers to pass over what they do not know of these).

`python -m coordinator.openapi.compatibility OLD.json NEW.json` prints every change, those that break first. Exit
status: 0 none breaks, 1 some do, 2 the documents could not be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Json = dict[str, Any]
Direction = Literal["request", "answer"]

_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_CONDITIONS = ("if", "then", "else", "allOf", "oneOf", "not", "dependentRequired", "contains", "propertyNames")
# Set exactly or not at all: one that is new narrows, one that is gone widens, another one does both.
_FORMS = ("pattern", "format", "multipleOf", "uniqueItems", "contentMediaType", "contentEncoding")
_TEXTS = frozenset({"title", "summary", "description", "examples", "example"})


@dataclass(frozen=True)
class Change:
    """One difference between two documents: whether it breaks clients, where it is, and what it is."""

    breaking: bool
    where: str
    what: str

    def __str__(self) -> str:
        return f"{'BREAKING' if self.breaking else 'fine'}: {self.where}: {self.what}"


def changes(old: Json, new: Json) -> list[Change]:
    """Every difference that a client could notice, those that break one first."""
    found = list(dict.fromkeys(_Comparison(old, new).operations()))
    return sorted(found, key=lambda change: not change.breaking)


def contract(part: Any) -> Any:
    """A document, or a part of one, without the texts and examples: what clients can hold the server to."""
    if isinstance(part, dict):
        return {
            name: {field: contract(schema) for field, schema in inner.items()}
            if name == "properties"
            else contract(inner)
            for name, inner in part.items()
            if name not in _TEXTS
        }
    return [contract(inner) for inner in part] if isinstance(part, list) else part


def _schemes(document: Json) -> Json:
    """How a token is sent, by the name of the way."""
    schemes: Json = contract(document.get("components", {}).get("securitySchemes", {}))
    return {
        name: {part: value for part, value in way.items() if part != "bearerFormat"} for name, way in schemes.items()
    }


class _Comparison:
    def __init__(self, old: Json, new: Json) -> None:
        self._old, self._new = old, new
        self._seen: set[tuple[str, str, Direction]] = set()

    def operations(self) -> Iterator[Change]:
        if contract(self._old.get("servers")) != contract(self._new.get("servers")):
            yield Change(True, "servers", "the calls are below another address")
        schemes = _schemes(self._new)
        for name, scheme in _schemes(self._old).items():
            if schemes.get(name) != scheme:
                yield Change(True, f"security scheme {name}", "a token is sent in another way")
        old, new = _operations(self._old), _operations(self._new)
        for call in old.keys() - new.keys():
            yield Change(True, call, "the call is gone")
        for call in new.keys() - old.keys():
            yield Change(False, call, "the call is new")
        for call in sorted(old.keys() & new.keys()):
            yield from self._operation(call, old[call], new[call])

    def _operation(self, call: str, old: Json, new: Json) -> Iterator[Change]:
        if old["operationId"] != new["operationId"]:
            yield Change(True, call, f"operationId {old['operationId']} is {new['operationId']} now")
        if "security" in new and "security" not in old:
            yield Change(True, call, "it asks for a token now")
        for role in sorted(set(old.get("x-roles", ())) ^ set(new.get("x-roles", ()))):
            gone = role in old.get("x-roles", ())
            yield Change(gone, call, f"role {role} {'may not call it any more' if gone else 'may call it'}")
        yield from self._parameters(call, _parameters(old), _parameters(new))
        yield from self._body(f"{call}: body", old.get("requestBody"), new.get("requestBody"))
        yield from self._answers(call, old["responses"], new["responses"])

    def _parameters(self, call: str, old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[Change]:
        for name in old.keys() - new.keys():
            yield Change(True, f"{call}: {name}", "the parameter is gone")
        for name in new.keys() - old.keys():
            required = bool(new[name].get("required"))
            yield Change(required, f"{call}: {name}", f"a new {'required' if required else 'optional'} parameter")
        for name in sorted(old.keys() & new.keys()):
            if any(old[name].get(form) != new[name].get(form) for form in ("style", "explode")):
                yield Change(True, f"{call}: {name}", "it is written in another way")
            yield from _requirement(f"{call}: {name}", old[name], new[name], "request")
            yield from self._schema(f"{call}: {name}", old[name]["schema"], new[name]["schema"], "request")

    def _body(self, where: str, old: Json | None, new: Json | None) -> Iterator[Change]:
        if old is None or new is None:
            if old is not new:
                breaking = new is None or bool(new.get("required"))
                yield Change(breaking, where, "there is none any more" if new is None else "there is one now")
            return
        yield from _requirement(where, old, new, "request")
        yield from self._content(where, old["content"], new["content"], "request")

    def _answers(self, call: str, old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[Change]:
        for status in sorted(old.keys() ^ new.keys()):
            # A good answer under another status is one that nobody reads; a refusal is one like any other.
            gone = status in old
            yield Change(status.startswith("2"), f"{call}: {status}", "is answered no more" if gone else "is new")
        for status in sorted(old.keys() & new.keys()):
            where = f"{call}: {status}"
            before, after = old[status], new[status]
            yield from self._content(where, before.get("content", {}), after.get("content", {}), "answer")
            was, now = before.get("headers", {}), after.get("headers", {})
            for name in was.keys() - now.keys():
                yield Change(True, f"{where}: {name}", "the header is gone")
            for name in now.keys() - was.keys():
                yield Change(False, f"{where}: {name}", "a new header")
            for name in was.keys() & now.keys():
                yield from _requirement(f"{where}: {name}", was[name], now[name], "answer")
                yield from self._schema(f"{where}: {name}", was[name]["schema"], now[name]["schema"], "answer")

    def _content(
        self, where: str, old: Mapping[str, Json], new: Mapping[str, Json], direction: Direction
    ) -> Iterator[Change]:
        for media in old.keys() - new.keys():
            yield Change(True, where, f"{media} is gone")
        for media in new.keys() - old.keys():
            yield Change(False, where, f"{media} is new")
        for media in sorted(old.keys() & new.keys()):
            # Schemas of one event of a stream stand beside the schema.
            for key in ("schema", "itemSchema"):
                before, after = old[media].get(key, {}), new[media].get(key, {})
                yield from self._schema(where, _columns(before) or before, _columns(after) or after, direction)

    def _schema(self, where: str, old: Json, new: Json, direction: Direction) -> Iterator[Change]:
        was, now = old.get("$ref"), new.get("$ref")
        if was is not None and now is not None:  # models are compared once, and named by themselves
            if (was, now, direction) in self._seen:
                return
            self._seen.add((was, now, direction))
            where = was.rpartition("/")[2] if was == now else where
        yield from self._resolved(where, _resolve(self._old, old), _resolve(self._new, new), direction)

    def _resolved(self, where: str, old: Json, new: Json, direction: Direction) -> Iterator[Change]:
        wider = direction == "answer"  # whether taking in more is what breaks
        before, null_before = _alternatives(old)
        after, null_after = _alternatives(new)
        if null_before != null_after:
            yield Change(null_after == wider, where, f"null is {'possible' if null_after else 'impossible'} now")
        if before == [old] and after == [new]:
            yield from self._single(where, old, new, direction)
        elif len(before) == len(after) == 1:
            yield from self._schema(where, before[0], after[0], direction)
        else:
            was = {_kind(self._old, kind): kind for kind in before}
            now = {_kind(self._new, kind): kind for kind in after}
            for kind in sorted(was.keys() - now.keys()):
                yield Change(not wider, where, f"{kind} is no alternative any more")
            for kind in sorted(now.keys() - was.keys()):
                yield Change(wider, where, f"{kind} is an alternative now")
            for kind in sorted(was.keys() & now.keys()):
                yield from self._schema(where, was[kind], now[kind], direction)
        if old.get("default") != new.get("default") and direction == "request":
            breaking = "default" in old
            yield Change(breaking, where, f"left out it is {new.get('default')!r}, no longer {old.get('default')!r}")

    def _single(self, where: str, old: Json, new: Json, direction: Direction) -> Iterator[Change]:
        wider = direction == "answer"
        was, now = old.get("type"), new.get("type")
        if was != now:
            grows = now is None or (was, now) == ("integer", "number")
            shrinks = was is None or (was, now) == ("number", "integer")
            breaking = not (shrinks if wider else grows)
            yield Change(breaking, where, f"the type is {now or 'any'}, no longer {was or 'any'}")
            return
        yield from _values(where, old, new, wider)
        yield from _bounds(where, old, new, wider)
        for name in _FORMS:
            if old.get(name) != new.get(name):
                breaking = (old if wider else new).get(name) is not None
                yield Change(breaking, where, f"{name} is {new.get(name)!r}, no longer {old.get(name)!r}")
        for name in _CONDITIONS:
            if contract(old.get(name)) != contract(new.get(name)):
                # What they let through cannot be compared, only whether they are there.
                breaking = name in (old if wider else new)
                yield Change(breaking, where, f"the conditions under {name!r} are others")
        if "items" in old or "items" in new:
            yield from self._schema(f"{where}[]", old.get("items", {}), new.get("items", {}), direction)
        yield from self._properties(where, old, new, direction)

    def _properties(self, where: str, old: Json, new: Json, direction: Direction) -> Iterator[Change]:
        was, now = old.get("properties", {}), new.get("properties", {})
        needed_before, needed = set(old.get("required", ())), set(new.get("required", ()))
        wider = direction == "answer"
        for name in sorted(was.keys() - now.keys()):
            yield Change(True, f"{where}.{name}", "the field is gone")
        for name in sorted(now.keys() - was.keys()):
            breaking = not wider and name in needed
            yield Change(breaking, f"{where}.{name}", "a new required field" if breaking else "a new field")
        for name in sorted(was.keys() & now.keys()):
            if (name in needed_before) != (name in needed):
                breaking = (name in needed) != wider
                yield Change(breaking, f"{where}.{name}", f"is {'required' if name in needed else 'optional'} now")
            yield from self._schema(f"{where}.{name}", was[name], now[name], direction)
        more_before, more = old.get("additionalProperties", True), new.get("additionalProperties", True)
        if isinstance(more_before, dict) and isinstance(more, dict):
            yield from self._schema(f"{where}.*", more_before, more, direction)
        elif contract(more_before) != contract(more) and not wider:
            breaking = more is False or isinstance(more, dict)
            yield Change(breaking, where, f"fields of other names: {'fewer' if breaking else 'more'} are taken")


def _operations(document: Json) -> dict[str, Json]:
    return {
        f"{method.upper()} {path}": operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }


def _parameters(operation: Json) -> dict[str, Json]:
    # The names of headers are the same in any case.
    return {
        f"{p['in']} parameter {p['name'].lower() if p['in'] == 'header' else p['name']}": p
        for p in operation.get("parameters", ())
    }


def _requirement(where: str, old: Json, new: Json, direction: Direction) -> Iterator[Change]:
    before, after = bool(old.get("required")), bool(new.get("required"))
    if before != after:
        yield Change(after == (direction == "request"), where, f"is {'required' if after else 'optional'} now")


def _resolve(document: Json, schema: Json) -> Json:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _alternatives(schema: Json) -> tuple[list[Json], bool]:
    """What a value may be, and whether it may be null."""
    kinds = schema.get("anyOf", [schema])
    some = [kind for kind in kinds if kind.get("type") != "null"]
    return some, len(some) < len(kinds)


def _kind(document: Json, schema: Json) -> str:
    """The name under which an alternative is found again."""
    reference: str = schema.get("$ref", "")
    return reference.rpartition("/")[2] or str(_resolve(document, schema).get("type", "any"))


def _columns(schema: Json) -> Json | None:
    """The columns of an Arrow stream as a schema like that of an object with one field for each."""
    columns = schema.get("x-arrow-columns")
    if columns is None:
        return None
    fields: Json = {}
    for column in columns:
        kinds = [{"enum": [column["type"], *filter(None, [column.get("also")])]}]
        fields[column["name"]] = {"anyOf": [*kinds, *([{"type": "null"}] if column["nullable"] else [])]}
        if "items_nullable" in column:
            fields[f"{column['name']}[]"] = {"anyOf": [{}, *([{"type": "null"}] if column["items_nullable"] else [])]}
    fields |= {f"metadata {name}": {} for name in schema.get("x-arrow-metadata", {})}
    optional = {column["name"] for column in columns if column.get("optional")}
    return {"type": "object", "properties": fields, "required": sorted(fields.keys() - optional)}


def _values(where: str, old: Json, new: Json, wider: bool) -> Iterator[Change]:
    was, now = _enum(old), _enum(new)
    if was == now:
        return
    if was is None or now is None:
        breaking = (now is not None) and not wider
        yield Change(breaking, where, "only some values are possible now" if was is None else "any value is possible")
        return
    for value in sorted(was - now):
        yield Change(True, where, f"the value {value} is gone")
    for value in sorted(now - was):
        yield Change(wider and not old.get("x-open"), where, f"the value {value} is new")


def _enum(schema: Json) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if values is None else {json.dumps(value) for value in values}


def _bounds(where: str, old: Json, new: Json, wider: bool) -> Iterator[Change]:
    for name in (*_UPPER, *_LOWER):
        was, now = old.get(name), new.get(name)
        if was == now:
            continue
        tighter = was is None or (now is not None and (now < was if name in _UPPER else now > was))
        yield Change(tighter != wider, where, f"{name} is {now}, no longer {was}")


def main(arguments: list[str]) -> int:
    """Compares two files and prints what is different."""
    if len(arguments) != 2:
        print("usage: python -m coordinator.openapi.compatibility OLD.json NEW.json", file=sys.stderr)
        return 2
    try:
        old, new = (json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments)
        found = changes(old, new)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"no two OpenAPI documents: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for change in found:
        print(change)
    broken = sum(change.breaking for change in found)
    print(f"{len(found)} changes, {broken} of them breaking" if found else "nothing has changed for a client")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
