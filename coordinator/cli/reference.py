"""What the documentation says of the command line, from its commands, its exit codes and the columns of an export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import typer

from coordinator.cli import app
from coordinator.cli.export import SCHEMA
from coordinator.cli.faults import EXIT_CODES

COMMON = ("data", "url", "token", "as_json", "yes")
"""Options that are described once, by the names of their parameters."""


def exit_codes() -> Iterator[str]:
    """A row for each."""
    for code, meaning in EXIT_CODES.items():
        yield f"| {code} | {meaning} |"


def common_options() -> Iterator[str]:
    """A row for each option that many commands have."""
    found = {parameter.name: parameter for _, command in _commands() for parameter in command.params}
    for name in COMMON:
        yield _row(found[name])


def commands() -> Iterator[str]:
    """A section for each command."""
    for name, command in _commands():
        arguments = [parameter for parameter in command.params if _is_argument(parameter)]
        own = [p for p in command.params if p.name not in COMMON and not _is_argument(p)]
        common = [f"`{p.opts[0]}`" for p in command.params if p.name in COMMON]
        yield from (f"### coordinator {' '.join([name, *map(_placeholder, arguments)])}", "", command.help, "")
        if arguments or own:
            yield from ("| argument or option | meaning |", "|---|---|", *map(_row, [*arguments, *own]), "")
        if common:
            yield from (f"Also {', '.join(common)}.", "")


def export_columns() -> Iterator[str]:
    """A row for each column."""
    for field in SCHEMA:
        kind = str(field.type).replace(" not null", "").replace("element: ", "")
        metadata = field.metadata or {}
        yield f"| `{field.name}` | `{kind}` | {'yes' if field.nullable else ''} | {metadata[b'description'].decode()} |"


def _commands() -> Iterator[tuple[str, Any]]:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            for inner_name, inner in command.commands.items():
                yield f"{name} {inner_name}", inner
        else:
            yield name, command


def _is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def _placeholder(argument: Any) -> str:
    metavar = (argument.metavar or argument.name).upper().strip("[].")
    metavar = f"{metavar}..." if argument.nargs == -1 else metavar
    return str(metavar if argument.required else f"[{metavar}]")


def _row(parameter: Any) -> str:
    if _is_argument(parameter):
        return f"| `{_placeholder(parameter)}` | {parameter.help} |"
    words = [parameter.help]
    annotation = parameter.type_descriptor.annotation
    if get_origin(annotation) is Literal:
        words.append(f"One of {', '.join(f'`{choice}`' for choice in get_args(annotation))}.")
    if parameter.envvar:
        words.append(f"Variable `{parameter.envvar}`.")
    if parameter.required:
        words.append("Must be given.")
    elif parameter.default not in (None, False, True):
        words.append(f"Left out: `{parameter.default}`.")
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    value = "" if parameter.is_flag else f" {(parameter.metavar or parameter.name).upper().replace('_', '-')}"
    return f"| `{names}{value}` | {' '.join(words)} |"
