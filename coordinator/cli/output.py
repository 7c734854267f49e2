"""What goes to standard output, and what to standard error.

Tables are for people: columns without lines, as wide as their content, each row a block of its own where the terminal
is too narrow. JSON is for scripts: one document as the API has it, in UTF-8 whatever the locale. All else, progress and
faults, goes to standard error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from coordinator.cli.faults import USAGE, Failure

_PATIENCE_SECONDS, _AGAIN_SECONDS = 2.0, 10.0
_NO_LIMIT = 100_000
"""Characters in a line of a table that goes to a file or another program."""

Cell = object


def say(line: str) -> None:
    """One line on standard error."""
    print(line, file=sys.stderr, flush=True)


def print_json(document: BaseModel) -> None:
    """The document as the API has it, and nothing else."""
    sys.stdout.buffer.write(document.model_dump_json().encode() + b"\n")
    sys.stdout.buffer.flush()


def print_lines(*lines: str) -> None:
    """Lines of text."""
    for line in lines:
        print(printable(line), flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, empty: str) -> None:
    """A row for each thing, or the line `empty` on standard error where there is none."""
    if not rows:
        say(empty)
        return
    console = _console()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for name in columns:
        table.add_column(name.upper(), no_wrap=True)
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    if Measurement.get(console, console.options.update(max_width=_NO_LIMIT), table).maximum <= console.width:
        _print(console, table)
        return
    for row in rows:
        print_record(list(zip(columns, row, strict=True)))
        print_lines("")


def print_record(fields: Sequence[tuple[str, Cell]]) -> None:
    """One thing, a line for each of its fields."""
    console = _console()
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(name, Text(shown(value)))
    _print(console, table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _NO_LIMIT, highlight=False)


def _print(console: Console, table: Table) -> None:
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def shown(value: Cell) -> str:
    """A value as a cell has it."""
    if value is None or value == "" or value == ():
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return printable(str(value))


def printable(text: str) -> str:
    """The text without what would move the cursor or colour the rest: such characters as Python writes them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def seconds_in_words(seconds: float) -> str:
    """A length of time, to about one part in a hundred."""
    seconds = max(seconds, 0.0)
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def age(moment: datetime | None, now: datetime | None = None) -> str | None:
    """How long ago it was, by this machine's clock unless `now` is given."""
    return None if moment is None else seconds_in_words(((now or datetime.now(UTC)) - moment).total_seconds())


def confirm(question: str, yes: bool) -> None:
    """Goes on if the person at the terminal wants it, or `--yes` was given."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failure(f"this asks first: {question}", "Without a terminal, say --yes.", USAGE)
    if not typer.confirm(question, err=True):
        raise Failure("nothing was changed")


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Says what is awaited once it has taken two seconds, and then every ten."""
    done = threading.Event()

    def speak() -> None:
        waited, pause = 0.0, _PATIENCE_SECONDS
        while not done.wait(pause):
            waited += pause
            pause = _AGAIN_SECONDS
            say(f"{what}: {waited:.0f} s so far")

    speaker = threading.Thread(target=speak, name="patience", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()
