"""verl's v1 trainer, whole and tiny: what its log says of the coordinator is what the coordinator's audit has."""

import re
from pathlib import Path

import pytest

from coordinator.client import Coordinator
from tests.client.server_process import ServerProcess
from tests.examples.example import play_module

pytestmark = pytest.mark.xdist_group("vllm-server")

STEPS, GROUPS = 5, 2


def test_verl_steps_on_what_the_coordinator_admits(server: ServerProcess, tmp_path: Path) -> None:
    said = play_module(server, "examples.verl_loop.main", str(tmp_path), timeout=600)
    refused = re.findall(r"coordinated: step (\d): (\S+) refused, (\w+), lag (\d|None)", said)
    refilled = {int(step): int(count) for step, count in re.findall(r"step (\d): (\d) groups refilled", said)}
    committed = re.findall(r"coordinated: step (\d): commit (\d), (\d) rollouts consumed", said)
    with Coordinator(server.url, server.token) as coordinator:
        [view] = coordinator.runs()
        run = coordinator.run(view.run_id)
        audit = {step: list(run.audit(update_id=f"step-{step}")) for step in range(1, STEPS + 1)}

        spans = {rollout.rollout_id: [span.version for span in rollout.spans] for rollout in run.rollouts()}

        # Groups were refused as stale: verl's warm-up is one batch longer than max_lag allows.
        gone = [(str(n), e.rollout_id, e.reason) for n, es in audit.items() for e in es if e.event == "set_aside"]
        by_update = [entry for entry in refused if entry[2] != "not_rewarded"]
        assert sorted(gone) == sorted((step, rollout_id, verdict) for step, rollout_id, verdict, _ in by_update)
        assert {verdict for _, _, verdict, _ in by_update} == {"stale_policy"}
        assert min(int(lag) for _, _, _, lag in by_update) > 1
        # Some may have been too old on arrival already.
        before = [rollout_id for _, rollout_id, verdict, _ in refused if verdict == "not_rewarded"]
        assert {run.rollout(rollout_id).reason for rollout_id in before} <= {"stale_policy", "group_refused"}
        # And refilled: beside its batch, and the warm-up in the first, each step asked for as many groups as it lost.
        # Of the last ones some may not have arrived when the training ended.
        for step in range(1, STEPS - 1):
            asked = {rollout.group_id for rollout in run.rollouts(task_source=f"verl-step-{step}")}
            assert len(asked) == GROUPS * (3 if step == 1 else 1) + refilled.get(step, 0)
        lost = {(step, rollout_id.split("_")[0]) for step, rollout_id, _, _ in refused}
        assert refilled == {int(s): len([g for step, g in lost if step == s]) for s, _ in lost}

        # Each step's update consumed its groups through the coordinator.
        assert committed == [(str(step), str(step), str(GROUPS * 2)) for step in range(1, STEPS + 1)]
        for step, entries in audit.items():
            consumed = [entry.rollout_id for entry in entries if entry.event == "commit"]
            assert len(consumed) == len(set(consumed)) == GROUPS * 2
            assert {m.rollout_id for m in run.lineage(f"step-{step}").members if m.outcome == "consumed"} == set(
                consumed
            )
            # Which the version in training began, or the one before it.
            assert {step - 1 - spans[rollout_id][0] for rollout_id in consumed} <= {0, 1}

        # Each weight sync was a version.
        assert re.findall(r"version (\d) is active", said) == [str(step) for step in range(1, STEPS + 1)]
        assert [activation.state for activation in run.activations()] == ["succeeded"] * STEPS
        assert len({policy.artifact_hash for policy in run.policies()}) == STEPS + 1
        # And what a sync cut off was gone on with under the next version, and says so.
        assert [versions for versions in spans.values() if len(versions) > 1]
        assert all(versions == sorted(set(versions)) for versions in spans.values())
