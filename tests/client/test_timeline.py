"""The client's view of how an activation went."""

from __future__ import annotations

from pathlib import Path

from coordinator.client import AsyncCoordinator, Coordinator
from tests.client.runs import BASE, new_run, new_worker, write_adapter
from tests.client.server_process import ServerProcess


async def test_a_timeline_has_every_worker_and_can_be_printed(
    server: ServerProcess, coordinator: Coordinator, tmp_path: Path
) -> None:
    run = new_run(coordinator)
    worker = new_worker(run)
    policy = run.publish(version=1, parent_version=0, folder=write_adapter(tmp_path / "adapter"), base_model=BASE)
    run.open_activation(1, "to-1")
    worker.ack(1, policy.artifact_hash)
    found = run.activation_timeline("to-1")
    assert [step.step for step in found.steps] == ["prepared", "committed", "opened", "activated"]
    assert [(w.worker_id, [step.step for step in w.steps]) for w in found.workers] == [("w1", ["acked"])]
    assert str(found).splitlines()[0] == "activation to-1 of version 1: succeeded"
    async with AsyncCoordinator(server.url, server.token) as other:
        assert await other.run(run.id).activation_timeline("to-1") == found
