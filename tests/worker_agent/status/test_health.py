"""When a worker counts as alive and as ready."""

import time
from collections.abc import Callable

import pytest

from worker_agent.status.health import LONGEST_TURN_SECONDS, alive, ready
from worker_agent.status.vitals import LOADS, Vitals


@pytest.fixture
def vitals() -> Vitals:
    """Of a worker at work."""
    at_work = Vitals(engine_up=True)
    at_work.register(lost_after_seconds=60.0)
    at_work.load_ended("confirmed", 0.5)
    at_work.turned(3)
    return at_work


def test_at_work_it_is_both(vitals: Vitals) -> None:
    assert (alive(vitals).missing, ready(vitals).missing) == ((), ())


def test_a_loop_that_stands_still_is_not_alive_unless_it_is_inside_the_engine(vitals: Vitals) -> None:
    vitals.turned_at = time.monotonic() - LONGEST_TURN_SECONDS - 1
    (missing,) = alive(vitals).missing
    assert missing == "the loop has not turned for 301 s and is not inside the engine: start this worker again"
    with vitals.in_engine():
        assert alive(vitals).well
        with vitals.in_engine():
            pass
        vitals.turned_at = time.monotonic() - LONGEST_TURN_SECONDS - 1
        assert alive(vitals).well  # still in the outer one
    assert alive(vitals).well  # the engine's time is not the loop's


def behind(vitals: Vitals) -> None:
    vitals.heard_at = time.monotonic() - 61.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: setattr(v, "leaving", True), "it was told to stop"),
        (lambda v: setattr(v, "registered", False), "not registered with the coordinator yet: it is away"),
        (lambda v: v.turned(None), "the active version is not loaded and confirmed yet"),
        (lambda v: setattr(v, "fenced", True), "the coordinator has fenced it"),
        (behind, "the coordinator has answered no heartbeat for 61 s; after 60 s it counts this worker as lost"),
    ],
)
def test_what_is_missing_for_work_is_said_in_words(vitals: Vitals, change: Callable[[Vitals], None], said: str) -> None:
    change(vitals)
    (missing,) = ready(vitals).missing
    assert missing.startswith(said)
    assert alive(vitals).well


def test_before_the_engine_is_there_that_is_what_is_missing() -> None:
    (missing,) = ready(Vitals()).missing
    assert missing.endswith("the engine still starts")


@pytest.mark.parametrize("result", LOADS)
def test_a_load_that_failed_fences_until_one_is_confirmed(vitals: Vitals, result: str) -> None:
    vitals.load_ended(result, 0.5)
    assert vitals.fenced == (result.endswith("_failed") or result == "ack_mismatched")
    vitals.load_ended("confirmed", 0.5)
    assert not vitals.fenced
