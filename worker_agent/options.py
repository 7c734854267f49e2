"""The options of `worker-agent run`, made from its settings. Their values are read with those of the file and of the
environment, not by the command line's parser."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import EnumType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from worker_agent.run_settings import Settings, option, shown_default, variable


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each setting, in place of its `**options`."""
    given = inspect.signature(command, eval_str=True).parameters.values()
    own = [parameter for parameter in given if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name))
        for name in Settings.model_fields
    ]
    command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
    return command


def from_command_line(context: typer.Context) -> dict[str, str | list[str]]:
    """The texts of the options that were given, by setting; not what stands in the environment."""
    sources = {name: context.get_parameter_source(name) for name in Settings.model_fields}
    return {name: context.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _option(name: str) -> Any:
    field = Settings.model_fields[name]
    several = get_origin(field.annotation) is tuple
    description = field.description or ""
    shown = typer.Option(
        option(name),
        # Named here so that the help shows it.
        envvar=variable(name),
        help=f"{description[0].upper()}{description[1:]}.",
        metavar=_metavar(field.annotation),
        show_default=shown_default(name) or False,
    )
    return Annotated[list[str] | None, shown] if several else Annotated[str | None, shown]


def _metavar(annotation: Any) -> str:
    if isinstance(annotation, EnumType):
        return "|".join(annotation)
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return "INTEGER" if int in (annotation, *get_args(annotation)) else "TEXT"
