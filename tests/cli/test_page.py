"""What docs/command-line.md shows can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from coordinator.cli import connection
from coordinator.client import Coordinator, Run
from tests.cli.conftest import Command

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_every_command_that_is_shown_is_one(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody answers here, which is told by an exit code other than that of a wrong use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(connection, "RETRY_SECONDS", 0.0)
    monkeypatch.setenv("COORDINATOR_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("COORDINATOR_TOKEN", "x")
    lines = [shlex.split(line, comments=True) for line in blocks("bash")[0].splitlines()]
    assert len(lines) > 8
    for program, *arguments in lines:
        slow = arguments[0] in ("activate", "doctor") or "export" in arguments  # by design, where nobody answers
        done = command(*arguments, *(["--help"] if slow else []))
        assert (program, done.code) == ("coordinator", 0 if slow else 3), arguments


def test_the_refusal_that_is_shown_is_told_like_that(cli: Command, sums: Run) -> None:
    typed, *told = blocks("console")[0].splitlines()
    done = cli(*shlex.split(typed.removeprefix("$ coordinator ")))
    assert done.err.splitlines() == told[:2]
    assert told[2:] == ["$ echo $?", str(done.code)]


def test_the_run_that_is_shown_can_be_created(cli: Command, coordinator: Coordinator, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(blocks("yaml")[0])
    done = cli("run", "create", "from-the-page", "--file", str(tmp_path / "run.yaml"))
    assert done.code == 0, done.err
    assert coordinator.run("from-the-page").view().settings.group_size == 8


def test_the_lines_that_read_an_export_read_one(
    cli: Command, sums: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("rollouts", "export", "sums", "sums.parquet").code == 0
    names: dict[str, object] = {}
    exec(compile(blocks("python")[0], "command-line.md", "exec"), names)
    assert getattr(names["rollouts"], "num_rows", 0) == 8
