"""run create, list, show."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from coordinator.cli.connection import connected
from coordinator.cli.faults import USAGE, Failure, line
from coordinator.cli.options import AsJson, Data, RunId, Token, Url
from coordinator.cli.output import age, print_json, print_record, print_table
from coordinator.wire.runs import CreateRun, RunCounts, RunList, RunView

app = typer.Typer(help="Runs: create, list, show.", no_args_is_help=True)

OPTIONS = {
    "vocab_size": "--vocab-size",
    "policy.version": "--first-version",
    "policy.base_model.name": "--base-model",
    "policy.base_model.revision": "--base-revision",
    "policy.base_model.sha256": "--base-sha256",
    "contract.tokenizer_hash": "--tokenizer-hash",
    "contract.chat_template_hash": "--chat-template-hash",
    "contract.temperature": "--temperature",
    "contract.top_p": "--top-p",
    "contract.top_k": "--top-k",
    "contract.min_p": "--min-p",
    "contract.logprobs_mode": "--logprobs-mode",
    "contract.dtype": "--dtype",
}
"""Where in a run's document the value of an option belongs."""


@app.command()
def create(
    run: RunId,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", help="JSON or YAML with the body of POST /v1/runs, whole or in part; -: standard input."
        ),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Token ids lie below it.")] = None,
    first_version: Annotated[int | None, typer.Option(help="Number of the first policy version; default 0.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The base model's name.")] = None,
    base_revision: Annotated[str | None, typer.Option(help="Its revision.")] = None,
    base_sha256: Annotated[str | None, typer.Option(help="The sha256 over its weights.")] = None,
    tokenizer_hash: Annotated[str | None, typer.Option(help="The sha256 of the tokenizer.")] = None,
    chat_template_hash: Annotated[str | None, typer.Option(help="The sha256 of the chat template.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the sampling.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Of the sampling; 1: off.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Of the sampling; default 0: off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Of the sampling; default 0: off.")] = None,
    logprobs_mode: Annotated[str | None, typer.Option(help="raw or processed: what the log-probs are of.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float8: of the weights.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting, such as group_size=8; may be given again."),
    ] = None,
    data: Data = Path(".data"),
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Create a run from a file, from options, or from both; an option comes before what the file says.

    The same command again changes nothing. The settings, which are fixed from then on, are described under
    RunSettings in /docs.
    """
    document = {} if file is None else _read(file)
    _put(document, "run_id", run)
    given = {
        "vocab_size": vocab_size,
        "policy.version": first_version,
        "policy.base_model.name": base_model,
        "policy.base_model.revision": base_revision,
        "policy.base_model.sha256": base_sha256,
        "contract.tokenizer_hash": tokenizer_hash,
        "contract.chat_template_hash": chat_template_hash,
        "contract.temperature": temperature,
        "contract.top_p": top_p,
        "contract.top_k": top_k,
        "contract.min_p": min_p,
        "contract.logprobs_mode": logprobs_mode,
        "contract.dtype": dtype,
    }
    for place, value in given.items():
        if value is not None:
            _put(document, place, value)
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"{setting} is not NAME=VALUE", param_hint="--set")
        _put(document, f"settings.{name}", _parsed(value, f"the value of --set {name}"))
    body = _validated(document)
    with connected(data, url, token) as coordinator:
        view = coordinator.create_run(body).view()
    if as_json:
        print_json(view)
    else:
        _print_run(view)


@app.command("list")
def list_runs(data: Data = Path(".data"), url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """List the runs that the token may see, oldest first."""
    with connected(data, url, token) as coordinator:
        runs = coordinator.runs()
    if as_json:
        print_json(RunList(runs=runs))
        return
    print_table(
        ("run", "active version", "last commit", "group size", "contract", "created"),
        [
            (r.run_id, r.active.version, r.last_commit_no, r.settings.group_size, r.contract_hash[:12], r.created_at)
            for r in runs
        ],
        empty="there is no run that this token may see: 'coordinator run create' makes one",
    )


@app.command()
def show(run: RunId, data: Data = Path(".data"), url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Show a run: its active version, its counts, its contract, and the settings that are not the default."""
    with connected(data, url, token) as coordinator:
        view = coordinator.run(run).view()
        if as_json:
            print_json(view)
            return
        counts = coordinator.run(run).counts()
    _print_run(view, counts)


def _print_run(view: RunView, counts: RunCounts | None = None) -> None:
    fields: list[tuple[str, object]] = [
        ("run", view.run_id),
        ("created", f"{view.created_at:%Y-%m-%d %H:%M:%SZ}, {age(view.created_at)} ago"),
        ("active version", f"{view.active.version}, {view.active.artifact_hash}"),
        ("last commit", view.last_commit_no),
    ]
    if counts is not None:
        fields += [
            ("rollouts", tuple(f"{n} {state}" for state, n in counts.rollouts.items() if n)),
            ("stored evidence", f"{counts.evidence_bytes / 2**20:.1f} MiB"),
        ]
    fields += [("vocab_size", view.vocab_size), *view.contract.model_dump().items()]
    changed = view.settings.model_dump(exclude_defaults=True)
    print_record([*fields, *changed.items(), *([] if changed else [("settings", "as by default")])])


def _read(file: str) -> dict[str, Any]:
    what = "standard input" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"cannot read {what}: {error}", code=USAGE) from error
    document = _parsed(text, what)
    if not isinstance(document, dict):
        raise Failure(f"{what} does not hold the fields of a run", code=USAGE)
    return document


def _parsed(text: str, what: str) -> Any:
    """The text as JSON, else as YAML, which does not take all that JSON takes."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        import yaml

        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise Failure(f"{what} is neither JSON nor YAML: {' '.join(str(error).split())}", code=USAGE) from error


def _put(document: dict[str, Any], place: str, value: Any) -> None:
    *outer, name = place.split(".")
    for part in outer:
        inner = document.setdefault(part, {})
        if not isinstance(inner, dict):
            raise Failure(f"{part}: {inner!r} should hold fields", code=USAGE)
        document = inner
    document[name] = value


def _validated(document: dict[str, Any]) -> CreateRun:
    """The body, or everything that it lacks, each with the option that gives it."""
    for place in ("contract", "policy", "policy.base_model"):  # what they lack is told part by part
        *outer, name = place.split(".")
        holder: Any = document
        for part in outer:
            holder = holder[part]
        if isinstance(holder, dict) and holder.get(name) is None:
            _put(document, place, {})
    try:
        return CreateRun.model_validate(document)
    except ValidationError as error:
        lines = []
        for fault in error.errors(include_url=False):
            place = ".".join(map(str, fault["loc"]))
            option = OPTIONS.get(place, "--set" if place.startswith("settings.") else "")
            lines.append(f"  {line(fault)}{option and f' ({option})'}")
        raise Failure("\n".join(["the run cannot be created like that:", *lines]), code=USAGE) from error
