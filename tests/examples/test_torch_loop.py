"""The plain torch loop makes three versions, each out of one update whose groups it reserved."""

from coordinator.client import Coordinator
from tests.client.server_process import ServerProcess
from tests.examples.example import play


def test_three_versions_of_a_plain_torch_loop(server: ServerProcess) -> None:
    said = play(server, "torch_loop.py").splitlines()
    assert [line.split(":")[0] for line in said] == ["version 1", "version 2", "version 3"]
    with Coordinator(server.url, server.token) as coordinator:
        [view] = coordinator.runs()
        run = coordinator.run(view.run_id)
        assert (view.active.version, run.view().last_commit_no) == (3, 3)
        assert run.counts().rollouts["consumed"] == 3 * 32
        for step in (1, 2, 3):
            members = run.lineage(f"step-{step}").members
            assert {m.outcome for m in members} == {"consumed"}
            assert {m.rollout_id for m in members} == {f"{step}-{i}" for i in range(32)}
            assert run.policy(step).updates == (f"step-{step}",)
        assert len({policy.artifact_hash for policy in run.policies()}) == 4
