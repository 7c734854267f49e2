"""Two reward services at once, one of them killed: each rollout is rewarded once, and a failure has no value."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.client import Coordinator, Run
from tests.client.runs import group, new_run, new_worker
from tests.client.server_process import ServerProcess
from tests.examples.example import EXAMPLES, environment

GROUPS = 40

# The example as it is, but for what is the user's own in it, and for its patience.
SERVICE = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
import reward_service

def score(task_id, response):
    if task_id == "hangs":
        time.sleep(3600)
    if task_id == "breaks":
        raise ValueError("no such answer")
    time.sleep(0.01)
    return float(response[-1])

reward_service.score, reward_service.LIMIT_SECONDS = score, 0.5
reward_service.main()
"""


@contextmanager
def service(server: ServerProcess, run: Run) -> Iterator["subprocess.Popen[str]"]:
    """A service at work; it has answered at least once."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(EXAMPLES), run.id],
        env=environment(server),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_two_reward_services_and_one_killed(server: ServerProcess) -> None:
    with Coordinator(server.url, server.token) as coordinator:
        run = new_run(coordinator, group_size=2)
        worker, active = new_worker(run), run.view().active
        names = [f"g{number}" for number in range(GROUPS)] + ["hangs", "breaks"]
        run.submit([rollout for name in names for rollout in group(worker, active, name)])
        with service(server, run) as first, service(server, run) as second:
            assert first.stdout is not None and first.stdout.readline()
            first.kill()
            assert second.poll() is None
            until = time.monotonic() + 60
            while run.counts().rollouts.get("generated"):
                assert time.monotonic() < until, "rollouts stay without a reward"
                time.sleep(0.1)

        for name in names[:GROUPS]:
            assert [(r.state, r.reward) for r in run.rollouts(group_id=name)] == [("rewarded", 5.0), ("rewarded", 6.0)]
        for name, status in (("hangs", "timeout"), ("breaks", "error")):
            failed = [(r.state, r.reward_status, r.reward) for r in run.rollouts(group_id=name)]
            assert failed == [("offline", status, None)] * 2  # a group whose last attempts failed can reach no update
        ready = [entry.rollout_id for entry in run.audit() if entry.event == "reward_ready"]
        assert len(ready) == len(set(ready)) == 2 * GROUPS
        messages = {failure.message for failure in run.failures()}
        assert messages == {"no score within 0.5 s", "ValueError: no such answer"}
