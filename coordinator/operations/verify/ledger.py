"""One run as the snapshot has it, read row by row through server-side cursors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operations.verify.findings import Finding

ROWS_PER_FETCH = 1000

SETTLED = ("consumed", "quarantined", "offline", "generation_failed")
"""States of which retention may take the tokens, and later the row."""

RUNS = text("""
    SELECT run_no, run_id, CAST(settings AS text) AS settings, active_version, commits, last_commit_no, event_no
    FROM runs WHERE run_id = COALESCE(:run_id, run_id) ORDER BY run_no
""")


@dataclass(frozen=True)
class Ledger:
    """The rows of one run. Nothing of a run's size is held in memory."""

    connection: AsyncConnection
    run_no: int
    run_id: str
    settings: Mapping[str, Any]
    active_version: int
    commits: int
    last_commit_no: int
    event_no: int

    async def rows(self, statement: TextClause, **parameters: Any) -> AsyncIterator[Any]:
        """The rows of a statement that takes `:run_no`, a thousand at a time."""
        result = await self.connection.stream(
            statement, {"run_no": self.run_no} | parameters, execution_options={"yield_per": ROWS_PER_FETCH}
        )
        try:
            async for row in result:
                yield row
        finally:
            await result.close()

    async def counted(self, statement: TextClause) -> dict[str, int]:
        """The one row of numbers that a statement answers, by column."""
        row = (await self.connection.execute(statement, {"run_no": self.run_no})).one()
        return {name: int(value) for name, value in row._mapping.items()}


async def read_ledgers(connection: AsyncConnection, run_id: str | None) -> list[Ledger]:
    """Every run, or the one that is named, in the order of their creation."""
    return [
        Ledger(
            connection,
            row.run_no,
            row.run_id,
            json.loads(row.settings),
            row.active_version,
            row.commits,
            row.last_commit_no,
            row.event_no,
        )
        for row in await connection.execute(RUNS, {"run_id": run_id})
    ]


class _Words(dict[str, Any]):
    """The columns of a row, NULL read as 'nothing'."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return "nothing" if value is None else value


class Search:
    """Looks for breaches in the rows of one SELECT.

    `source` answers the rows to be judged, with a column `subject`. `rules` has, by the words that report it, each
    condition under which such a row is a breach, in SQL over the columns of `source`; the words name columns in
    braces. A condition that is NULL finds nothing.
    """

    def __init__(self, source: str, rules: Mapping[str, str]) -> None:
        self._words = tuple(rules)
        conditions = ", ".join(f"({place}, {condition})" for place, condition in enumerate(rules.values()))
        self._statement = text(
            f"SELECT found.*, rule.place AS rule_broken FROM ({source}) AS found"
            f" CROSS JOIN LATERAL (VALUES {conditions}) AS rule (place, broken) WHERE rule.broken"
        )

    async def run(self, ledger: Ledger, **parameters: Any) -> AsyncIterator[Finding]:
        """Each breach that the run has."""
        async for row in ledger.rows(self._statement, **parameters):
            words = self._words[row.rule_broken]
            yield Finding(row.subject, words.format_map(_Words(row._mapping)))
