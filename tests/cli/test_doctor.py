"""doctor: each thing that may be wrong, made wrong, with what it says to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from coordinator.cli import findings
from coordinator.cli.findings import GIB, clocks, space
from coordinator.storage.database import connect
from coordinator.tokens import service
from coordinator.wire.tokens import CreateToken
from tests.cli.conftest import Command, Ended
from tests.client.server_process import ServerProcess
from tests.database import Databases


def test_all_is_in_order_beside_a_server(cli: Command, server: ServerProcess) -> None:
    done = cli("doctor")
    assert done.code == 0, done.out
    checks = [line.split(": ")[0].split(maxsplit=1) for line in done.out.splitlines() if not line.startswith(" ")]
    assert [tuple(check) for check in checks if "disk" not in check[1]] == [
        ("ok", "artifact store"),
        ("ok", "database"),
        ("ok", "durability"),
        ("ok", "schema"),
        ("ok", "clocks"),
        ("ok", "notices"),
        ("ok", "tokens"),
        ("ok", "server"),
    ]
    assert {check[1] for check in checks} >= {"disk of the data folder"}
    assert f"server: {server.url} is ready and knows the token" in done.out
    assert server.token not in done.out
    assert list((server.data / "artifacts").glob("doctor-*")) == []


def test_nothing_at_all_is_told_with_what_to_do(command: Command, tmp_path: Path) -> None:
    done = command("doctor", "--data", str(tmp_path / "none"), "--json")
    assert (done.code, done.err, (tmp_path / "none").exists()) == (1, "", False)
    told = {finding["check"]: finding for finding in done.document["findings"]}
    assert {name: finding["verdict"] for name, finding in told.items() if "disk" not in name} == {
        "artifact store": "warning",
        "database": "fault",
        "server": "warning",
    }
    assert all(finding["next_step"] for finding in told.values() if finding["verdict"] != "ok")


def wrong(done: Ended) -> dict[str, tuple[str, str]]:
    """What is not in order: the check, its verdict, and all that is said of it."""
    told = [finding for finding in done.document["findings"] if finding["verdict"] != "ok"]
    return {f["check"]: (f["verdict"], f"{f['detail']} {f['next_step']}") for f in told if "disk" not in f["check"]}


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        ("ALTER DATABASE {name} SET synchronous_commit = off", "durability", "Set synchronous_commit=on"),
        ("ALTER DATABASE {name} SET default_transaction_read_only = on", "database", "takes no writes"),
        ("UPDATE alembic_version SET version_num = '0003'", "schema", "Run 'coordinator migrate'"),
        ("UPDATE alembic_version SET version_num = '9999'", "schema", "A newer release has migrated it"),
        ("UPDATE tokens SET revoked_at = now()", "tokens", "there is no valid admin's token"),
    ],
)
def test_what_is_wrong_with_a_database_is_a_fault(
    command: Command,
    postgres: Databases,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: str,
    check: str,
    said: str,
) -> None:
    url = postgres.migrated()
    asyncio.run(with_admin(url, change.format(name=url.rpartition("/")[2])))
    monkeypatch.setenv("DATABASE_URL", url)
    done = command("doctor", "--data", str(tmp_path), "--json")
    told = wrong(done)
    verdict, words = told.pop(check)
    assert (done.code, verdict) == (1, "fault")
    assert said in words
    assert told.keys() == {"artifact store", "server"}  # there is no server in this folder, and nothing else is wrong
    postgres.give_back(url)


async def with_admin(url: str, change: str, expires_in: timedelta | None = None) -> None:
    database = connect(url, pool_size=1)
    try:
        await database.transaction(service.create, CreateToken(name="ops", role="admin"))
        if expires_in is not None:
            soon = CreateToken(name="soon", role="viewer", expires_at=datetime.now(UTC) + expires_in)
            await database.transaction(service.create, soon)
    finally:
        await database.close()
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        await connection.execute(change)
    finally:
        await connection.close()


def test_what_is_for_soon_is_a_warning(
    command: Command, postgres: Databases, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A token that expires, and a database whose notices are lost: they are heard in another one here."""
    url, elsewhere = postgres.migrated(), postgres.empty()
    asyncio.run(with_admin(url, "SELECT 1", timedelta(days=3)))
    monkeypatch.setenv("DATABASE_URL", url)
    monkeypatch.setattr(findings, "HEARD_WITHIN_SECONDS", 0.3)

    async def astray(_: AsyncEngine) -> asyncpg.Connection:
        return await asyncpg.connect(elsewhere.replace("+asyncpg", ""))

    monkeypatch.setattr(findings, "listening_connection", astray)
    (tmp_path / "artifacts").mkdir()
    done = command("doctor", "--data", str(tmp_path), "--json")
    told = wrong(done)
    assert (done.code, {check: verdict for check, (verdict, _) in told.items()}) == (
        0,
        {"notices": "warning", "tokens": "warning", "server": "warning"},
    )
    assert "not through a pooler" in told["notices"][1]
    assert "these expire soon: soon in 3 d" in told["tokens"][1]


def test_a_database_that_lets_nobody_in_and_a_server_that_does_not_answer_are_faults(
    command: Command, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody:secret@127.0.0.1:1/none")
    two = f"http://127.0.0.1:1,{server.url}"
    done = command("doctor", "--data", str(tmp_path), "--url", two, "--token", "rct_unknown_token")
    assert done.code == 1
    assert "fault    database: postgresql://nobody:***@127.0.0.1:1/none: " in done.out
    assert "fault    server: http://127.0.0.1:1 does not answer: " in done.out
    assert f"fault    server: {server.url} is ready, but does not know this token\n" in done.out
    assert "secret" not in done.out + done.err
    monkeypatch.setenv("DATABASE_URL", "nonsense")
    assert "fault    database: DATABASE_URL is no address" in command("doctor", "--data", str(tmp_path)).out


def test_an_artifact_store_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "artifacts").symlink_to("/proc")
    finding = findings.artifact_store(tmp_path)
    assert finding.verdict == "fault"
    assert "own it" in str(finding.next_step)


@pytest.mark.parametrize(
    ("free", "total", "verdict"),
    [
        (GIB - 1, 100 * GIB, "fault"),
        (GIB, 5 * GIB, "ok"),
        (9 * GIB, 100 * GIB, "warning"),
        (11 * GIB, 1000 * GIB, "ok"),
    ],
)
def test_space_is_short_below_one_gib_and_scarce_below_ten(free: int, total: int, verdict: str) -> None:
    assert space("disk", Path("/data"), free, total).verdict == verdict


@pytest.mark.parametrize(
    ("apart", "uncertain", "verdict"),
    [(0.2, 0.0, "ok"), (-1.5, 0.1, "warning"), (1.5, 1.0, "ok"), (9.0, 0.0, "warning")],
)
def test_clocks_are_apart_by_more_than_a_second_and_the_doubt(apart: float, uncertain: float, verdict: str) -> None:
    assert clocks(apart, uncertain).verdict == verdict


@pytest.fixture
def closed_to_us(tmp_path: Path) -> Iterator[Path]:
    """A data folder of which this user may read nothing but that it is there."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "address").write_text("http://127.0.0.1:1")
    was = os.geteuid()
    folder.chmod(0o600)
    if was == 0:  # to whom no folder is closed
        os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(was)
        folder.chmod(0o700)


def test_a_folder_that_is_closed_ends_no_check_of_the_rest(command: Command, closed_to_us: Path) -> None:
    done = command("doctor", "--data", str(closed_to_us), "--json")
    assert (done.code, done.err) == (1, "")
    told = wrong(done)
    assert told.keys() >= {"artifact store", "database", "server"}
    assert all("Permission denied" in text for verdict, text in told.values() if verdict == "fault")


@pytest.mark.parametrize("written", [b"\xff\xfe\x00", "gehe\u00efm".encode(), b"two\nlines", b"\x1b[31mred"])
def test_a_token_file_that_holds_no_token_is_a_finding(
    command: Command, server: ServerProcess, tmp_path: Path, written: bytes
) -> None:
    (tmp_path / "admin.token").write_bytes(written)
    (tmp_path / "address").write_text(server.url)
    done = command("doctor", "--data", str(tmp_path), "--json")
    verdict, text = wrong(done)["server"]
    assert (done.err, verdict) == ("", "fault")
    assert "characters that no token has" in text
