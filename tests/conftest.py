"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.database import Databases, databases


@pytest.fixture(scope="session")
def postgres() -> Iterator[Databases]:
    """One embedded Postgres for this test process."""
    with databases() as server:
        yield server


@pytest.fixture
def database_url(postgres: Databases) -> str:
    """A database of this test's own, at the newest schema."""
    return postgres.migrated()
