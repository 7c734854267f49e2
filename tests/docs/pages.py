"""What the documentation takes from the code. `python tests/docs/pages.py` writes it into the pages."""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.rules.lifecycle import mermaid_diagram
from coordinator.settings import Settings
from coordinator.wire.problems import PROBLEMS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"lifecycle": DOCS / "guarantees.md", "codes": DOCS / "api.md", "settings": DOCS / "operating.md"}
"""The page of each generated part, by the name of its marker."""


def generated(name: str) -> str:
    """A part as the code has it now."""
    match name:
        case "lifecycle":
            return f"```mermaid\n{mermaid_diagram().strip()}\n```"
        case "codes":
            rows = [f"| `{p.code}` | {p.status} | {p.title} | {p.next_step} |" for p in PROBLEMS.values()]
            return "\n".join(["| code | status | what it says | what to do |", "|---|---|---|---|", *rows])
        case "settings":
            return "\n".join(["| variable | left out | meaning |", "|---|---|---|", *_settings()])
    raise ValueError(name)


def _settings() -> list[str]:
    prefix = Settings.model_config["env_prefix"]
    return [
        f"| `{field.validation_alias or prefix + name.upper()}` "
        f"| {'' if field.default is None else f'`{field.default}`'} | {field.description} |"
        for name, field in Settings.model_fields.items()
    ]


def fill(name: str, page: str) -> str:
    """The page with its generated part between the markers as the code has it now."""
    pattern = re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- end -->)", re.DOTALL)
    page, count = pattern.subn(lambda found: f"{found[1]}{generated(name)}\n{found[2]}", page)
    assert count == 1, name
    return page


if __name__ == "__main__":
    for part, path in PAGES.items():
        path.write_text(fill(part, path.read_text(encoding="utf-8")), encoding="utf-8")
