"""A trainer that waits for an activation is told what it waits for."""

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pytest

from coordinator.client import Coordinator, NotActivated
from coordinator.client.waiting import Waiting
from coordinator.wire.policies import ActivationView, RequiredWorker
from tests.client.runs import BASE, new_run, new_worker, write_adapter

Ack = Literal["missing", "matching", "mismatched"]


def activation(
    state: Literal["waiting", "open", "failed"] = "open", reason: str | None = None, **acks: Ack
) -> ActivationView:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return ActivationView(
        activation_id="to-1",
        version=1,
        artifact_hash="a" * 64,
        state=state,
        required=tuple(
            RequiredWorker(
                worker_id=worker,
                incarnation="life-1",
                ack=ack,
                acked_at=None if ack == "missing" else at,
                detail="another hash" if ack == "mismatched" else None,
            )
            for worker, ack in acks.items()
        ),
        dropped=(),
        reason=reason,
        asked_at=at,
        opened_at=None if state == "waiting" else at,
        deadline_at=None if state == "waiting" else at,
        ended_at=None,
    )


def test_it_is_said_after_two_seconds_then_when_it_changes_and_every_ten(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.client")
    both, one = activation(a="missing", b="mismatched"), activation(a="matching", b="missing")
    waiting = Waiting(100.0)
    said: list[tuple[float, str]] = []
    for now, view in [
        (100.0, both), (101.9, one), (102.0, both), (103.0, both), (111.9, both), (112.0, both), (113.0, one),
        (122.9, one), (123.0, one), (124.0, activation(a="matching", b="matching")), (125.0, activation("waiting")),
    ]:  # fmt: skip
        caplog.clear()
        waiting.look(view, now)
        assert waiting.next_at > now
        said += [(now, record.getMessage()) for record in caplog.records]
    deadline = "; its deadline is 03:04:05 UTC"
    words = [
        (102.0, "a (no ack yet), b (mismatched ack: another hash)"),
        (112.0, "a (no ack yet), b (mismatched ack: another hash)"),
        (113.0, "b (no ack yet)"),
        (123.0, "b (no ack yet)"),
        (124.0, "the artifact's commit, or the switch by hand: every worker has confirmed"),
        (125.0, "the activation that is open before it"),
    ]
    assert said == [
        (
            at,
            f"activation to-1 of version 1 waits for {what} ({at - 100:.0f} s so far{'' if at == 125.0 else deadline})",
        )
        for at, what in words
    ]


def test_what_is_raised_names_the_workers() -> None:
    assert str(NotActivated(activation(a="matching", b="missing"))) == (
        "version 1 is not active: activation to-1 is open; it waits for b (no ack yet)"
    )
    assert str(NotActivated(activation("failed", "deadline: missing_worker_ack", a="matching", b="missing"))) == (
        "version 1 is not active: activation to-1 is failed; deadline: missing_worker_ack; "
        "not confirmed by b (no ack yet)"
    )
    assert str(NotActivated(activation("failed", "version 2 was withdrawn"))) == (
        "version 1 is not active: activation to-1 is failed; version 2 was withdrawn"
    )


def test_activate_says_whom_it_waits_for_until_all_have_acked(
    coordinator: Coordinator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coordinator.client")
    run = new_run(coordinator)
    workers = [new_worker(run, "w1"), new_worker(run, "w2")]
    policy = run.publish(version=1, parent_version=0, folder=write_adapter(tmp_path / "a"), base_model=BASE)
    states: list[str] = []
    trainer = threading.Thread(target=lambda: states.append(run.activate(1).state))
    trainer.start()
    for worker, named in zip(workers, ("w1 (no ack yet), w2 (no ack yet) (", "for w2 (no ack yet) ("), strict=True):
        until_there(lambda: any(named in record.getMessage() for record in caplog.records))  # noqa: B023
        worker.ack(1, policy.artifact_hash)
    trainer.join(60)
    assert states == ["succeeded"]


def test_activate_waits_for_its_turn_behind_an_older_version(
    coordinator: Coordinator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coordinator.client")
    run = new_run(coordinator)
    worker = new_worker(run)
    first, second = (
        run.publish(
            version=n, parent_version=n - 1, folder=write_adapter(tmp_path / str(n), b"%d" % n), base_model=BASE
        )
        for n in (1, 2)
    )
    run.open_activation(1, "to-1")
    states: list[str] = []
    trainer = threading.Thread(target=lambda: states.append(run.activate(2, "to-2").state))
    trainer.start()
    until_there(lambda: any("waits for the activation that is open before it (" in m for m in caplog.messages))
    worker.ack(1, first.artifact_hash)
    until_there(lambda: run.activation("to-2").state == "open")
    worker.ack(2, second.artifact_hash)
    trainer.join(60)
    assert states == ["succeeded"]


def until_there(there: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not there():
        assert time.monotonic() < give_up
        time.sleep(0.05)
