"""The service against the ledger in memory.

`pytest tests/model --model-examples 1000` is a longer search, elsewhere each time.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.ledger_checker import check_ledger
from tests.model.machine import LedgerMachine
from tests.model.service import Service, serving

FIXED_EXAMPLES = 40


def test_the_service_agrees_with_the_ledger_in_memory(database_url: str, pytestconfig: pytest.Config) -> None:
    searched = pytestconfig.getoption("model_examples")
    with serving(database_url, Service) as LedgerMachine.service:
        run_state_machine_as_test(
            LedgerMachine,
            settings=settings(
                derandomize=searched is None,
                max_examples=searched or FIXED_EXAMPLES,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert check_ledger(database_url) == []
