"""The command line in the terminals, pipes, shells and networks that it meets."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.cli import connection
from coordinator.cli.faults import EXIT_CODES
from coordinator.client import Coordinator, Run
from tests.cli.conftest import Command
from tests.client.runs import new_run, new_worker
from tests.client.server_process import ServerProcess

PROGRAM = str(Path(sys.prefix) / "bin" / "coordinator")


def environment(server: ServerProcess, **more: str) -> dict[str, str]:
    ours = ("COORDINATOR_", "LC_", "LANG", "COLUMNS", "LINES")  # the last two would stand for the terminal's own size
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"LC_ALL": "C.UTF-8", "COORDINATOR_DATA": str(server.data)} | more


def bash(server: ServerProcess, script: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    """The script with `coordinator` on its path."""
    path = f"{Path(PROGRAM).parent}:{os.environ['PATH']}"
    command = ["bash", "--norc", "-c", script]
    return subprocess.run(command, env=environment(server, PATH=path, **more), capture_output=True, timeout=60)


def in_terminal(server: ServerProcess, columns: int, *arguments: str, typed: str = "") -> tuple[int, str]:
    """The exit code and what a terminal of this width shows, without its colours."""
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    started = subprocess.Popen(
        [PROGRAM, *arguments], stdin=terminal, stdout=terminal, stderr=terminal,
        env=environment(server, TERM="xterm", NO_COLOR="1"),
    )  # fmt: skip
    os.close(terminal)
    os.write(controller, typed.encode())
    shown = b""
    try:
        while piece := os.read(controller, 65536):
            shown += piece
    except OSError:
        pass  # so ends what a terminal shows
    finally:
        os.close(controller)
    text = re.sub(r"\x1b\[\d*m", "", shown.decode())
    return started.wait(60), text.replace("\r\n", "\n")


def test_without_address_or_token_both_ways_to_give_them_are_named(command: Command, tmp_path: Path) -> None:
    nothing = command("run", "list", "--data", str(tmp_path))
    assert (nothing.code, nothing.out) == (1, "")
    assert nothing.err.startswith("coordinator: no address was given")
    for way in ("--url and --token", "COORDINATOR_URL and COORDINATOR_TOKEN", "--data, or COORDINATOR_DATA"):
        assert way in nothing.err
    no_token = command("run", "list", "--data", str(tmp_path), "--url", "http://127.0.0.1:1")
    assert (no_token.code, "no token was given" in no_token.err) == (1, True)
    assert "must begin with http://" in command("run", "list", "--url", "here", "--token", "x").err


def test_a_coordinator_that_does_not_answer_has_an_exit_code_of_its_own(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With less, pauses that are drawn unluckily end the attempts before 2 s have passed.
    monkeypatch.setattr(connection, "RETRY_SECONDS", 5.5)
    done = command("run", "list", "--url", "http://127.0.0.1:1", "--token", "x", "--json")
    assert (done.code, done.out) == (3, "")
    assert "waiting for http://127.0.0.1:1: 2 s so far\n" in done.err
    assert "coordinator: GET /v1/runs at http://127.0.0.1:1: no answer after " in done.err
    assert "coordinator doctor" in done.err


def test_a_token_that_ended_or_may_not_do_it_is_refused(
    cli: Command, coordinator: Coordinator, server: ServerProcess, sums: Run
) -> None:
    late = coordinator.create_token("late", "viewer", expires_at=datetime.now(UTC) - timedelta(seconds=1)).token
    done = cli("run", "list", "--token", late)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("coordinator: unauthenticated: the token is unknown, expired or revoked\n  Send ")
    eye = coordinator.create_token("only-reads", "viewer").token
    assert cli("run", "list", "--token", eye).code == 0
    refused = cli("workers", "fence", "sums", "gpu-0", "--reason", "x", "--yes", "--token", eye)
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith("coordinator: forbidden: this call is for admin; the token's role is viewer\n  ")
    assert eye not in refused.err


def test_a_setting_that_is_not_possible_is_told_in_words(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COORDINATOR_POOL_SIZE", "many")
    done = command("serve", "--data", str(tmp_path))
    assert (done.code, done.out) == (2, "")
    assert done.err == "coordinator: COORDINATOR_POOL_SIZE: should be a valid integer\n"


def test_whoever_leaves_a_pipe_ends_the_command_without_noise(server: ServerProcess, sums: Run) -> None:
    for form in ("", "--json"):
        done = bash(server, f"coordinator rollouts list sums {form} | true; exit ${{PIPESTATUS[0]}}")
        assert (done.returncode, done.stdout, done.stderr) == (141, b"", b"")
    done = bash(server, "set -o pipefail; coordinator rollouts list sums | head -1")
    assert done.stdout.startswith(b"ROLLOUT ")
    assert done.stderr == b""


def test_a_table_fits_a_terminal_or_each_row_becomes_a_block(server: ServerProcess, sums: Run) -> None:
    code, wide = in_terminal(server, 200, "workers", "list", "sums")
    assert code == 0
    assert [line.split()[0] for line in wide.splitlines()] == ["WORKER", "gpu-0"]
    code, narrow = in_terminal(server, 40, "workers", "list", "sums")
    assert code == 0
    assert [line.split()[0] for line in narrow.splitlines() if line][:3] == ["worker", "state", "heartbeat"]
    assert all(len(line) <= 40 for line in narrow.splitlines())


def test_a_terminal_is_asked_before_what_cannot_be_undone(server: ServerProcess, coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    new_worker(run, "a")
    code, shown = in_terminal(server, 100, "workers", "fence", run.id, "a", "--reason", "hot", typed="n\n")
    assert (code, run.workers()[0].fenced) == (1, False)
    assert "until it loads and acks a version anew? [y/N]:" in shown
    assert "coordinator: nothing was changed" in shown
    code, shown = in_terminal(server, 100, "workers", "fence", run.id, "a", "--reason", "hot", typed="y\n")
    assert (code, run.workers()[0].fenced) == (0, True)


def test_what_no_ascii_locale_can_show_is_spelled_out_and_json_stays_utf_8(
    server: ServerProcess, coordinator: Coordinator
) -> None:
    run = new_run(coordinator)
    new_worker(run, "a")
    run.fence("a", "zu heiß")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    table = bash(server, f"coordinator workers list {run.id}", **ascii_only)
    assert (table.returncode, rb"zu hei\xdf" in table.stdout) == (0, True), table.stderr
    document = bash(server, f"coordinator workers list {run.id} --json", **ascii_only)
    assert json.loads(document.stdout)["workers"][0]["fenced_reason"] == "zu heiß"
    page = bash(server, "coordinator --help; coordinator run create --help", **ascii_only)
    assert (page.returncode, page.stderr) == (0, b"")
    page.stdout.decode("ascii")


def test_a_shell_completes_commands_and_runs(server: ServerProcess, sums: Run) -> None:
    complete = (
        'eval "$(coordinator --show-completion)"; COMP_WORDS=(coordinator {words}); COMP_CWORD={place}; '
        '_coordinator_completion coordinator; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    nouns = bash(server, complete.format(words='run ""', place=2))
    assert (nouns.stdout.split(), nouns.stderr) == ([b"create", b"list", b"show"], b"")
    runs = bash(server, complete.format(words='run show "su"', place=3))
    assert runs.stdout.split() == [b"sums"]
    elsewhere = bash(server, complete.format(words='run show ""', place=3), COORDINATOR_URL="http://127.0.0.1:1")
    assert (elsewhere.stdout.split(), elsewhere.stderr) == ([], b"")


def test_help_names_every_exit_code(command: Command) -> None:
    page = command("--help")
    assert page.code == 0
    lines = {line.strip().partition(":")[0] for line in page.out.splitlines()}
    assert {str(code) for code in EXIT_CODES} <= lines
    assert command("run").code == 2  # no command: the help, and no success
