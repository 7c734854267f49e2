"""Options and arguments that many commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.completion import run_ids

Data = Annotated[
    Path,
    typer.Option(
        "--data",
        envvar="COORDINATOR_DATA",
        help="Folder of the embedded Postgres, the artifacts, and the files 'address' and 'admin.token'.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="COORDINATOR_URL",
        help="Address of the coordinator, of several replicas with commas; left out: what DATA/address has.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="COORDINATOR_TOKEN",
        help="Bearer token, better given by its variable; left out: what DATA/admin.token has.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the API's answer as one JSON document, and nothing else.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask first.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", autocompletion=run_ids)]
