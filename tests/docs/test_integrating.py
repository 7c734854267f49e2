"""docs/integrating.md is played: each block prints what stands below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.client.server_process import ServerProcess
from tests.docs.pages import DOCS

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
END = "--- the end of a block ---"


def test_each_block_prints_what_stands_below_it(server: ServerProcess, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / "integrating.md").read_text(encoding="utf-8"))
    script, expected = [], []
    for number, (language, text) in enumerate(blocks):
        if language == "bash" and "compatibility OLD" not in text:
            script.append(text)
        elif language == "python":
            (tmp_path / f"{number}.py").write_text(text, encoding="utf-8")
            script.append(f'URL="$URL" TOKEN="$TOKEN" {sys.executable} {number}.py')
        if language != "text" and blocks[number + 1 :] and blocks[number + 1][0] == "text":
            script.append(f"echo; echo '{END}'")
            expected.append(blocks[number + 1][1].strip())
    assert len(expected) >= 6
    (tmp_path / ".data").symlink_to(server.data)
    played = subprocess.run(
        ["bash", "-eu", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("COORDINATOR_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    assert [said.strip() for said in played.stdout.split(END)[:-1]] == expected
