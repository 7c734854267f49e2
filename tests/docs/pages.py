"""What the documentation takes from the code. `python tests/docs/pages.py` writes it into the pages."""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.rules.lifecycle import mermaid_diagram
from coordinator.wire.problems import PROBLEMS

CONCEPTS = Path(__file__).parents[2] / "docs" / "concepts.md"


def generated() -> dict[str, str]:
    """The parts of the page that come from the code, by the name of their marker."""
    codes = [f"| `{p.code}` | {p.status} | {p.title} | {p.next_step} |" for p in PROBLEMS.values()]
    return {
        "lifecycle": f"```mermaid\n{mermaid_diagram().strip()}\n```",
        "codes": "\n".join(["| code | status | what it says | what to do |", "|---|---|---|---|", *codes]),
    }


def fill(page: str) -> str:
    """The page with each generated part between its markers as the code has it now."""
    for name, part in generated().items():
        pattern = re.compile(rf"(<!-- {name}: generated -->\n).*?(\n<!-- end -->)", re.DOTALL)
        page, count = pattern.subn(lambda found, part=part: found[1] + part + found[2], page)
        assert count == 1, name
    return page


if __name__ == "__main__":
    CONCEPTS.write_text(fill(CONCEPTS.read_text(encoding="utf-8")), encoding="utf-8")
