"""The rollout state machine, written once as data.

The guard, the SQL conditions, the diagram in the documentation and the audit checker all derive from the two
tables in this module::

    generated --reward_ready--> rewarded --reserve--> reserved --commit--> consumed
                                   ^------------abort------------'

Those four steps are the core. Everything else that can happen to a rollout is in ``OUTCOME_TRANSITIONS``.
"""

from collections.abc import Iterator
from enum import StrEnum
from itertools import product


class State(StrEnum):
    """Where a rollout stands. A rollout that has not arrived has no state; the tables write that as None."""

    generated = "generated"
    rewarded = "rewarded"
    reserved = "reserved"
    consumed = "consumed"
    generation_failed = "generation_failed"
    reward_failed = "reward_failed"
    quarantined = "quarantined"
    offline = "offline"


class Event(StrEnum):
    """What may happen to a rollout. Every event adds one to its revision."""

    arrive = "arrive"
    generation_fail = "generation_fail"
    reward_ready = "reward_ready"
    reserve = "reserve"
    commit = "commit"
    abort = "abort"
    reward_fail = "reward_fail"
    rescore = "rescore"
    quarantine = "quarantine"
    set_aside = "set_aside"
    discard = "discard"
    release = "release"
    rewind = "rewind"


LIFECYCLE_TRANSITIONS: dict[tuple[str, str], str] = {
    ("generated", "reward_ready"): "rewarded",
    ("rewarded", "reserve"): "reserved",
    ("reserved", "commit"): "consumed",
    ("reserved", "abort"): "rewarded",
}
"""The core: (state, event) -> next state. Nothing skips a stage."""

# The states that a rollout has before any update holds it; which one follows from its stored reward.
_BY_REWARD = ("generated", "rewarded", "reward_failed")

_OUTCOMES: tuple[tuple[tuple[str | None, ...], str, tuple[str, ...]], ...] = (
    ((None,), "arrive", ("generated",)),
    ((None,), "generation_fail", ("generation_failed",)),
    (("generated",), "reward_fail", ("reward_failed",)),
    (("reward_failed",), "reward_ready", ("rewarded",)),
    (("rewarded",), "rescore", ("rewarded",)),
    ((*_BY_REWARD, "reserved"), "quarantine", ("quarantined",)),
    ((*_BY_REWARD, "quarantined"), "set_aside", ("offline",)),
    (("reserved",), "discard", ("offline",)),
    (("quarantined", "offline"), "release", _BY_REWARD),
    (("consumed", "offline", "quarantined"), "rewind", _BY_REWARD),
)

OUTCOME_TRANSITIONS: frozenset[tuple[str | None, str, str]] = frozenset(
    (origin, event, target)
    for origins, event, destinations in _OUTCOMES
    for origin, target in product(origins, destinations)
)
"""All (from, event, to) outside the core; ``from`` is None for a rollout that has not arrived.

Where one event leads to several states, the stored reward decides: see ``state_for_reward``. Two rows hold
only under a condition that the state alone does not tell: ``offline`` is released only when ``group_refused``
put it there, and ``quarantined`` is set aside only because its group is spent.
"""


def _all_transitions() -> Iterator[tuple[str | None, str, str]]:
    for (origin, event), target in LIFECYCLE_TRANSITIONS.items():
        yield origin, event, target
    yield from sorted(OUTCOME_TRANSITIONS, key=lambda step: (step[0] or "", step[1], step[2]))


def transition_lifecycle(state: str, event: str) -> str:
    """The state that follows ``state`` on ``event`` in the core lifecycle.

    Raises ValueError for every pair that is not among the four of ``LIFECYCLE_TRANSITIONS``, the outcomes
    (failures, quarantine, release, rewind) included.
    """
    try:
        return LIFECYCLE_TRANSITIONS[(state, event)]
    except (KeyError, TypeError):
        raise ValueError(f"no core lifecycle transition from {state!r} on {event!r}") from None


def sources(event: str) -> tuple[str, ...]:
    """The states that ``event`` may leave, core and outcomes together, sorted.

    Empty for ``arrive`` and ``generation_fail``, which start from nothing. Raises ValueError for an unknown
    event, so that a misspelt one never becomes a condition that no row meets.
    """
    known = Event(event)
    return tuple(sorted({origin for origin, name, _ in _all_transitions() if name == known and origin is not None}))


def targets(state: str | None, event: str) -> frozenset[str]:
    """The states that ``event`` may lead to from ``state`` (None: not arrived), core and outcomes together.

    Empty where the event is not allowed. Raises ValueError for an unknown state or event.
    """
    known = Event(event)
    origin = None if state is None else State(state)
    return frozenset(target for start, name, target in _all_transitions() if start == origin and name == known)


def state_for_reward(reward_status: str | None) -> str:
    """The state of a rollout that no update and no gate holds, from the status of its stored reward.

    ``reward_status`` is None (no reward yet), ``ok``, ``timeout`` or ``error``. Raises ValueError otherwise.
    """
    match reward_status:
        case None:
            return "generated"
        case "ok":
            return "rewarded"
        case "timeout" | "error":
            return "reward_failed"
    raise ValueError(f"unknown reward status {reward_status!r}: expected None, 'ok', 'timeout' or 'error'")


def mermaid_diagram() -> str:
    """The whole machine as a Mermaid ``stateDiagram-v2``, core first; the same text on every call."""
    lines = ["stateDiagram-v2"]
    for origin, event, target in _all_transitions():
        lines.append(f"    {'[*]' if origin is None else origin} --> {target}: {event}")
    return "\n".join(lines) + "\n"
