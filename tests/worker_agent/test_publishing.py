"""A version is published with what engines must report once they hold it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.client import Coordinator, Refused, Run
from coordinator.wire.workers import WeightDigest
from tests.client.runs import BASE, new_run
from tests.worker_agent.adapters import draw_adapter
from tests.worker_agent.tiny import train
from worker_agent.engines.lora_digest import AdapterError, digest_of_folder, lora_layout
from worker_agent.learner.learner import Learner
from worker_agent.learner.publishing import publish_adapter

pytestmark = pytest.mark.xdist_group("models")


@pytest.fixture
def run(coordinator: Coordinator) -> Run:
    """Two versions of vLLM, verl on one of them and the reference at work, one that has left, and an engine that gives
    no digest."""
    run = new_run(coordinator)
    for worker_id, engine, version in (
        ("a", "vllm", "0.28.0"),
        ("b", "vllm-server", "0.29.1"),
        ("v", "verl", "0.9.1+vllm0.28.0"),
        ("r", "transformers", "5.10.4"),
        ("gone", "vllm", "0.27.0"),
        ("c", "hand", "1"),
    ):
        worker = run.worker(worker_id, f"{worker_id}-1")
        worker.register(engine, version)
        if worker_id == "gone":
            worker.deregister()
    return run


def test_the_learner_states_the_digest_for_each_engine_of_its_run(
    run: Run, new_learner: Callable[..., Learner], tmp_path: Path
) -> None:
    learner = new_learner()
    train(learner, seed=1)
    folder = tmp_path / "v1"
    published = learner.publish(run, version=1, parent_version=0, folder=folder, base_model=BASE)
    held = digest_of_folder(folder, "float32")
    kinds = (("vllm", "0.28.0"), ("vllm", "0.29.1"), ("transformers", "5.10.4"))
    layouts = [str(lora_layout(engine, version, "float32")) for engine, version in kinds]
    assert (published.state, published.digests) == ("committed", dict.fromkeys(layouts, held))

    active = run.view().active
    before = WeightDigest(layout=layouts[0], registered="0" * 64, active="0" * 64)
    kept = run.worker("a", "a-1").ack(1, published.artifact_hash, digest=before)
    assert (kept.matching, kept.reason) == (False, "worker_mismatch") and held in str(kept.detail)
    loaded = WeightDigest(layout=layouts[0], registered=held, active=held)
    assert run.worker("a", "a-1").ack(1, published.artifact_hash, digest=loaded).matching
    assert run.worker("c", "c-1").ack(1, published.artifact_hash).matching
    assert run.view().active == active


def test_publishing_again_is_safe_when_other_engines_have_come(run: Run, tmp_path: Path) -> None:
    folder = draw_adapter(tmp_path / "v1", 1)
    first = publish_adapter(run, version=1, parent_version=0, folder=folder, base_model=BASE)
    run.worker("d", "d-1").register("vllm", "0.30.0")
    again = publish_adapter(run, version=1, parent_version=0, folder=folder, base_model=BASE)
    assert (again.digests, again.artifact_hash) == (first.digests, first.artifact_hash)
    other = draw_adapter(tmp_path / "other", 2)
    with pytest.raises(Refused) as refused:
        publish_adapter(run, version=1, parent_version=0, folder=other, base_model=BASE)
    assert refused.value.code == "policy_conflict"


def test_an_adapter_that_no_engine_should_serve_becomes_no_version(run: Run, tmp_path: Path) -> None:
    folder = draw_adapter(tmp_path / "v1", 1)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match="not readable"):
        publish_adapter(run, version=1, parent_version=0, folder=folder, base_model=BASE)
    assert [policy.version for policy in run.policies()] == [0]
