"""The quick start, from its first block to its last in one empty folder, with a coordinator of its own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docs.blocks import BLOCKS, ROOT, blocks_of
from tests.docs.commands import check_all, recorded
from tests.docs.playing import play, shell

PAGE = ROOT / "docs" / "quick-start.md"


def test_every_block_in_its_order(tmp_path: Path) -> None:
    folder, said = tmp_path / "anywhere", ""
    folder.mkdir()
    with shell(tmp_path) as environment:
        for block in blocks_of(PAGE):
            if block.kind == "played":
                said += play(block.text, folder, environment)
            elif block.kind == "printed":
                assert block.text in said, f"{block}: printed was {said}"
                if block.text.startswith("sum-1:0: accepted"):  # as the page says
                    assert play("python first_rollout.py", folder, environment).startswith("sum-1:0: duplicate")
            else:
                check_all(recorded(block.text, tmp_path))
    lineage = json.loads(said.splitlines()[-1])
    assert [(member["rollout_id"], member["outcome"]) for member in lineage["members"]] == [("sum-1:0", "consumed")]


def test_other_pages_show_blocks_of_the_quick_start_as_they_are() -> None:
    here = {(block.language, block.value, block.text) for block in blocks_of(PAGE)}
    others = [block for block in BLOCKS if block.value == "quick start"]
    assert {block.page for block in others} > {"README.md", "docs/quick-start.md"}
    assert {(block.language, block.value, block.text) for block in others} <= here
