"""The quick start, from its first block to its last in one empty folder, with a coordinator of its own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docs.blocks import ROOT, blocks_of
from tests.docs.commands import check, recorded
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
                for command in recorded(block.text, tmp_path):
                    check(command)
    lineage = json.loads(said.splitlines()[-1])
    assert [(member["rollout_id"], member["outcome"]) for member in lineage["members"]] == [("sum-1:0", "consumed")]
