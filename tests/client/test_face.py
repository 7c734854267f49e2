"""The public face, and what importing it costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import coordinator.client
from coordinator.client import Coordinator, NotConfigured


def test_the_public_names_are_these() -> None:
    assert coordinator.client.__all__ == [
        "ArtifactCorrupt",
        "AsyncCoordinator",
        "AsyncRun",
        "AsyncUpdate",
        "AsyncWorker",
        "Candidates",
        "Coordinator",
        "CoordinatorError",
        "DriftSuspect",
        "LeaseExpired",
        "LineConflict",
        "NotActivated",
        "NotConfigured",
        "Refused",
        "Reserved",
        "Run",
        "Trajectory",
        "UnexpectedAnswer",
        "Unreachable",
        "Update",
        "UpdateFenced",
        "Worker",
    ]


def test_importing_the_client_loads_no_server_and_no_torch() -> None:
    code = (
        "import sys, coordinator.client;"
        "print([m for m in ('fastapi', 'sqlalchemy', 'torch', 'typer') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_address_and_token_come_from_arguments_then_environment_then_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COORDINATOR_URL", raising=False)
    monkeypatch.delenv("COORDINATOR_TOKEN", raising=False)
    monkeypatch.delenv("COORDINATOR_TOKEN_FILE", raising=False)
    monkeypatch.setenv("COORDINATOR_DATA", str(tmp_path))
    with pytest.raises(NotConfigured, match="COORDINATOR_URL"):
        Coordinator()
    (tmp_path / "address").write_text("http://127.0.0.1:1\n")
    with pytest.raises(NotConfigured, match=r"admin\.token"):
        Coordinator()
    (tmp_path / "admin.token").write_text("secret\n")
    assert Coordinator().url == "http://127.0.0.1:1"
    monkeypatch.setenv("COORDINATOR_URL", "http://127.0.0.1:2")
    assert Coordinator().url == "http://127.0.0.1:2"
    assert Coordinator("http://127.0.0.1:3/").url == "http://127.0.0.1:3"


def test_a_token_may_lie_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COORDINATOR_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("COORDINATOR_TOKEN", raising=False)
    monkeypatch.setenv("COORDINATOR_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(NotConfigured, match="COORDINATOR_TOKEN_FILE names a file that cannot be read"):
        Coordinator()
    (tmp_path / "token").write_text("two\nlines\n")
    with pytest.raises(NotConfigured, match="characters that no token has"):  # this is what was read
        Coordinator()
    monkeypatch.setenv("COORDINATOR_TOKEN", "secret")  # the variable itself counts before the file
    assert Coordinator().url == "http://127.0.0.1:1"
    monkeypatch.delenv("COORDINATOR_TOKEN")
    (tmp_path / "token").write_text("secret\n")
    assert Coordinator().url == "http://127.0.0.1:1"


def test_a_bad_address_or_token_is_named_at_once() -> None:
    with pytest.raises(NotConfigured, match="http://"):
        Coordinator("127.0.0.1:8000", "token")
    with pytest.raises(NotConfigured, match="token"):
        Coordinator("http://127.0.0.1:8000", "two\nlines")
