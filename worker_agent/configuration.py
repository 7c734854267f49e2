"""The settings of one start, put together from a file, the environment and the command line, each of which wins over
those before it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_origin

import yaml
from pydantic import Field, SecretStr, TypeAdapter, ValidationError

from worker_agent.run_settings import MASK, Settings, option, variable

_DEFAULT = "default"
# Either of them says what the token is: the one of the layer that wins counts, alone.
_ONE_OF = ("token", "token_file")


class SettingsError(Exception):
    """Settings that cannot be used: one line for each that is wrong, naming it and where it stands."""


@dataclass(frozen=True)
class Configuration:
    """The settings in force and, for each, where its value came from."""

    settings: Settings
    sources: Mapping[str, str]

    def shown(self) -> str:
        """All settings as YAML, in a line each with its source. Secrets are masked."""
        return "\n".join(
            f"{name}: {json.dumps(_plain(getattr(self.settings, name)), ensure_ascii=False)}  # {source}"
            for name, source in self.sources.items()
        )


@dataclass(frozen=True)
class _Given:
    """A value as it was given, and where."""

    value: object
    source: str
    is_text: bool
    """Whether it comes from where everything is text, so that a number may be spelled."""


def configure(
    file: Path | None, environment: Mapping[str, str], arguments: Mapping[str, str | list[str]]
) -> Configuration:
    """Put the settings together. `arguments` are the texts of the command line, by setting; an empty variable counts as
    none. Raises `SettingsError`.
    """
    layers = [
        {} if file is None else _of_file(file),
        {
            name: _Given(environment[variable(name)], f"environment, {variable(name)}", is_text=True)
            for name in Settings.model_fields
            if environment.get(variable(name))
        },
        {
            name: _Given(value, f"command line, {option(name)}", is_text=isinstance(value, str))
            for name, value in arguments.items()
        },
    ]
    faults: list[str] = []
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        if all(name in layer for name in _ONE_OF):
            faults.append(f"{layer[_ONE_OF[0]].source}: {' and '.join(_ONE_OF)}: give one of them")
        if any(name in layer for name in _ONE_OF):
            for name in _ONE_OF:
                values.pop(name, None)
                sources.pop(name, None)
        for name, given in layer.items():
            if name not in Settings.model_fields:
                faults.append(f"{given.source}: {name}: no such setting{_meant(name)}")
                continue
            if given.value == MASK:
                faults.append(f"{given.source}: {name}: this is the mask of a secret, not the secret")
                continue
            try:
                values[name], sources[name] = _read(name, given), given.source
            except ValidationError as error:
                faults += [f"{given.source}: {name}: {reason}" for reason in _reasons(name, error)]
    if faults:
        raise SettingsError("\n".join(faults))
    missing = [name for name, field in Settings.model_fields.items() if field.is_required() and name not in values]
    if missing:
        raise SettingsError(
            "\n".join(
                f"{name} was not given: {option(name)}, {variable(name)} or {name} in a --config file"
                for name in missing
            )
        )
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        named = [reason["ctx"]["error"] for reason in error.errors()]
        raise SettingsError(
            "\n".join(f"{sources.get(str(text).split(':')[0], _DEFAULT)}: {text}" for text in named)
        ) from error
    return Configuration(settings, {name: sources.get(name, _DEFAULT) for name in Settings.model_fields})


def _of_file(file: Path) -> dict[str, _Given]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file}: not UTF-8: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{file}: must hold settings, a line each, such as 'run: sums', not {_kind(content)}")
    return {key: _Given(value, str(file), is_text=False) for key, value in content.items() if value is not None}


def _meant(key: object) -> str:
    close = difflib.get_close_matches(str(key).replace("-", "_"), Settings.model_fields, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _read(name: str, given: _Given) -> Any:
    adapter = _adapter(name)
    if get_origin(Settings.model_fields[name].annotation) is tuple and given.is_text:
        return adapter.validate_json(str(given.value), strict=True)
    if given.is_text:
        return adapter.validate_strings(given.value)
    # As JSON, where a path and a choice are written as text, and nothing else is taken for one.
    return adapter.validate_json(json.dumps(given.value, default=repr), strict=True)


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    field = Settings.model_fields[name]
    constraints = Field()
    constraints.metadata = field.metadata
    return TypeAdapter(Annotated[field.annotation, constraints])  # type: ignore[arg-type]  # made of data


def _reasons(name: str, error: ValidationError) -> Iterator[str]:
    secret = name in ("token", "tasks_token")
    for fault in error.errors():
        reason = fault["msg"][0].lower() + fault["msg"][1:]
        value = fault["input"]
        where = "".join(f"[{part}] " for part in fault["loc"] if isinstance(part, int))
        yield f"{where}{reason}" if secret else f"{where}{reason}, not {_short(value)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else f"the single value {_short(value)}"


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, int) else str(value)


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once, and a date is the text that it is written as."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key} stands there twice", key_node.start_mark)
            if isinstance(key, str):
                keys.add(key)
        return super().construct_mapping(node, deep)
