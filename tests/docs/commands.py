"""Shell blocks: played as they are, or, where they cannot run here, each command held against the program's own word.

A block that is held is run by bash itself with nothing on its PATH: every program that it would start is written down
with its arguments, and none is started.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer
import yaml
from packaging.requirements import Requirement
from typer.core import TyperGroup

import coordinator.cli
import worker_agent.cli
from coordinator.app import create_app
from coordinator.storage.database import connect
from coordinator.storage.postgres_programs import installed_programs
from tests.docs.blocks import ROOT, Block

OURS = {"coordinator": coordinator.cli.app, "worker-agent": worker_agent.cli.app}

USAGE_ERROR: Any = typer.BadParameter.__base__
"""What a command line raises of whatever it does not take; typer has no public name for it."""

# Programs that an operator has and this machine need not have: what of them the documentation may use.
ELSEWHERE = {
    "docker": "build compose config cp down exec kill logs ps pull restart run start stop up "
    "--build --detach --env-file --file --force-recreate --help --no-deps --profile --project-name --rm --tail "
    "--volumes --wait --follow --name --target --user -T -d -f -it -p -v",
    "kubectl": "apply configmap create delete describe exec generic get job kustomize logs namespace rollout scale "
    "secret status wait "
    "--dry-run --filename --follow --for --from-file --from-literal --kustomize --namespace --output --selector "
    "--timeout -f -k -l -n -o",
    "systemctl": "daemon-reload enable restart start status stop --now",
}

VALUED = "--env-file --file --for --from-literal --namespace --output --profile --project-name -f -k -l -n -o -p"
"""Options of these whose value is the next word."""

_RECORD = """
command_not_found_handle() { printf '%s\\0' "$@" >>"$RECORD"; printf '\\n\\0' >>"$RECORD"; }
for builtin in cd . source exec kill wait read trap; do
  eval "$builtin() { command_not_found_handle $builtin \\"\\$@\\"; }" 2>/dev/null
done
PATH=/nowhere
"""


def script_of(block: Block) -> str:
    """What a shell would be given: of a console's block the lines after a prompt."""
    if block.language == "bash":
        return block.text
    return "\n".join(line[2:] for line in block.text.splitlines() if line.startswith(("$ ", "> ")))


def recorded(script: str, folder: Path) -> list[list[str]]:
    """Every command of a script with its arguments, as bash reads it; none is run."""
    record = folder / "record"
    record.touch()
    for command in (["bash", "-n", "-c", script], ["bash", "-c", _RECORD + script]):
        done = subprocess.run(
            command,
            cwd=folder,
            env={"RECORD": str(record), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert "syntax error" not in done.stderr, done.stderr
    # A program that is named with its folder is looked for there, and bash asks no handler.
    by_path = re.findall(r"line \d+: ([\w-]+/\S+): No such file or directory", done.stderr)
    commands = record.read_text(encoding="utf-8").split("\0\n\0")[:-1]
    return [*(command.split("\0") for command in commands), *([path] for path in by_path)]


def check_all(commands: Sequence[Sequence[str]]) -> None:
    """Each of a script's commands; a later one may name what an earlier one copied."""
    copies = frozenset(command[-1] for command in commands if command[0] in ("cp", "mv", "mkdir"))
    for command in commands:
        check(command, copies)


def check(command: Sequence[str], copies: frozenset[str] = frozenset()) -> None:
    """AssertionError if the program, its command, an option, or a file or service that it names is not there."""
    program, arguments = command[0], list(command[1:])
    if program in OURS:
        _check_ours(program, arguments)
    elif program in ("pip", "pip3"):
        _check_pip(arguments)
    elif program == "make":
        _check_make(arguments)
    elif re.fullmatch(r"python[\d.]*", program):
        _check_python(arguments)
    elif program in ELSEWHERE:
        _check_elsewhere(program, [a for a in arguments if a not in copies])
    elif program not in ("cd", ".", "source", "exec", "kill", "wait", "read", "trap"):
        _check_here(program, arguments)
        if program == "curl":
            _check_address(arguments)


def _check_ours(program: str, arguments: list[str]) -> None:
    """By the parser of the command line itself, to the last argument; nothing is run."""
    command: Any = typer.main.get_command(OURS[program])
    context = None
    try:
        while isinstance(command, TyperGroup):
            context = command.make_context(program, list(arguments), parent=context)
            name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
            assert command is not None, name
        if "--help" not in arguments:
            command.make_context(command.name, list(arguments), parent=context)
    except USAGE_ERROR as error:
        raise AssertionError(f"{program} does not take this: {error.format_message()}") from error
    except SystemExit:
        assert "--help" in arguments or "--version" in arguments or not arguments


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert arguments[0] == "install", arguments
    for argument in arguments[1:]:
        if argument.startswith("-"):
            _in_help([sys.executable, "-m", "pip", "install", "--help"], argument)
        elif argument.startswith((".", project["name"])):
            extras = Requirement(project["name"] + argument.removeprefix(".").removeprefix(project["name"])).extras
            assert extras <= project["optional-dependencies"].keys(), argument
        else:
            assert (ROOT / argument).exists(), argument


def _check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        if "=" in argument:
            assert f"$({argument.split('=')[0]})" in makefile or f",$({argument.split('=')[0]})" in makefile, argument
        else:
            assert re.search(rf"^{re.escape(argument)}:", makefile, re.MULTILINE), argument


def _check_python(arguments: list[str]) -> None:
    """The module or the script is there, and its text knows the options."""
    if arguments[0] == "-m":
        if arguments[1] in ("venv", "pip"):
            return _check_pip(arguments[2:]) if arguments[1] == "pip" else None
        found = importlib.util.find_spec(arguments[1])
        assert found is not None and found.origin is not None, arguments[1]
        source, rest = Path(found.origin), arguments[2:]
    elif arguments[0] in ("-", "-c"):
        return None
    else:
        source, rest = ROOT / arguments[0], arguments[1:]
        assert source.exists(), source
    for option in rest:
        if option.startswith("-"):
            assert option.split("=")[0] in source.read_text(encoding="utf-8"), f"{source} knows no {option}"
    return None


def _check_elsewhere(program: str, arguments: list[str]) -> None:
    """Commands and options that are on the list, profiles, services and files that are there."""
    known = ELSEWHERE[program].split()
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    profiles = {name for service in compose["services"].values() for name in service.get("profiles", ())}
    words: list[str] = []
    for at, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        before = arguments[at - 1] if at else ""
        if argument == "--":  # what follows is run in a pod
            check(arguments[at + 1 :])
            break
        if before == "--profile":
            assert argument in profiles, f"there is no profile {argument}"
        elif name.startswith("-"):
            assert name in known, f"{program} {name}: unknown here, add it if it is right"
            _check_file(value)
        elif before in VALUED.split():
            _check_file(argument)
        else:
            words.append(argument)
            _check_file(argument)
            if words[:2] in (["compose", "exec"], ["compose", "run"]) and argument in compose["services"]:
                check(arguments[at + 1 :])
                break
    commands = 2 if words[0] in ("compose", "rollout", "create") else 1
    assert set(words[:commands]) <= set(known) | compose["services"].keys(), f"{program} has no {' '.join(words[:2])}"
    if words[0] == "compose" and words[1] in ("exec", "logs", "restart", "run", "start", "stop", "up"):
        assert set(words[2:]) <= compose["services"].keys(), f"there is no service {words[2:]}"


def _check_file(path: str) -> None:
    """One that begins in a folder of the repository is there."""
    if "/" in path and (ROOT / path.split("/")[0]).exists():
        assert (ROOT / path).exists(), f"there is no {path}"


@functools.cache
def _help(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr


def _in_help(command: Sequence[str], option: str) -> None:
    text = _help(*command)
    wanted = [option.split("=")[0]] if option.startswith("--") else [f"-{letter}" for letter in option[1:2]]
    for name in wanted:
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), f"{' '.join(command)} names no {name}"


def _check_here(program: str, arguments: list[str]) -> None:
    """A program of this machine, or of Postgres as it is installed here: its help names every option."""
    found = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None and (installed_programs() / "bin" / program).exists():
        found = str(installed_programs() / "bin" / program)
    if found is None:
        # Files of the repository that are run by name.
        assert (ROOT / program).exists(), f"{program}: neither a program of this machine nor a file of the repository"
        return
    helps = {"curl": [found, "--help", "all"], "git": [found, arguments[0] if arguments else "", "-h"]}
    if program in ("openssl", "test", "[", "true", "printf"):
        return
    for argument in arguments:
        if argument == "--":
            break
        if re.match(r"--?[A-Za-z]", argument):
            _in_help(helps.get(program, [found, "--help"]), argument)


@functools.cache
def _paths() -> dict[str, Any]:
    """The paths of the API with their methods. This needs no database, only the address of one."""
    with tempfile.TemporaryDirectory() as artifacts:
        app = create_app(connect("postgresql://nobody@127.0.0.1:1/none", pool_size=1), Path(artifacts))
        paths: dict[str, Any] = app.openapi()["paths"]
        return paths


def _check_address(arguments: list[str]) -> None:
    """Some call of the API has this method and path. Its host is a variable, which is empty here."""
    methods = [after for before, after in pairwise(arguments) if before in ("-X", "--request")]
    addresses = [a for a in arguments if "/v1/" in a or a.endswith(("/healthz", "/readyz", "/metrics"))]
    for address in addresses:
        path = urlsplit(address).path
        calls = [
            item for template, item in _paths().items() if re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", template), path)
        ]
        assert calls, f"the API has no {path}"
        for method in methods:
            assert any(method.lower() in item for item in calls), f"the API has no {method} {path}"
