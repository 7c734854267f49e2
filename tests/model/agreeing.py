"""What the machines of these tests have in common: each call is made to both sides, which must agree afterwards."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.model.ledger import Answer, Refused

FIXED_EXAMPLES = 40


def plain(answer: Any) -> Any:
    """An answer as JSON has it."""
    return [plain(a) for a in answer] if isinstance(answer, list | tuple) else answer


class AgreeingMachine(RuleBasedStateMachine):
    """`service` is set by whoever runs the machine; `twin` is its like in memory, made at the beginning."""

    service: ClassVar[Any]
    twin: Any
    agreed = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def both(self, name: str, *args: Any, retry: bool = True) -> Answer | str | None:
        """Makes one call to both. The answer, or the code of the refusal, must be the same, and all that stands."""
        note(f"{name}({', '.join(map(repr, args))})")
        self.agreed = False
        answers: list[Any] = []
        for side in (self.service, self.twin):
            try:
                answers.append(plain(getattr(side, name)(*args)))
            except Refused as refused:
                answers.append(str(refused))
        assert answers[0] == answers[1], f"{name}: the service answers\n  {answers[0]}\nthe twin\n  {answers[1]}"
        if retry:
            self.calls.append((name, args))
        self.compare()
        answer: Answer | str | None = answers[0]
        return answer

    def compare(self) -> None:
        """Asserts that all that stands is the same on both sides, and notes so in `agreed`."""
        raise NotImplementedError


def search(machine: type[AgreeingMachine], pytestconfig: pytest.Config) -> None:
    """Runs the machine: the same sequences each time, or with `--model-examples N` so many new ones."""
    searched = pytestconfig.getoption("model_examples")
    run_state_machine_as_test(
        machine,
        settings=settings(
            derandomize=searched is None,
            max_examples=searched or FIXED_EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
