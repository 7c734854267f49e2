"""A storm of client processes on two replicas over one database, one of which is killed in the middle."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from coordinator.client import Coordinator, Run
from tests.client.server_process import ServerProcess
from tests.ledger_checker import check_ledger
from tests.load import Clients, Retention, start_run

ROLLOUTS = 2000
CLIENTS = {
    "produce": ("w1", "w2"),
    "judge": ("j1",),
    "train": ("t1", "t2", "t3"),
    "publish": ("p1",),
    "rewind": ("r1",),
    "operate": ("o1",),
}


def doze(trainer: subprocess.Popen[bytes]) -> None:
    """It sleeps through the lease of its update, as in a long collective or a suspended machine, and goes on."""
    trainer.send_signal(signal.SIGSTOP)
    time.sleep(1.7)
    trainer.send_signal(signal.SIGCONT)


def doze_until_both_ends_were_seen(clients: Clients, run: Run) -> None:
    """Some update ran out of its lease, and some was aborted."""
    until = time.monotonic() + 240
    while not {"aborted", "expired"} <= {update.state for update in run.updates()}:
        assert time.monotonic() < until, "no update was aborted, or none expired"
        doze(clients.processes[random.choice(CLIENTS["train"])])


@pytest.mark.long
def test_the_audit_proves_the_promises_after_a_storm(
    replicas: list[ServerProcess], replicated_url: str, tmp_path: Path
) -> None:
    lasting, killed = replicas
    # Each client works through both, and turns to the other while one gives no answer.
    addresses = [(f"{a.url},{b.url}", lasting.token) for a, b in ((lasting, killed), (killed, lasting))]
    with Coordinator(lasting.url, lasting.token) as coordinator, Retention(replicated_url) as retention:
        run = start_run(
            coordinator,
            "storm",
            evidence_retention_seconds=1.0,
            rollout_retention_seconds=2.0,
            rewind_commits=6,
        )
        clients = Clients(tmp_path, run, addresses)
        try:
            for role, names in CLIENTS.items():
                for name in names:
                    clients.start(role, name)
            for kind, count in (("active", 2), ("commit", 10), ("rewind", 1), ("release", 1)):
                clients.wait_for(kind, count, 240)
            doze_until_both_ends_were_seen(clients, run)
            killed.kill()
            try:
                for kind, more in (("commit", 10), ("rewind", 1), ("rollout", 100)):
                    clients.wait_for(kind, clients.count(kind) + more, 240)
            finally:
                killed.start()  # others use these replicas too
            until = time.monotonic() + 300
            while len(clients.so_far()[0].rollouts) < ROLLOUTS or not retention.dropped:
                clients.wait_for("commit", clients.count("commit") + 1, 240)
                assert time.monotonic() < until, f"{len(clients.so_far()[0].rollouts)} rollouts"
            told, faults, retries = clients.told()
        finally:
            clients.stop()
        states = Counter(update.state for update in run.updates())
        versions = Counter(policy.state for policy in run.policies())
    assert faults == []
    assert retention.faults == []
    assert retries, "no client noticed that a replica was killed"
    assert check_ledger(replicated_url, {"storm": told}) == []
    # The load was one: all of it happened, and more than once.
    assert states["committed"] + states["rewound"] >= 20
    assert min(states[state] for state in ("committed", "rewound", "aborted", "expired")) > 0, states
    assert versions["retired"] + versions["withdrawn"] > 0, versions
    assert "Traceback" not in lasting.log.read_text()
