"""Results are written once, read back as they are, and fit the published schema."""

import hashlib
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.worker_agent.closure.small import arm_result
from worker_agent.closure.profile import ClosureError
from worker_agent.closure.result import ArmResult, CoordinatorResult, now, read_result, schema, write_once

DOCS = Path(__file__).parents[3] / "docs" / "closure"
SCHEMAS = {"arm": ArmResult, "coordinator": CoordinatorResult}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "release.json"
    result = arm_result("one")
    write_once(path, result)
    assert read_result(path, ArmResult, "one", "release") == result
    assert read_result(tmp_path / "nothing.json", ArmResult, "one", "release") is None
    assert [file.name for file in path.parent.iterdir()] == ["release.json"]


def test_a_result_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "release.json"
    write_once(path, arm_result("one"))
    before = path.read_bytes(), path.stat().st_mtime_ns
    with pytest.raises(ClosureError, match="never overwritten"):
        write_once(path, arm_result("one", grad_norm=0.7))
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert os.listdir(tmp_path) == ["release.json"]


def test_a_check_that_did_not_pass_is_written_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "release.json"
    write_once(path, arm_result("one", error=float("nan"), grad_norm=float("inf")))
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["update"]["grad_norm"] is None
    assert found["decision"]["comparisons"]["same_version_after"]["max_abs_error"] is None
    assert found["log_probs"][0]["engine_after"] == [None, None]
    again = read_result(path, ArmResult, "one", "release")
    assert again is not None and not again.passed


@pytest.mark.parametrize(
    ("field", "value"),
    [("schema_version", 2), ("schema_version", None), ("run_label", "another"), ("arm", "retain")],
)
def test_another_experiments_result_is_an_error(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "release.json"
    path.write_text(json.dumps(json.loads(arm_result("one").model_dump_json()) | {field: value}))
    with pytest.raises(ClosureError, match=field):
        read_result(path, ArmResult, "one", "release")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"schema_version": 1, "run_label": "one", "arm": "release"}'])
def test_what_is_no_result_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "release.json"
    path.write_text(content)
    with pytest.raises(ClosureError, match=r"release\.json"):
        read_result(path, ArmResult, "one", "release")


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_published_schema_is_the_codes(name: str) -> None:
    published = (DOCS / f"{name}.schema.json").read_text()
    assert published == schema(SCHEMAS[name]) + "\n"
    jsonschema.Draft202012Validator.check_schema(json.loads(published))


def test_results_fit_the_schema() -> None:
    arm = jsonschema.Draft202012Validator(json.loads((DOCS / "arm.schema.json").read_text()))
    for result in (arm_result("one"), arm_result("one", error=float("nan"), grad_norm=float("nan"))):
        arm.validate(json.loads(result.model_dump_json()))
    skipped = CoordinatorResult(run_label="one", status="skipped", reason="why", created_at=now())
    coordinator = jsonschema.Draft202012Validator(json.loads((DOCS / "coordinator.schema.json").read_text()))
    coordinator.validate(json.loads(skipped.model_dump_json()))
    with pytest.raises(jsonschema.ValidationError):
        arm.validate(json.loads(arm_result("one").model_dump_json()) | {"unknown": 1})


@pytest.mark.parametrize("label", [path.name for path in DOCS.iterdir() if path.is_dir()])
def test_the_committed_result_is_what_its_page_says(label: str) -> None:
    folder = DOCS / label
    for name in ("release", "retain", "coordinator"):
        kind = "coordinator" if name == "coordinator" else "arm"
        validator = jsonschema.Draft202012Validator(json.loads((DOCS / f"{kind}.schema.json").read_text()))
        validator.validate(json.loads((folder / f"{name}.json").read_text()))
    release, retain = (read_result(folder / f"{arm}.json", ArmResult, label, arm) for arm in ("release", "retain"))
    through = read_result(folder / "coordinator.json", CoordinatorResult, label, "coordinator")
    assert release and release.update and release.decision and retain and retain.update and through
    assert release.passed and retain.passed and through.passed
    assert release.initialization == retain.initialization
    assert release.update.after_sha256 == retain.update.after_sha256 == through.adapter_sha256
    fixture = files("worker_agent.closure").joinpath("fixtures", "smollm2-135m-instruct.json").read_bytes()
    assert {release.fixture_sha256, retain.fixture_sha256} == {hashlib.sha256(fixture).hexdigest()}
    page = (DOCS.parent / "closure.md").read_text()
    numbers = [
        release.update.after_sha256[:12],
        str(release.decision.sync_rpc_and_version.engine_digest_after)[:12],
        f"{release.update.loss:.5f}, {release.update.grad_norm:.5f}",
        f"{release.update.delta_l2:.6f}, {release.update.changed_tensors} of {release.update.tensors}",
        f"{sum(row.accepted for row in release.decision.admission)} of {len(release.decision.admission)}",
        "| "
        + " | ".join(
            f"{row.drift:.3f}" if row.accepted else f"**{row.drift:.3f}**" for row in release.decision.admission
        ),
    ]
    assert [number for number in numbers if number not in page] == []
