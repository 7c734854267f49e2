"""The documentation says what the code does: generated parts, links, names of tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from coordinator.wire.diagnosis import Blocker
from coordinator.wire.policies import ActivationVerdict
from coordinator.wire.rollouts import ArrivalVerdict, RewardOutcome
from coordinator.wire.updates import EmptyReason, ReserveVerdict
from coordinator.wire.workers import AckVerdict
from tests.docs.pages import DOCS, PAGES, fill

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", PAGES)
def test_generated_parts_are_up_to_date(part: str) -> None:
    page = PAGES[part].read_text(encoding="utf-8")
    assert page == fill(part, page), "run: python tests/docs/pages.py"


def test_links_lead_somewhere() -> None:
    for page in (*ROOT.glob("README*.md"), *DOCS.rglob("*.md"), ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\((?![a-z]+:)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tests_that_hold_a_guarantee_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "guarantees.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    for file, name in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{file}::{name}"


@pytest.mark.parametrize(
    ("heading", "words"),
    [
        ("A rollout that arrives", ArrivalVerdict.model_fields["verdict"].annotation),
        ("A reward", RewardOutcome),
        ("A reservation", ReserveVerdict.model_fields["verdict"].annotation),
        ("An ack", AckVerdict.model_fields["reason"].annotation),
        ("A switch", ActivationVerdict.model_fields["reason"].annotation),
        ("Empty candidates", EmptyReason.model_fields["reason"].annotation),
        ("Why training does not move", Blocker.model_fields["code"].annotation),
    ],
)
def test_every_word_of_an_answer_is_explained_in_its_order(heading: str, words: Any) -> None:
    section = (DOCS / "codes.md").read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1].split("\n#", 1)[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(get_args(words))
