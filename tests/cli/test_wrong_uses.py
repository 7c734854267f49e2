"""Values that no command can use: each is told in words, on standard error, with an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.client import Run
from tests.cli.conftest import Command

ADDRESSES = [
    "http://[::1",
    "http://x\x1b[31m",
    "http://..",
    "http://",
    "http://" + 64 * "a",
    "https://a:b",
    "http://\udc80",
]

WRONG = {
    "a folder for a file": ["rollouts", "export", "sums", ".", "--overwrite"],
    "the root for a file": ["rollouts", "export", "sums", "/", "--overwrite"],
    "more than there can be": ["rollouts", "list", "sums", "--limit", str(10**30)],
    "more updates than there can be": ["updates", "list", "sums", "--limit", str(10**30)],
    "a time beyond the calendar": ["token", "create", "--name", "n", "--role", "viewer", "--days", "1e12"],
    "a time without end": ["token", "create", "--name", "n", "--role", "viewer", "--days", "inf"],
    "an age beyond the calendar": ["prune", "--older-than", "1e10"],
    "an age without end": ["prune", "--older-than", "inf"],
}


@pytest.mark.parametrize("what", WRONG)
def test_a_value_that_cannot_be_is_a_wrong_use(cli: Command, sums: Run, what: str) -> None:
    done = cli(*WRONG[what])
    assert (done.code, done.out) == (2, ""), done.err


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_cannot_be_is_told(command: Command, address: str) -> None:
    done = command("run", "list", "--url", address, "--token", "x")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("coordinator: the coordinator's address ")
    assert "\x1b" not in done.err


@pytest.mark.parametrize(
    "document",
    ["policy: 3", "contract: [1]", "{policy: {base_model: 3}}", "settings: [1]", "1: 2", 5000 * "[", "a: 2020-99-99"],
)
def test_a_run_of_another_shape_is_told(cli: Command, tmp_path: Path, document: str) -> None:
    (tmp_path / "run.yaml").write_text(document)
    done = cli("run", "create", "other", "--file", str(tmp_path / "run.yaml"))
    assert (done.code, done.out) == (2, ""), done.err
