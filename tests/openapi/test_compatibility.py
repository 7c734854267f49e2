"""A change of the API that breaks clients is told from one that does not, for each kind of change."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.openapi.compatibility import Change, changes
from tests.docs.pages import OPENAPI

Json = dict[str, Any]
DOCUMENT: Json = json.loads(OPENAPI.read_text(encoding="utf-8"))
RUN = "/v1/runs/{run_id}"
ARROW = "application/vnd.apache.arrow.stream"


def call(document: Json, method: str, path: str) -> Json:
    found: Json = document["paths"][path][method]
    return found


def field(document: Json, model: str, name: str) -> Json:
    found: Json = document["components"]["schemas"][model]["properties"][name]
    return found


def parameter(document: Json, method: str, path: str, name: str) -> Json:
    found: Json = next(p for p in call(document, method, path)["parameters"] if p["name"] == name)
    return found


def columns(document: Json, side: str) -> list[Json]:
    reserve = call(document, "post", RUN + "/updates/{update_id}/candidates" if side == "answer" else RUN + "/rollouts")
    content = reserve["responses"]["200"]["content"] if side == "answer" else reserve["requestBody"]["content"]
    found: list[Json] = content[ARROW]["schema"]["x-arrow-columns"]
    return found


def add_call(d: Json) -> None:
    d["paths"][RUN]["patch"] = copy.deepcopy(d["paths"][RUN]["get"])


def add_parameter(d: Json, required: bool) -> None:
    new = {"name": "x", "in": "query", "required": required, "schema": {"type": "string"}}
    call(d, "get", RUN + "/rollouts")["parameters"].append(new)


def add_field(d: Json, model: str, required: bool) -> None:
    schema = d["components"]["schemas"][model]
    schema["properties"]["x"] = {"type": "string"}
    if required:
        schema["required"].append("x")


def need(d: Json, model: str, name: str) -> None:
    d["components"]["schemas"][model]["required"].append(name)


def free(d: Json, model: str, name: str) -> None:
    d["components"]["schemas"][model]["required"].remove(name)


def new_answer(d: Json, status: str) -> None:
    answers = call(d, "get", RUN)["responses"]
    answers[status] = copy.deepcopy(answers["404"])


def without_code(d: Json) -> None:
    d["components"]["schemas"]["ProblemCode"]["enum"].remove("no_space")


def move_column(d: Json, side: str, **change: Any) -> None:
    columns(d, side)[0].update(change)


BREAKING: dict[str, tuple[Callable[[Json], Any], str]] = {
    "a call": (lambda d: d["paths"][RUN].pop("get"), "the call is gone"),
    "a path": (lambda d: d["paths"].pop(RUN + "/watch"), "the call is gone"),
    "a name": (lambda d: call(d, "get", RUN).update(operationId="show_run"), "operationId"),
    "a token is asked for": (lambda d: call(d, "get", "/healthz").update(security=[{"HTTPBearer": []}]), "token"),
    "a token is sent in another way": (
        lambda d: d["components"]["securitySchemes"].update(HTTPBearer={"type": "http", "scheme": "basic"}),
        "security scheme HTTPBearer",
    ),
    "another base address": (lambda d: d.update(servers=[{"url": "/api"}]), "servers"),
    "a parameter is written in another way": (
        lambda d: parameter(d, "get", RUN + "/rollouts", "limit").update(explode=False), "in another way",
    ),
    "a role": (lambda d: call(d, "get", RUN)["x-roles"].remove("viewer"), "role viewer"),
    "a parameter": (lambda d: call(d, "get", RUN + "/rollouts")["parameters"].pop(), "parameter is gone"),
    "a new required parameter": (lambda d: add_parameter(d, True), "a new required parameter"),
    "a parameter is required": (
        lambda d: parameter(d, "get", RUN + "/watch", "after").update(required=True), "required now",
    ),
    "a tighter parameter": (
        lambda d: parameter(d, "get", RUN + "/rollouts", "limit")["schema"].update(maximum=50), "maximum is 50",
    ),
    "another default": (
        lambda d: parameter(d, "get", RUN + "/rollouts", "limit")["schema"].update(default=10), "left out it is 10",
    ),
    "a body is required": (
        lambda d: call(d, "post", RUN + "/policies/{version}/commit").update(
            requestBody=call(d, "post", "/v1/runs")["requestBody"]
        ), "there is one now",
    ),
    "no body": (lambda d: call(d, "post", "/v1/runs").pop("requestBody"), "none any more"),
    "a media type of a body": (
        lambda d: call(d, "post", RUN + "/rollouts")["requestBody"]["content"].pop(ARROW), f"{ARROW} is gone",
    ),
    "a media type of an answer": (
        lambda d: call(d, "post", RUN + "/rollouts/evidence")["responses"]["200"]["content"].pop(ARROW), "is gone",
    ),
    "a field of a body": (
        lambda d: d["components"]["schemas"]["FenceWorker"]["properties"].pop("reason"), "FenceWorker.reason",
    ),
    "a new required field of a body": (lambda d: add_field(d, "Renew", True), "Renew.x: a new required field"),
    "a field of a body is required": (lambda d: need(d, "OpenUpdate", "policy_version"), "policy_version: is required"),
    "a value of a body": (lambda d: field(d, "Rollout", "span_source")["enum"].remove("engine"), '"engine" is gone'),
    "a tighter length": (lambda d: field(d, "FenceWorker", "reason").update(maxLength=10), "maxLength is 10"),
    "a tighter number": (lambda d: field(d, "CreateRun", "vocab_size").update(minimum=2), "minimum is 2"),
    "another pattern": (lambda d: field(d, "CreateRun", "run_id").update(pattern="^x$"), "pattern"),
    "another type of a field": (lambda d: field(d, "CreateRun", "vocab_size").update(type="string"), "type is string"),
    "a narrower type": (lambda d: field(d, "Reward", "value")["anyOf"][0].update(type="integer"), "type is integer"),
    "no null in a body": (lambda d: field(d, "Reward", "value")["anyOf"].pop(), "null is impossible"),
    "an alternative of a body": (lambda d: field(d, "RunSettings", "min_usable")["anyOf"].pop(1), "alternative"),
    "another condition": (
        lambda d: d["components"]["schemas"]["OpenUpdate"].update({"else": {"required": ["owner"]}}), "conditions",
    ),
    "tighter items": (
        lambda d: field(d, "Rollout", "token_ids")["items"].update(minimum=0), "Rollout.token_ids[]: minimum is 0",
    ),
    "an answer": (lambda d: call(d, "post", "/v1/runs")["responses"].pop("201"), "201: is answered no more"),
    "another good answer": (lambda d: new_answer(d, "202"), "202: is new"),
    "a field of an answer": (
        lambda d: d["components"]["schemas"]["RunCounts"]["properties"].pop("rollouts"), "RunCounts.rollouts",
    ),
    "a field of an answer may be left out": (lambda d: free(d, "RunCounts", "rollouts"), "is optional now"),
    "a field of an answer may be null": (
        lambda d: field(d, "RunView", "created_at").update(anyOf=[{"type": "string"}, {"type": "null"}]),
        "null is possible",
    ),
    "a value of an answer": (lambda d: field(d, "UpdateView", "state")["enum"].remove("open"), '"open" is gone'),
    "a value of an answer more": (
        lambda d: field(d, "UpdateView", "state")["enum"].append("paused"), '"paused" is new',
    ),
    "a wider type of an answer": (lambda d: field(d, "RunView", "event_no").update(type="number"), "type is number"),
    "an open answer": (lambda d: field(d, "RunView", "contract_hash").pop("pattern"), "pattern is None"),
    "a header": (
        lambda d: call(d, "get", RUN)["responses"]["503"]["headers"].pop("Retry-After"), "the header is gone",
    ),
    "a new Arrow column": (
        lambda d: columns(d, "request").append(
            {"name": "x", "type": "utf8", "nullable": False, "description": ""}
        ), ".x: a new required field",
    ),
    "an Arrow column": (lambda d: columns(d, "answer").pop(0), ".rollout_id: the field is gone"),
    "an Arrow type": (lambda d: move_column(d, "request", type="large_utf8"), '"utf8" is gone'),
    "no null in an Arrow column": (
        lambda d: columns(d, "request")[-1].update(nullable=False), "null is impossible now",
    ),
    "null in an Arrow column": (lambda d: move_column(d, "answer", nullable=True), "null is possible now"),
}  # fmt: skip

FINE: dict[str, tuple[Callable[[Json], Any], str]] = {
    "a new call": (add_call, "the call is new"),
    "a role more": (lambda d: call(d, "post", "/v1/runs")["x-roles"].append("viewer"), "role viewer"),
    "no token": (lambda d: call(d, "get", RUN).pop("security"), ""),
    "a new optional parameter": (lambda d: add_parameter(d, False), "a new optional parameter"),
    "a wider parameter": (
        lambda d: parameter(d, "get", RUN + "/rollouts", "limit")["schema"].update(maximum=10**6), "maximum",
    ),
    "a new optional field of a body": (lambda d: add_field(d, "Renew", False), "Renew.x: a new field"),
    "a field of a body is optional": (lambda d: free(d, "Renew", "owner"), "is optional now"),
    "a value of a body more": (
        lambda d: field(d, "Rollout", "span_source")["enum"].append("human"), '"human" is new',
    ),
    "a wider length": (lambda d: field(d, "FenceWorker", "reason").update(maxLength=10**4), "maxLength"),
    "no pattern": (lambda d: field(d, "CreateRun", "run_id").pop("pattern"), "pattern is None"),
    "a wider type": (lambda d: field(d, "CreateRun", "vocab_size").update(type="number"), "type is number"),
    "a media type more": (
        lambda d: call(d, "post", "/v1/runs")["requestBody"]["content"].update({"text/csv": {}}), "text/csv is new",
    ),
    "no condition": (lambda d: d["components"]["schemas"]["OpenUpdate"].pop("else"), "conditions"),
    "a new field of an answer": (lambda d: add_field(d, "RunCounts", True), "RunCounts.x: a new field"),
    "a field of an answer is always there": (lambda d: need(d, "ProblemDocument", "item"), "is required now"),
    "a tighter answer": (lambda d: field(d, "RunView", "event_no").update(maximum=10**6), "maximum"),
    "a new code": (lambda d: d["components"]["schemas"]["ProblemCode"]["enum"].append("asleep"), '"asleep" is new'),
    "a refusal more": (lambda d: new_answer(d, "418"), "418: is new"),
    "a refusal less": (lambda d: call(d, "get", RUN)["responses"].pop("404"), "404: is answered no more"),
    "a header more": (
        lambda d: call(d, "get", RUN)["responses"]["200"].update(
            headers={"X": {"required": True, "schema": {"type": "string"}}}
        ), "a new header",
    ),
    "an Arrow column that may be left out": (
        lambda d: columns(d, "request").append(
            {"name": "x", "type": "utf8", "nullable": True, "description": "", "optional": True}
        ), ".x: a new field",
    ),
    "an Arrow column of an answer more": (
        lambda d: columns(d, "answer").append({"name": "x", "type": "utf8", "nullable": True, "description": ""}),
        ".x: a new field",
    ),
    "null in an Arrow column of a body": (lambda d: move_column(d, "request", nullable=True), "null is possible now"),
}  # fmt: skip


def planted(change: Callable[[Json], Any]) -> list[Change]:
    document = copy.deepcopy(DOCUMENT)
    change(document)
    assert document != DOCUMENT
    return changes(DOCUMENT, document)


def test_a_change_that_breaks_a_client_is_called_so() -> None:
    for name, (change, text) in BREAKING.items():
        found = planted(change)
        assert found and found[0].breaking, (name, found)
        assert any(text in str(c) for c in found if c.breaking), (name, [str(c) for c in found])


def test_a_change_that_breaks_nobody_is_called_so() -> None:
    for name, (change, text) in FINE.items():
        found = planted(change)
        assert not [c for c in found if c.breaking], (name, [str(c) for c in found])
        assert any(text in str(c) for c in found) or not text, (name, [str(c) for c in found])


def test_what_no_client_notices_is_no_change() -> None:
    def reword(value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name in ("description", "summary") and isinstance(inner, str):
                    value[name] = "other words"
                reword(inner)
        elif isinstance(value, list):
            for inner in value:
                reword(inner)

    assert planted(reword) == []


def test_a_change_of_a_shared_model_is_told_once() -> None:
    (change,) = planted(lambda d: field(d, "PolicyView", "state")["enum"].remove("retired"))
    assert str(change) == 'BREAKING: PolicyView.state: the value "retired" is gone'


@pytest.mark.parametrize(("change", "status"), [("nothing", 0), ("fine", 0), ("breaking", 1), ("cut off", 2)])
def test_the_command_says_it_by_its_exit_status(change: str, status: int, tmp_path: Path) -> None:
    document = copy.deepcopy(DOCUMENT)
    if change == "fine":
        add_call(document)
    elif change == "breaking":
        document["paths"].pop(RUN)
    new = tmp_path / "new.json"
    new.write_text(json.dumps(document)[: 1000 if change == "cut off" else None], encoding="utf-8")
    command = [sys.executable, "-m", "coordinator.openapi.compatibility", str(OPENAPI), str(new)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    last = done.stdout.splitlines()[-1] if status < 2 else done.stderr.strip()
    assert (
        last
        == {
            "nothing": "nothing has changed for a client",
            "fine": "1 changes, 0 of them breaking",
            "breaking": "1 changes, 1 of them breaking",
            "cut off": last,
        }[change]
    )
    assert status < 2 or last.startswith("no two OpenAPI documents: ")
