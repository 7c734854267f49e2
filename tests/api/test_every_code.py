"""Every code, verdict, reason and state that the server may answer is what some test expects.

Read from the source: a new one without a test fails here, and is named.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel

from coordinator.rules.reservation import RESERVE_REASONS
from coordinator.storage.tables import metadata
from coordinator.wire.problems import PROBLEMS
from tests.api.ledger import Api

TESTS = Path(__file__).parents[1]
SOURCE = Path(__file__).parents[2] / "coordinator"
UNREACHED: frozenset[str] = frozenset()
"""Stated already, and given by no call yet."""
WORD = re.compile(r"[A-Za-z0-9_.]+")


@lru_cache(maxsize=1)
def expected() -> frozenset[str]:
    """Every text that a test compares an answer with: in an assertion, in a refusal, or in a table of cases."""
    found: set[str] = set()
    for path in TESTS.rglob("*.py"):
        if path != Path(__file__):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                for part in _expectations(node):
                    texts = (
                        n.value for n in ast.walk(part) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                    )
                    for text in texts:
                        found.update((text, *WORD.findall(text)))
    return frozenset(found)


def _expectations(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assert):
        yield node.test
    elif isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name == "refused":
            yield from node.args[2:]
        elif name in ("parametrize", "raises"):
            yield node


def untested(codes: set[str]) -> str:
    """Those that no test expects, by name."""
    return ", ".join(sorted(codes - expected() - UNREACHED))


def literals(kind: Any) -> Iterator[str]:
    """The members of every Literal in a type; models are walked by themselves."""
    origin = get_origin(kind)
    if origin is Literal:
        yield from (value for value in get_args(kind) if isinstance(value, str))
    elif origin is Annotated:
        yield from literals(get_args(kind)[0])
    elif origin is not None or isinstance(kind, UnionType):
        for inner in get_args(kind):
            yield from literals(inner)


def models(kind: Any) -> Iterator[type[BaseModel]]:
    """The models in a type, and those in their fields."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for hint in get_type_hints(kind, include_extras=True).values():
            yield from models(hint)
    elif get_origin(kind) in (Union, UnionType, Annotated, list, tuple, dict) or isinstance(kind, UnionType):
        for inner in get_args(kind):
            yield from models(inner)


async def test_every_problem_code_is_expected_somewhere(api: Api) -> None:
    assert untested(set(PROBLEMS)) == ""


async def test_every_word_of_every_answer_is_expected_somewhere(api: Api) -> None:
    """Of models that are answers and nothing that a caller sends."""
    routes = [route for route in api.app.routes if isinstance(route, APIRoute)]
    answers = {model for route in routes for model in models(route.response_model)}
    sent = {
        model
        for route in routes
        for name, hint in get_type_hints(route.endpoint, include_extras=True).items()
        for model in models(hint)
        if name != "return"
    }
    fields = [field for model in answers - sent for field in model.model_fields.values()]
    words = {word for field in fields for word in literals(field.annotation)}
    assert {"conflict", "policy_drift", "idempotent_retry", "other_ruleset", "given_up", "released"} <= words
    assert untested(words) == ""


def calls(name: str) -> Iterator[ast.Call]:
    """Every call of this name in the server's source."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) == name:
                yield node


def texts_of(node: ast.AST) -> Iterator[str]:
    """A text as written, or both arms of a choice; a text that is put together is skipped."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp():
            yield from texts_of(node.body)
            yield from texts_of(node.orelse)


def test_every_fault_that_rejects_a_rollout_is_expected_somewhere() -> None:
    faults = {text for call in calls("Fault") for text in texts_of(call.args[0])}
    assert {"contract_mismatch", "rows_malformed", "side_data_mismatch", "wrong_worker"} <= faults
    assert untested(faults) == ""


def test_every_reason_that_a_statement_gives_is_expected_somewhere() -> None:
    """What SQL puts after THEN or into a reason: gates on arrival, at release, and at reserve."""
    reasons = set(RESERVE_REASONS)
    for path in SOURCE.rglob("*.py"):
        reasons |= set(re.findall(r"(?:THEN|ELSE) '([a-z]+(?:_[a-z]+)+)'", path.read_text(encoding="utf-8")))
    assert {"policy_unknown", "worker_not_acked", "group_spent", "beyond_retention", "recorded_failure"} <= reasons
    assert untested(reasons) == ""


def test_every_event_of_the_journal_is_expected_somewhere() -> None:
    events = {text for call in calls("record_event") for arg in call.args for text in texts_of(arg) if "." in text}
    assert {"policy.withdrawn", "line.rewound", "worker.acked"} <= events
    assert untested(events) == ""


def test_every_stage_and_kind_of_failure_is_expected_somewhere() -> None:
    kinds = {text for call in calls("record_failure") for arg in call.args[2:4] for text in texts_of(arg)}
    stages = next(c for c in metadata.tables["failures"].constraints if str(c.name).endswith("stage"))
    kinds |= set(re.findall(r"'(\w+)'", str(getattr(stages, "sqltext", ""))))
    assert {"generation", "reward", "update", "artifact", "distribution", "activation"} <= kinds
    assert untested(kinds) == ""


def test_what_is_unreached_is_expected_nowhere() -> None:
    assert sorted(UNREACHED & expected()) == []


def test_a_code_that_no_test_names_is_found() -> None:
    assert untested({"policy_unknown", "no_such_" + "code"}) == "no_such_code"
