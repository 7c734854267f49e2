"""The worked example of the artifact hash, as another language would have to compute it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys

from coordinator.rules.manifest import artifact_hash, canonical_manifest
from tests.docs.blocks import BLOCKS
from tests.docs.pages import DOCS

PAGE = (DOCS / "artifacts.md").read_text(encoding="utf-8")
FILES = {"adapter_config.json": b'{"r": 16}', "notes/gr\u00f6\u00dfe.txt": b"1"}
BASE = {"name": "org/tiny", "revision": "main", "sha256": hashlib.sha256(b"").hexdigest()}


def example(language: str) -> str:
    """The page's block in this language that makes the hash."""
    [found] = [b for b in BLOCKS if (b.page, b.language) == ("docs/artifacts.md", language) and "base_model" in b.text]
    return found.text


def test_every_way_of_the_page_gives_the_hash_that_the_coordinator_computes() -> None:
    files = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in FILES.items()
    ]
    expected = artifact_hash("lora", BASE, files)
    shell = subprocess.run(["sh", "-c", example("bash")], capture_output=True, text=True, check=True)
    assert shell.stdout.split() == [expected, "-"]
    python = subprocess.run([sys.executable, "-c", example("python")], capture_output=True, text=True, check=True)
    assert python.stdout.strip() == expected
    assert f"Both print `{expected}`." in PAGE


def test_text_is_escaped_as_the_page_says() -> None:
    """Every character that a base model's name may hold and JSON could write in more than one way."""
    names = re.search(r"but for (.*?), and `\\u00xx`", PAGE, re.DOTALL)
    assert names is not None
    short = {json.loads(f'"{escape}"'): escape for escape in re.findall(r"`(.+?)`", names[1])}
    assert len(short) == 7
    for code in (*range(1, 0x200), 0x2028, 0x2029, 0xFFFF, 0x1F600):
        character = chr(code)
        written = short.get(character, f"\\u{code:04x}" if code < 0x20 else character)
        text = canonical_manifest("base", BASE | {"name": f"x{character}"}, []).decode()
        assert f'"name":"x{written}",' in text, hex(code)


def test_files_are_sorted_by_code_points() -> None:
    """Not by UTF-16 units, in which an emoji would come before U+FF5E."""
    names = ["\uff5e", "\U0001f600", "a", "B", "a/b", "a-b"]
    names.remove("a")  # it would be the folder of another
    files = [{"name": name, "size": 0, "sha256": hashlib.sha256(b"").hexdigest()} for name in names]
    found = json.loads(canonical_manifest("lora", None, files))
    assert [file["name"] for file in found["files"]] == ["B", "a-b", "a/b", "\uff5e", "\U0001f600"]
