from itertools import product

import pytest

from coordinator.rules.lifecycle import (
    LIFECYCLE_TRANSITIONS,
    OUTCOME_TRANSITIONS,
    Event,
    State,
    mermaid_diagram,
    sources,
    state_for_reward,
    targets,
    transition_lifecycle,
)

CORE = {
    ("generated", "reward_ready"): "rewarded",
    ("rewarded", "reserve"): "reserved",
    ("reserved", "commit"): "consumed",
    ("reserved", "abort"): "rewarded",
}

OUTCOMES = """
    nothing arrive generated
    nothing generation_fail generation_failed
    generated reward_fail reward_failed
    reward_failed reward_ready rewarded
    rewarded rescore rewarded
    generated quarantine quarantined
    rewarded quarantine quarantined
    reward_failed quarantine quarantined
    reserved quarantine quarantined
    generated set_aside offline
    rewarded set_aside offline
    reward_failed set_aside offline
    quarantined set_aside offline
    reserved discard offline
    quarantined release generated
    quarantined release rewarded
    quarantined release reward_failed
    offline release generated
    offline release rewarded
    offline release reward_failed
    consumed rewind generated
    consumed rewind rewarded
    consumed rewind reward_failed
    offline rewind generated
    offline rewind rewarded
    offline rewind reward_failed
    quarantined rewind generated
    quarantined rewind rewarded
    quarantined rewind reward_failed
"""
ALL = {tuple(line.split()) for line in OUTCOMES.strip().splitlines()} | {
    (state, event, target) for (state, event), target in CORE.items()
}


def test_the_core_is_exactly_four_transitions_of_plain_strings():
    assert LIFECYCLE_TRANSITIONS == CORE
    assert {type(part) for key, value in LIFECYCLE_TRANSITIONS.items() for part in (*key, value)} == {str}
    assert "'generated', 'reward_ready'" in repr(LIFECYCLE_TRANSITIONS)


def test_the_outcomes_are_the_written_table():
    written = {tuple("nothing" if part is None else part for part in step) for step in OUTCOME_TRANSITIONS}
    assert written | {(*key, value) for key, value in CORE.items()} == ALL
    assert not {(origin, event) for origin, event, _ in OUTCOME_TRANSITIONS} & CORE.keys()
    assert {type(part) for step in OUTCOME_TRANSITIONS for part in step} == {str, type(None)}


def test_every_state_and_event_of_the_tables_is_declared_and_used():
    assert {part for origin, _, target in ALL for part in (origin, target)} == {"nothing", *State}
    assert {event for _, event, _ in ALL} == set(Event)


@pytest.mark.parametrize(("state", "event"), list(product([*State, None], Event)))
def test_every_pair(state, event):
    origin = "nothing" if state is None else str(state)
    expected = {target for start, name, target in ALL if (start, name) == (origin, event)}
    assert targets(state, event) == expected
    if state is not None:
        assert (state in sources(event)) == bool(expected)
    if (state, event) in CORE:
        for pair in ((state, event), (str(state), str(event))):
            result = transition_lifecycle(*pair)
            assert result == CORE[pair]
            assert type(result) is str
    else:
        with pytest.raises(ValueError, match="no core lifecycle transition"):
            transition_lifecycle(state, event)


@pytest.mark.parametrize(
    ("state", "event"),
    [("", ""), ("Generated", "reward_ready"), ("rewarded", "consume"), (None, None), ([], {}), (1, True)],
)
def test_what_is_no_pair_at_all_is_a_value_error(state, event):
    with pytest.raises(ValueError):
        transition_lifecycle(state, event)


def test_sources_are_sorted_plain_states():
    assert sources("arrive") == ()
    assert sources("reserve") == ("rewarded",)
    assert sources(Event.quarantine) == ("generated", "reserved", "reward_failed", "rewarded")
    assert sources("reward_ready") == ("generated", "reward_failed")
    assert {type(state) for event in Event for state in sources(event)} == {str}


def test_an_unknown_name_is_an_error_and_not_an_empty_answer():
    with pytest.raises(ValueError):
        sources("comit")
    with pytest.raises(ValueError):
        targets("rewarded", "comit")
    with pytest.raises(ValueError):
        targets("rewarted", "commit")


@pytest.mark.parametrize(
    ("status", "state"),
    [(None, "generated"), ("ok", "rewarded"), ("timeout", "reward_failed"), ("error", "reward_failed")],
)
def test_the_stored_reward_gives_the_state(status, state):
    assert state_for_reward(status) == state
    for origin, event in product(("quarantined", "offline"), ("release", "rewind")):
        assert state in targets(origin, event)


def test_an_unknown_reward_status_is_an_error():
    for status in ("", "OK", "failed", 0):
        with pytest.raises(ValueError):
            state_for_reward(status)


def test_the_diagram_draws_every_transition_once():
    lines = mermaid_diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    drawn = [line.strip().replace(" --> ", " ").replace(": ", " ").split() for line in lines[1:]]
    assert len(drawn) == len(ALL)
    assert {("nothing" if a == "[*]" else a, event, b) for a, b, event in drawn} == ALL
    assert [event for _, _, event in drawn[:4]] == ["reward_ready", "reserve", "commit", "abort"]
    assert mermaid_diagram() == mermaid_diagram()
