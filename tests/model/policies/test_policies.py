"""The service against the fleet in memory."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.rules.activation import activate_policy_version
from tests.ledger_checker import check_ledger
from tests.model.agreeing import search
from tests.model.policies.machine import FleetMachine
from tests.model.policies.service import Service
from tests.model.service import serving


@pytest.mark.long
def test_the_service_agrees_with_the_fleet_in_memory(database_url: str, pytestconfig: pytest.Config) -> None:
    with serving(database_url, Service) as FleetMachine.service:
        search(FleetMachine, pytestconfig)
    assert check_ledger(database_url) == []


SAID = st.dictionaries(st.sampled_from("dbca"), st.sampled_from(["right", "wrong hash", "another version"]), max_size=4)


def test_the_service_s_verdict_is_that_of_the_rule(database_url: str) -> None:
    """Its order of reasons, and the workers in the way: whoever said something else, or nothing."""
    with serving(database_url, Service) as service:

        @settings(derandomize=True, max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        @given(SAID, st.booleans())
        def agrees(said: dict[str, str], committed: bool) -> None:
            service.create({"activation": "by_hand"})
            for name in "abcd":
                service.register(name, "1")
            service.prepare(1, 0, "stream", service.named("stream", 1, 0), {})
            if committed:
                service.commit(1)
            service.open_activation("a", 1, None, False)
            states = {}
            for name, what in said.items():
                version, named = (0 if what == "another version" else 1), service.hashes[1]
                if what == "another version":
                    named = service.hashes[0]
                elif what == "wrong hash":
                    named = "f" * 64
                service.ack(name, "1", version, named, None, [])
                # Of a worker that said something of another version only, nothing was heard of this one.
                states[name] = {"version": 1, "artifact_hash": named} if version == 1 else None
            pointer = {"version": 0, "artifact_hash": service.hashes[0]}
            artifact = {"version": 1, "artifact_hash": service.hashes[1], "committed": committed}
            rule = activate_policy_version(pointer, artifact, states, "abcd")
            activated, reason, waits, missing, mismatched, active = service.activate(1)
            assert (activated, reason, missing, mismatched, active) == (
                rule["activated"],
                rule["reason"],
                rule["missing_workers"],
                rule["mismatched_workers"],
                rule["active_pointer"]["version"],
            )
            assert not waits

        agrees()
