"""verl's v1 trainer on the tiny model: what its log says of the coordinator is what the coordinator's audit has."""

import re
from pathlib import Path

import pytest

from coordinator.client import Coordinator
from tests.client.server_process import ServerProcess
from tests.examples.example import play_module

pytestmark = pytest.mark.xdist_group("models")

STEPS, GROUPS, SIZE = 4, 2, 2


def test_verl_steps_on_what_the_coordinator_admits(server: ServerProcess, tmp_path: Path) -> None:
    said = play_module(server, "examples.verl_loop.main", str(tmp_path), timeout=300)
    log = re.findall(r"^coordinated: (.*)$", said, re.MULTILINE)
    with Coordinator(server.url, server.token) as coordinator:
        [view] = coordinator.runs()
        run = coordinator.run(view.run_id)

        # A group refused as stale was refilled.
        refused = [line for line in log if "refused" in line]
        stale = sorted(re.match(r"step 3: (\S+) refused, stale_policy, lag 2$", line)[1] for line in refused)  # type: ignore[index]
        assert len(stale) == GROUPS * SIZE
        assert "step 3: 2 groups refilled" in log
        gone = [entry for entry in run.audit(update_id="step-3") if entry.event == "set_aside"]
        assert sorted(entry.rollout_id for entry in gone) == stale
        assert {(entry.reason, entry.to_state) for entry in gone} == {("stale_policy", "offline")}
        # Two batches to begin with, one for each step, and those that took the place of the refused ones.
        groups = {rollout.group_id for rollout in run.rollouts()}
        assert len(groups) == GROUPS * (2 + STEPS) + 2
        last = max(entry.at for entry in gone)
        [refill] = [{r.group_id for r in run.rollouts(version=2, arrived_from=last)}]
        assert len(refill) == 2

        # Each update consumed its groups through the coordinator.
        for step in range(1, STEPS + 1):
            assert f"step {step}: commit {step}, {GROUPS * SIZE} rollouts consumed" in log
            consumed = [m for m in run.lineage(f"step-{step}").members if m.outcome == "consumed"]
            audited = {entry.rollout_id for entry in run.audit(update_id=f"step-{step}") if entry.event == "commit"}
            assert {m.rollout_id for m in consumed} == audited
            assert len(audited) == GROUPS * SIZE

        # Each weight sync made the version active that verl's engine then generated with.
        assert [line for line in log if "active" in line] == [f"step {n}: version {n} is active" for n in range(1, 5)]
        assert run.view().active.version == STEPS
        assert [policy.kind for policy in run.policies()] == ["base"] + ["stream"] * STEPS
        assert len({policy.artifact_hash for policy in run.policies()}) == STEPS + 1
        assert {span.version for rollout in run.rollouts() for span in rollout.spans} == {0, 1, 2, 3}
        assert {activation.state for activation in run.activations()} == {"succeeded"}
