"""Every event that the journal can hold is documented with its detail: read from the source, and from what was told."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from coordinator.wire.events import EVENTS
from tests.api.story import ANSWERS
from tests.docs.pages import DOCS

SOURCE = Path(__file__).parents[2] / "coordinator"
TREES = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def constants(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def values(expression: ast.expr, function: Function) -> Iterator[str]:
    """What a text may be: written there, chosen in the same function, or handed in by those who call it."""
    match expression:
        case ast.Constant(value=str(value)):
            yield value
        case ast.IfExp():
            yield from values(expression.body, function)
            yield from values(expression.orelse, function)
        case ast.JoinedStr(values=[ast.Constant(value=str(begin)), ast.FormattedValue(value=ast.Name() as rest)]):
            yield from (begin + value for value in values(rest, function))
        case ast.Name(id=name):
            parameters = [argument.arg for argument in function.args.args]
            if name in parameters:
                place = parameters.index(name)
                for caller, call in calls(function.name):
                    yield from values(call.args[place], caller)
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
                    yield from values(node.value, function)
        case _:
            raise AssertionError(f"{function.name}: cannot read the event's name from {ast.unparse(expression)}")


def calls(name: str) -> Iterator[tuple[Function, ast.Call]]:
    """Every call of a function of this name, with the function that it stands in."""
    for tree in TREES:
        for function in ast.walk(tree):
            if isinstance(function, Function):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and name_of(node) == name and len(node.args) > 3:
                        yield function, node


def recorded() -> dict[str, list[set[str]]]:
    """Each event that some call records, with the detail of each of these calls."""
    found: defaultdict[str, list[set[str]]] = defaultdict(list)
    for function, call in calls("record_event"):
        fields = {keyword.arg for keyword in call.keywords}
        assert None not in fields, f"{function.name} records fields that cannot be read from the source"
        names = list(values(call.args[2], function))
        assert names, f"{function.name}: no name for {ast.unparse(call.args[2])}"
        for name in names:
            found[name].append({str(field) for field in fields})
    return dict(found)


def test_every_event_of_the_source_is_described_and_no_other() -> None:
    found = recorded()
    assert sorted(found) == sorted(EVENTS)
    for name, details in found.items():
        kind = EVENTS[name]
        assert set(kind.detail) == set.intersection(*details), name
        assert set(kind.detail) | set(kind.sometimes) == set.union(*details), name


def test_what_was_told_has_just_the_described_detail() -> None:
    (journal,) = [step["body"] for step in json.loads(ANSWERS.read_text()) if step["operation"] == "get_journal"]
    assert len(journal["entries"]) > 20
    for entry in journal["entries"]:
        kind = EVENTS[entry["event"]]
        assert set(kind.detail) <= entry["detail"].keys() <= {*kind.detail, *kind.sometimes}, entry


def test_the_page_names_every_event_and_every_field() -> None:
    rows = {row.split("`")[1]: row for row in (DOCS / "events.md").read_text().splitlines() if row.startswith("| `")}
    for name, kind in EVENTS.items():
        assert all(f"`{field}`" in rows[name] for field in (*kind.detail, *kind.sometimes)), name
