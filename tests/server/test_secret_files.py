"""DATABASE_URL and the admin's token may lie in files, as containers have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from coordinator.settings import Settings

URL = "postgresql://coordinator:hunter2hunter2@postgres:5432/coordinator"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DATABASE_URL", "DATABASE_URL_FILE", "COORDINATOR_ADMIN_TOKEN", "COORDINATOR_ADMIN_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)


def test_what_is_in_the_files_counts_as_if_it_was_in_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, content in (("DATABASE_URL_FILE", URL), ("COORDINATOR_ADMIN_TOKEN_FILE", "token-of-an-admin")):
        (tmp_path / variable).write_text(content + "\n")
        monkeypatch.setenv(variable, str(tmp_path / variable))
    settings = Settings()
    assert settings.database_url is not None and settings.database_url.get_secret_value() == URL
    assert settings.admin_token is not None and settings.admin_token.get_secret_value() == "token-of-an-admin"
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "names a file that cannot be read"), ("\n", "names an empty file")]
)
def test_a_file_that_is_not_there_or_empty_is_named(
    content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "url").write_text(content)
    monkeypatch.setenv("DATABASE_URL_FILE", str(tmp_path / "url"))
    with pytest.raises(ValidationError, match=f"DATABASE_URL_FILE {message}.*{tmp_path / 'url'}"):
        Settings()


def test_a_secret_that_is_given_twice_is_refused_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text(URL)
    monkeypatch.setenv("DATABASE_URL", URL)
    monkeypatch.setenv("DATABASE_URL_FILE", str(tmp_path / "url"))
    with pytest.raises(ValidationError, match="DATABASE_URL and DATABASE_URL_FILE are both set") as refused:
        Settings()
    assert "hunter2" not in str(refused.value)
