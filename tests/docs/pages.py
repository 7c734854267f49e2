"""What the documentation takes from the code. `python tests/docs/pages.py` writes it into the pages."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordinator.app import create_app
from coordinator.cli import reference
from coordinator.metrics.listing import every_metric
from coordinator.operations.access import ALL_ROLES
from coordinator.rules.lifecycle import mermaid_diagram
from coordinator.settings import Settings
from coordinator.storage.database import connect
from coordinator.wire.columns import ARROW_MEDIA_TYPE
from coordinator.wire.events import EVENTS
from coordinator.wire.problems import PROBLEMS
from coordinator.wire.runs import RunSettings
from worker_agent import run_settings
from worker_agent.status.metrics import Numbers
from worker_agent.status.vitals import Vitals

DOCS = Path(__file__).parents[2] / "docs"
OPENAPI = DOCS / "openapi.json"
PAGES = {
    "lifecycle": DOCS / "guarantees.md",
    "calls": DOCS / "api.md",
    "access": DOCS / "roles.md",
    "curl": DOCS / "api.md",
    "arrow": DOCS / "api.md",
    "codes": DOCS / "codes.md",
    "settings": DOCS / "settings.md",
    "run settings": DOCS / "settings.md",
    "events": DOCS / "events.md",
    "worker settings": DOCS / "worker-agent.md",
    "worker metrics": DOCS / "worker-agent.md",
    "metrics": DOCS / "metrics.md",
    "exit codes": DOCS / "command-line.md",
    "common options": DOCS / "command-line.md",
    "commands": DOCS / "command-line.md",
    "export columns": DOCS / "command-line.md",
}
"""The page of each generated part, by the name of its marker."""


def generated(name: str) -> str:
    """A part as the code has it now."""
    match name:
        case "lifecycle":
            return f"```mermaid\n{mermaid_diagram().strip()}\n```"
        case "calls":
            return "\n".join(_calls())
        case "access":
            head = ["call", *CALLERS]
            return "\n".join([_row(head), "|---" * len(head) + "|", *_access()])
        case "curl":
            script = (DOCS.parent / "examples" / "curl.sh").read_text(encoding="utf-8")
            mark = "<!-- played: curl from nothing -->"
            return f"{mark}\n```bash\n{script.split('set -eu', 1)[1].strip()}\n```"
        case "arrow":
            return "\n".join(_arrow_bodies())
        case "codes":
            rows = [f"| `{p.code}` | {p.status} | {p.title} | {p.next_step} |" for p in PROBLEMS.values()]
            return "\n".join(["| code | status | what it says | what to do |", "|---|---|---|---|", *rows])
        case "events":
            return "\n".join(["| event | subject | meaning | detail |", "|---|---|---|---|", *_events()])
        case "settings":
            return "\n".join(["| variable | left out | meaning |", "|---|---|---|", *_settings()])
        case "run settings":
            return "\n".join(["| setting | left out | meaning |", "|---|---|---|", *_run_settings()])
        case "worker settings":
            return "\n".join(
                ["| in the file | variable | left out | meaning |", "|---|---|---|---|", *_worker_settings()]
            )
        case "metrics":
            rows = [
                f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |"
                for name, kind, labels, meaning in every_metric()
            ]
            return "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows])
        case "worker metrics":
            return "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *_worker_metrics()])
        case "exit codes":
            return "\n".join(["| code | meaning |", "|---|---|", *reference.exit_codes()])
        case "common options":
            return "\n".join(["| option | meaning |", "|---|---|", *reference.common_options()])
        case "commands":
            return "\n".join(reference.commands())
        case "export columns":
            return "\n".join(
                ["| column | type | may be null | meaning |", "|---|---|---|---|", *reference.export_columns()]
            )
    raise ValueError(name)


def openapi_file() -> str:
    """The text of `docs/openapi.json`."""
    return json.dumps(_document(), indent=1, ensure_ascii=False) + "\n"


@functools.cache
def _document() -> dict[str, Any]:
    """The OpenAPI document. It needs no database, only the address of one."""
    with tempfile.TemporaryDirectory() as artifacts:
        return create_app(connect("postgresql://nobody@127.0.0.1:1/none", pool_size=1), Path(artifacts)).openapi()


def _operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in _document()["paths"].items():
        for method, operation in item.items():
            yield f"{method.upper()} {path}", operation


def _calls() -> Iterator[str]:
    by_tag: dict[str, list[str]] = {}
    for call, operation in _operations():
        roles = operation["x-roles"]
        others = [role for role in roles if role != "admin"]
        who = "no token" if not roles else "any" if len(roles) == len(ALL_ROLES) else ", ".join(others) or "admin"
        by_tag.setdefault(operation["tags"][0], []).append(f"| `{call}` | {who} | {operation['summary']} |")
    for tag, rows in by_tag.items():
        yield from (f"### {tag.capitalize()}", "", "| call | roles | purpose |", "|---|---|---|", *rows, "")


CALLERS = ("no token", "worker", "reward", "trainer", "viewer", "admin")
"""The columns of the table of who may make a call."""


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _access() -> Iterator[str]:
    for call, operation in _operations():
        roles = operation["x-roles"]
        bound = "own id" if "{worker_id}" in call else "run" if "{run_id}" in call else "yes"

        def cell(caller: str, roles: list[str] = roles, bound: str = bound) -> str:
            if caller not in roles:
                return "no" if roles else "yes"
            return "yes" if caller == "admin" else "run" if bound == "own id" and caller != "worker" else bound

        yield _row([f"`{call}`", *map(cell, CALLERS)])


def _arrow_bodies() -> Iterator[str]:
    for call, operation in _operations():
        bodies = {"takes": operation.get("requestBody", {}), "answers": operation["responses"].get("200", {})}
        for verb, body in bodies.items():
            content = body.get("content", {}).get(ARROW_MEDIA_TYPE)
            if content is not None:
                yield from (f"### `{call}` {verb}", "", content["schema"]["description"], "")


def _events() -> Iterator[str]:
    for name, kind in EVENTS.items():
        fields = [f"`{field}`" for field in kind.detail] + [f"sometimes `{field}`" for field in kind.sometimes]
        yield f"| `{name}` | {kind.subject} | {kind.meaning} | {', '.join(fields)} |"


def _settings() -> list[str]:
    prefix = Settings.model_config["env_prefix"]
    return [
        f"| `{field.validation_alias or prefix + name.upper()}` "
        f"| {'' if field.default in (None, '') else f'`{field.default}`'} | {_cell(field.description)} |"
        for name, field in Settings.model_fields.items()
    ]


def _run_settings() -> Iterator[str]:
    for name, field in RunSettings.model_fields.items():
        default = "none" if field.default is None else f"`{field.default}`" if field.default != () else "none"
        yield f"| `{name}` | {default} | {_cell(field.description)} |"


def _cell(text: str | None) -> str:
    """A text within a table, where a bar would end the cell."""
    return (text or "").replace("|", "\\|")


def _worker_settings() -> Iterator[str]:
    for name, field in run_settings.Settings.model_fields.items():
        default = run_settings.shown_default(name)
        left_out = "must be given" if field.is_required() else "" if default is None else f"`{default}`"
        yield f"| `{name}` | `{run_settings.variable(name)}` | {left_out} | {field.description} |"


def _worker_metrics() -> Iterator[str]:
    for metric in Numbers(Vitals(), DOCS).collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = {label: None for sample in metric.samples for label in sample.labels}
        values = {value: None for sample in metric.samples for value in sample.labels.values()}
        shown = f"`{', '.join(labels)}`: {', '.join(values)}" if labels else ""
        yield f"| `{name}` | {metric.type} | {shown} | {metric.documentation} |"


def fill(name: str, page: str) -> str:
    """The page with its generated part between the markers as the code has it now."""
    pattern = re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- end -->)", re.DOTALL)
    page, count = pattern.subn(lambda found: f"{found[1]}{generated(name)}\n{found[2]}", page)
    assert count == 1, name
    return page


if __name__ == "__main__":
    for part, path in PAGES.items():
        path.write_text(fill(part, path.read_text(encoding="utf-8")), encoding="utf-8")
    OPENAPI.write_text(openapi_file(), encoding="utf-8")
