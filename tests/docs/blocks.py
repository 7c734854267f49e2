"""Every fenced block of the documentation, as the tests play, hold or parse it.

sybil, mktestdocs and pytest-markdown-docs were looked at. They run blocks of one kind alike; here each block says, in a
comment above it that no reader sees, what has to be there when it runs:

    <!-- played: trainer -->     it runs in this scene of tests/docs/scenes.py
    <!-- held: why -->           a shell block that is not run: its commands are held against the programs' own help
    <!-- printed: quick start -->  text that the blocks played before it print
    <!-- shows: CreateRun -->    JSON or YAML that this model or schema of tests/docs/schemas.py takes

A block in another language than these, or one of which it is not known what to do with it, is a failure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TRANSLATION = re.compile(r"\.zh-CN\.md$|^docs/zh/")
"""Pages whose blocks are those of another page, and are run there alone."""
LANGUAGES = {"bash", "console", "ini", "json", "mermaid", "python", "text", "typescript", "yaml"}

_FENCE = re.compile(
    r"(?:^ *<!-- (?P<kind>[a-z]+): (?P<value>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block: `line` is the number of its first line of text, `kind` and `value` are of the mark above it."""

    page: str
    line: int
    language: str
    text: str
    kind: str | None
    value: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page in their order. AssertionError if a fence is not closed."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(
            str(page.relative_to(ROOT)),
            text.count("\n", 0, match.start("text")) + 1,
            match["language"],
            re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE),
            match["kind"],
            match["value"],
        )
        for match in _FENCE.finditer(text)
    ]
    fences = len(re.findall(r"^ *```", _FENCE.sub("", text), re.MULTILINE))
    assert fences == 0, f"{page}: a fence that is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
