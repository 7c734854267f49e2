"""The service against the ledger in memory."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.ledger_checker import check_ledger
from tests.model.machine import LedgerMachine
from tests.model.service import serving


def test_the_service_agrees_with_the_ledger_in_memory(database_url: str) -> None:
    with serving(database_url) as LedgerMachine.service:
        run_state_machine_as_test(
            LedgerMachine,
            settings=settings(
                derandomize=True,
                max_examples=40,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert check_ledger(database_url) == []
