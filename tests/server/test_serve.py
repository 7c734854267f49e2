"""The command line as an operator meets it: tokens, addresses, and refusals in one line."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import asyncpg
import httpx
import pytest
from sqlalchemy.engine import make_url

from coordinator.client import Coordinator
from tests.client.runs import new_run
from tests.client.server_process import ServerProcess


def coordinator(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    foreign = ("COORDINATOR_", "DATABASE_URL")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return subprocess.run(
        [sys.executable, "-m", "coordinator.cli", *arguments],
        env=clean | environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a command that refused, and what it says to do."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return "coordinator: " + done.stderr.rpartition("coordinator: ")[2].strip()


def test_beyond_loopback_only_with_a_token(database_url: str, tmp_path: Path) -> None:
    serve = ("serve", "--host", "0.0.0.0", "--port", "0", "--data", str(tmp_path))
    line = refusal(coordinator(*serve, DATABASE_URL=database_url))
    assert "refusing to listen beyond loopback" in line
    assert "coordinator token create" in line
    line = refusal(coordinator(*serve, DATABASE_URL=database_url, COORDINATOR_ADMIN_TOKEN="short"))
    assert "shorter than 16" in line


def test_what_keeps_a_server_from_starting_is_said_in_one_line(database_url: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = coordinator("serve", "--port", port, "--data", str(tmp_path), DATABASE_URL=database_url)
        assert f"127.0.0.1:{port}" in refusal(done)
        assert "--port" in refusal(done)
    nowhere = "postgresql://nobody:x@127.0.0.1:1/none"
    assert "cannot reach the database" in refusal(coordinator("migrate", DATABASE_URL=nowhere))
    assert "only postgresql" in refusal(coordinator("migrate", DATABASE_URL="mysql://x/y"))


def test_a_database_that_lets_nobody_in_is_said_in_one_line(database_url: str, tmp_path: Path) -> None:
    """A wrong password, a database that is not there, and one that has too many connections."""
    url = make_url(database_url)
    serve = ("serve", "--port", "0", "--data", str(tmp_path))
    for wrong, said in (
        (url.set(password="wrong"), "password authentication failed"),
        (url.set(database="nowhere"), '"nowhere" does not exist'),
    ):
        for command in (serve, ("migrate",), ("token", "create", "--role", "admin", "--name", "a")):
            done = coordinator(*command, DATABASE_URL=wrong.render_as_string(hide_password=False))
            assert said in refusal(done), done.stderr
    asyncio.run(fill_up(database_url))
    guest = url.set(username="guest", password="guest")
    done = coordinator(*serve, DATABASE_URL=guest.render_as_string(hide_password=False))
    assert "too many connections" in refusal(done)


async def fill_up(database_url: str) -> None:
    """Leaves no connection for the role `guest`, which is no superuser."""
    connection = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    try:
        await connection.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
        await connection.execute(f"ALTER DATABASE {make_url(database_url).database} CONNECTION LIMIT 0")
    finally:
        await connection.close()


def test_a_server_on_an_unmigrated_database_says_what_to_run(postgres: object, tmp_path: Path) -> None:
    from tests.database import Databases

    assert isinstance(postgres, Databases)
    url = postgres.empty()
    serve = ("serve", "--port", "0", "--data", str(tmp_path))
    assert "run 'coordinator migrate'" in refusal(coordinator(*serve, DATABASE_URL=url))
    assert coordinator("migrate", DATABASE_URL=url).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--name", "a", "--role", "king"),
        ("--name", "a b", "--role", "viewer"),
        ("--name", "a", "--role", "worker"),
        ("--name", "a", "--role", "admin", "--run", "r"),
    ],
)
def test_a_token_without_sense_is_refused(database_url: str, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = coordinator("token", "create", *arguments, "--data", str(tmp_path), DATABASE_URL=database_url)
    assert done.returncode == 2
    assert done.stdout == ""


def test_the_first_token_is_its_owner_s_and_others_are_made_beside_a_running_server(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    server.start()
    try:
        file = server.data / "admin.token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        done = coordinator("token", "create", "--name", "eye", "--role", "viewer", "--data", str(server.data))
        assert done.returncode == 0, done.stderr
        answer = httpx.get(f"{server.url}/v1/runs", headers={"authorization": f"Bearer {done.stdout.strip()}"})
        assert answer.status_code == 200
        again = coordinator("token", "create", "--name", "eye", "--role", "viewer", "--data", str(server.data))
        assert "a token named eye exists" in refusal(again)
    finally:
        server.stop()


def test_a_token_for_a_run_that_is_not_there_yet_is_made_and_said(server: ServerProcess) -> None:
    def token(name: str, run: str) -> tuple[str, str]:
        arguments = ("--name", name, "--role", "trainer", "--run", run, "--data", str(server.data))
        done = coordinator("token", "create", *arguments)
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith("coordinator: ")]
        return done.stdout.strip(), "".join(said)

    early, warning = token("early", "token-sums")
    said = "coordinator: there is no run token-sums yet: the token counts once it is created ("
    assert warning.startswith(said) and "token-other" not in warning
    with Coordinator(server.url, server.token) as admin:
        new_run(admin, "token-other")
        _, warning = token("typo", "token-smus")
        assert "the runs are token-other" in warning
        new_run(admin, "token-sums")
    with Coordinator(server.url, early) as trainer:
        assert trainer.run("token-sums").view().run_id == "token-sums"
    _, warning = token("late", "token-sums")
    assert warning == ""


def test_sigterm_closes_the_embedded_postgres_in_order(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="coordinator-stop-"))
    folder.chmod(0o755)  # as root, Postgres runs as another user
    server = ServerProcess(folder / "data")
    try:
        server.start()
        assert server.stop() == 0
        log = (folder / "data" / "postgres" / "postgres.log").read_text()
        assert "received fast shutdown request" in log
        assert "received immediate shutdown request" not in log
        shutil.rmtree(folder / "data")  # nobody writes there any more
    finally:
        server.stop()
        shutil.rmtree(folder)


def test_what_is_no_http_is_answered_by_a_problem_document(server: ServerProcess) -> None:
    address = httpx.URL(server.url)
    for nonsense in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
        with socket.create_connection((address.host, address.port), timeout=10) as connection:
            connection.sendall(nonsense)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), answer
        assert b"content-type: application/problem+json" in head
        assert json.loads(body)["code"] == "malformed_http"
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_a_data_folder_is_served_once(server: ServerProcess) -> None:
    before = server.url
    line = refusal(coordinator("serve", "--port", "0", "--data", str(server.data)))
    assert f"is served already, at {before}" in line
    assert server.url == before
    assert httpx.get(f"{server.url}/readyz", trust_env=False).status_code == 200


def test_a_token_for_a_folder_without_a_database_makes_none(tmp_path: Path) -> None:
    done = coordinator("token", "create", "--name", "n", "--role", "admin", "--data", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "there is no database in" in done.stderr
    assert not (tmp_path / "nowhere").exists()
