"""Producers, judges, competing trainers and a rewinder as processes of their own, on two replicas over one database."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

from coordinator.client import Coordinator
from tests.client.server_process import ServerProcess
from tests.ledger_checker import check_ledger
from tests.load import Clients, publish, start_run

VERSIONS = 5


def doze(trainer: subprocess.Popen[bytes]) -> None:
    """It sleeps through the lease of its update, as in a long collective or a suspended machine, and goes on."""
    trainer.send_signal(signal.SIGSTOP)
    time.sleep(1.7)
    trainer.send_signal(signal.SIGCONT)


def test_the_audit_proves_the_promises_after_a_storm(
    replicas: list[ServerProcess], replicated_url: str, tmp_path: Path
) -> None:
    first = replicas[0]
    with Coordinator(first.url, first.token) as coordinator:
        run = start_run(coordinator, "storm", rewind_commits=1000)
        clients = Clients(tmp_path, run, [(server.url, server.token) for server in replicas])
        trainers = ["t1", "t2", "t3"]
        try:
            for role, name in (
                ("produce", "w1"), ("produce", "w2"), ("judge", "j1"), ("judge", "j2"), ("rewind", "r1"),
                *(("train", name) for name in trainers),
            ):  # fmt: skip
                clients.start(role, name)
            clients.wait_for("active", 2)  # each producer has acked version 0
            while len(run.workers()) < 2:
                time.sleep(0.1)
            for version in range(1, VERSIONS + 1):
                publish(run, tmp_path, version)
                doze(clients.processes[random.choice(trainers)])
            until = time.monotonic() + 120
            while not {"aborted", "expired"} <= {update.state for update in run.updates()}:
                assert time.monotonic() < until, "no update was aborted, or none expired"
                doze(clients.processes[random.choice(trainers)])
            clients.wait_for("commit", 6)
            clients.wait_for("rollout", 400)
            told, faults, retries = clients.told()
        finally:
            clients.stop()
        states = [update.state for update in run.updates()]
    assert faults == []
    assert retries == [], "some client saw a 5xx or a broken connection"
    assert check_ledger(replicated_url, {"storm": told}) == []
    # The load was one: all of it happened, and more than once.
    assert states.count("committed") + states.count("rewound") >= 6
    assert len(told.rollouts) > 200
