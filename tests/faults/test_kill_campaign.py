"""Two replicas over one database, killed again and again under load; so is Postgres now and then.

`pytest tests/faults/test_kill_campaign.py --kills 1000` is the longer campaign.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from coordinator.client import Coordinator
from tests.client.server_process import ServerProcess
from tests.faults.test_postgres_crash import crash
from tests.ledger_checker import check_ledger
from tests.load import Clients, publish, start_run

POSTGRES_EVERY = 6


@pytest.mark.long
def test_clients_carry_on_through_the_other_replica(
    replica_pair: tuple[str, list[ServerProcess]], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    kills = int(pytestconfig.getoption("kills"))
    url, replicas = replica_pair
    both, token = ",".join(server.url for server in replicas), replicas[0].token
    crashes = 0
    with Coordinator(both, token) as coordinator:
        run = start_run(coordinator, "killed", update_lease_seconds=10, hold_seconds=5, rewind_commits=1000)
        clients = Clients(tmp_path, run, [(both, token)])
        try:
            for role, name in (
                ("produce", "w1"), ("produce", "w2"), ("judge", "j1"), ("judge", "j2"), ("rewind", "r1"),
                ("train", "t1"), ("train", "t2"),
            ):  # fmt: skip
                clients.start(role, name)
            clients.wait_for("commit", 2)
            for number in range(kills):
                victim = random.choice(replicas)
                if number % POSTGRES_EVERY == POSTGRES_EVERY - 1:
                    asyncio.run(crash(url))
                    crashes += 1
                before = clients.count("rollout", "reward", "reserve", "commit")
                victim.kill()
                # What one replica does not answer, the other does.
                while clients.count("rollout", "reward", "reserve", "commit") < before + 10:
                    clients.wait_for("rollout", clients.count("rollout") + 1)
                victim.start()
                if number % 10 == 9:
                    publish(run, tmp_path, number // 10 + 1)
            clients.wait_for("commit", 8)
            told, faults, retries = clients.told()
        finally:
            clients.stop()
        states = [update.state for update in run.updates()]
    print(f"{kills} kills of a coordinator, {crashes} of Postgres; {len(told.rollouts)} rollouts were acknowledged")
    assert faults == []
    assert len(retries) >= kills // 2
    assert check_ledger(url, {"killed": told}) == []
    assert len(told.rollouts) > 200
    assert states.count("committed") + states.count("rewound") >= 8
