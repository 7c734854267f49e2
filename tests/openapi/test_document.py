"""docs/openapi.json is the app's own, and what it promises is at least what the last release promised."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.openapi.compatibility import Change, changes
from tests.docs.pages import OPENAPI, openapi_file
from tests.openapi.release import RELEASED

Json = dict[str, Any]


def may_break(released: str, now: str) -> bool:
    """Whether a release of this version may break clients of that one: 0.2.0 those of 0.1.9, 2.0.0 those of 1.9.0."""
    before, after = ([int(part) for part in version.split(".")[:2]] for version in (released, now))
    return after > before if before[0] == 0 else after[0] > before[0]


def lines(found: list[Change]) -> str:
    return "\n".join(map(str, found))


def test_the_committed_document_is_the_app_s() -> None:
    committed = OPENAPI.read_text(encoding="utf-8")
    if committed != openapi_file():
        found = changes(json.loads(committed), json.loads(openapi_file()))
        pytest.fail(f"the API has changed; run: python tests/docs/pages.py\n{lines(found) or 'only texts'}")


def test_no_client_of_the_last_release_is_broken() -> None:
    released: Json = json.loads(RELEASED.read_text(encoding="utf-8"))
    document: Json = json.loads(openapi_file())
    broken = [change for change in changes(released, document) if change.breaking]
    was, now = released["info"]["version"], document["info"]["version"]
    assert not broken or may_break(was, now), (
        f"this breaks clients of {was}: take it back, or raise the version in pyproject.toml\n{lines(broken)}"
    )


@pytest.mark.parametrize(
    ("released", "now", "allowed"),
    [
        ("0.1.0", "0.1.0", False),
        ("0.1.0", "0.1.7", False),
        ("0.1.9", "0.2.0", True),
        ("0.9.0", "0.10.0", True),
        ("0.9.0", "1.0.0", True),
        ("1.0.0", "1.1.0", False),
        ("1.9.3", "2.0.0", True),
    ],
)
def test_only_a_release_that_says_so_may_break_clients(released: str, now: str, allowed: bool) -> None:
    assert may_break(released, now) is allowed
