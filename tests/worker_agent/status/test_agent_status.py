"""What an agent at work says of itself, beside what the coordinator knows of it."""

from pathlib import Path

import httpx
import pytest

from coordinator.client import Coordinator
from tests.client.server_process import ServerProcess
from tests.worker_agent.status.reading import metrics
from tests.worker_agent.working import Hooked, Working, arrived, new_run, until
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.status.server import serving_status

pytestmark = pytest.mark.xdist_group("models")


def missing(address: str) -> list[str]:
    answer = httpx.get(f"{address}/readyz", trust_env=False)
    found: list[str] = answer.json()["missing"]
    assert answer.status_code == (503 if found else 200)
    return found


def test_it_tells_what_it_does_and_what_it_lacks(
    coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, tiny_model: Path, tmp_path: Path
) -> None:
    run = new_run(coordinator, engine, tiny_model, {"lost_after_seconds": 2})
    hooked = Hooked(engine)
    working = Working(coordinator, server, hooked, tiny_model, tmp_path / "worker")
    with serving_status("127.0.0.1", 0, working.vitals, working.folder / "spool") as address:
        assert missing(address) == ["not registered with the coordinator yet: the engine still starts"]
        with working:
            during: list[float] = []
            hooked.hook = lambda: during.append(metrics(address)["worker_agent_groups_in_flight", None])
            working.give("a", "b")
            until(lambda: len(arrived(run, "a")) + len(arrived(run, "b")) == 4)
            until(lambda: not working.spooled())
            assert missing(address) == []
            now = metrics(address)
            rollouts = [run.evidence(r.rollout_id) for r in run.rollouts()]
            assert now["worker_agent_rollouts_generated_total", None] == 4
            assert now["worker_agent_rollouts_spooled_total", None] == 4
            assert now["worker_agent_rollouts_delivered_total", "accepted"] == 4
            assert now["worker_agent_tokens_generated_total", None] == sum(sum(r.action_mask) for r in rollouts)
            assert now["worker_agent_served_version", None] == 0
            assert now["worker_agent_load_seconds_count", "confirmed"] == 1
            assert during and 1 <= during[0] <= 2
            assert [now[f"worker_agent_{name}", None] for name in ("engine_up", "asleep", "fenced")] == [1, 0, 0]

            run.fence("w1", "for a look")
            until(lambda: metrics(address)["worker_agent_load_seconds_count", "confirmed"] == 2)
            until(lambda: not missing(address))

            hooked.hook = server.kill
            working.give("c")
            until(working.spooled)
            spooled = metrics(address)
            assert spooled["worker_agent_spool_batches", None] == 1
            assert spooled["worker_agent_spool_bytes", None] == working.spooled()[0].stat().st_size
            until(lambda: any("answered no heartbeat" in what for what in missing(address)))
            assert metrics(address)["worker_agent_heartbeat_age_seconds", None] > 2
            assert httpx.get(f"{address}/healthz", trust_env=False).json() == {"alive": True, "missing": []}
            server.start()
            until(lambda: len(arrived(run, "c")) == 2)
            until(lambda: not missing(address))

            working.agent.asleep(60.0)
            assert metrics(address)["worker_agent_asleep", None] == 1
            working.agent.awake()
            assert metrics(address)["worker_agent_asleep", None] == 0
        assert missing(address)[0].startswith("it was told to stop")
        assert metrics(address)["worker_agent_rollouts_delivered_total", "accepted"] == 6
