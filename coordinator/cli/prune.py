"""prune: by hand what retention does by itself where a run's settings say so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel, Field

from coordinator.cli.local import with_database
from coordinator.cli.options import AsJson, Data, Yes
from coordinator.cli.output import confirm, print_json, print_table, say

if TYPE_CHECKING:
    from coordinator.storage.database import Database

_MIB = 2**20


class PrunedRun(BaseModel):
    """What is over in one run, or was removed of it."""

    run_id: str
    evidence: int = Field(description="rollouts that lose their tokens")
    evidence_bytes: int
    rollouts: int = Field(description="rollouts of which only the tombstone stays")
    versions: list[int] = Field(description="policy versions that lose their files")
    file_bytes: int = Field(description="of their files; what another version needs too stays")


class Pruned(BaseModel):
    """All of it. `deleted`: it is removed; else it would be."""

    deleted: bool
    runs: list[PrunedRun]


def prune(
    older_than: Annotated[
        float, typer.Option("--older-than", min=0, max=36_500, metavar="DAYS", help="Over for so many days.")
    ],
    run: Annotated[str | None, typer.Option(help="Of this run only; left out: of every run.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Remove it; left out: only count it.")] = False,
    yes: Yes = False,
    data: Data = Path(".data"),
    as_json: AsJson = False,
) -> None:
    """Remove by hand what retention would still keep, or say how much that is: works on the database itself.

    Of rollouts that were consumed, quarantined or set aside so long ago, the tokens; the row too in a run that has
    rollout_retention_seconds, so that only the tombstone of the id stays. Of policy versions that ended so long ago,
    the files, which leave the artifact store within half a minute of a server running. Nothing live and nothing that
    a rewind or a rollback may bring back is touched; what is quarantined cannot be released any more without its
    tokens. It may be given while servers run.
    """
    seconds = older_than * 86_400

    async def count(database: Database) -> list[PrunedRun]:
        return [await _count(database, run_id, seconds) for run_id in await _runs(database, run)]

    async def remove(database: Database) -> list[PrunedRun]:
        return [await _remove(database, found, seconds) for found in counted if _anything(found)]

    counted = with_database(data, count, "counting what is over")
    if not delete or not any(map(_anything, counted)):
        _print(Pruned(deleted=False, runs=counted), as_json)
        if not as_json and any(map(_anything, counted)):
            say("nothing was removed: --delete does it")
        return
    if not as_json:
        _print(Pruned(deleted=False, runs=counted), as_json=False)
    confirm("Remove all of this, for good?", yes)
    removed = with_database(data, remove, "removing")
    if as_json:
        print_json(Pruned(deleted=True, runs=removed))
    else:
        say(
            f"removed: the tokens of {sum(r.evidence for r in removed)} rollouts, the rows of "
            f"{sum(r.rollouts for r in removed)}, the files of {sum(len(r.versions) for r in removed)} versions"
        )


def _anything(found: PrunedRun) -> bool:
    return bool(found.evidence or found.rollouts or found.versions)


def _print(pruned: Pruned, as_json: bool) -> None:
    if as_json:
        print_json(pruned)
        return
    print_table(
        ("run", "lose tokens", "MiB", "lose row", "versions lose files", "MiB"),
        [
            (
                r.run_id,
                r.evidence,
                f"{r.evidence_bytes / _MIB:.1f}",
                r.rollouts,
                len(r.versions),
                f"{r.file_bytes / _MIB:.1f}",
            )
            for r in pruned.runs
        ],
        empty="there is no run",
    )


async def _runs(database: Database, run: str | None) -> list[str]:
    from coordinator.runs.service import get_run, run_ids

    if run is not None:
        return [(await database.read(get_run, run)).run_id]
    return list(reversed(await database.read(run_ids)))


async def _count(database: Database, run_id: str, seconds: float) -> PrunedRun:
    from coordinator.policies import removal
    from coordinator.rollouts import retention

    over = await database.transaction(retention.count_over, run_id, seconds)
    versions = await database.transaction(removal.find_over, run_id, seconds)
    return PrunedRun(
        run_id=run_id,
        evidence=over.evidence,
        evidence_bytes=over.evidence_bytes,
        rollouts=over.rollouts,
        versions=sorted(versions),
        file_bytes=sum(versions.values()),
    )


async def _remove(database: Database, found: PrunedRun, seconds: float) -> PrunedRun:
    """What really went: it is judged again under its locks, and more may have come to be over."""
    from coordinator.policies import removal
    from coordinator.rollouts import retention

    evidence = rollouts = 0
    versions: list[int] = []
    while dropped := await database.transaction(retention.drop_evidence, found.run_id, seconds):
        evidence += dropped
    while dropped := await database.transaction(retention.drop_rollouts, found.run_id, seconds):
        rollouts += dropped
    while marked := await database.transaction(removal.mark, found.run_id, seconds):
        versions += marked
    return found.model_copy(update={"evidence": evidence, "rollouts": rollouts, "versions": sorted(versions)})
