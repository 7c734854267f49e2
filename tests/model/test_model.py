"""The service against the ledger in memory.

`pytest tests/model --model-examples 1000` is a longer search, elsewhere each time.
"""

from __future__ import annotations

import pytest

from tests.ledger_checker import check_ledger
from tests.model.agreeing import search
from tests.model.machine import LedgerMachine
from tests.model.service import Service, serving


def test_the_service_agrees_with_the_ledger_in_memory(database_url: str, pytestconfig: pytest.Config) -> None:
    with serving(database_url, Service) as LedgerMachine.service:
        search(LedgerMachine, pytestconfig)
    assert check_ledger(database_url) == []
