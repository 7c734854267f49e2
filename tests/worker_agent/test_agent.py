"""The agent around a real vLLM engine, against a real coordinator that is killed now and then."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.client import Coordinator
from tests.client.runs import group
from tests.client.server_process import ServerProcess
from tests.worker_agent.working import Hooked, Working, arrived, base_of, new_run, until
from worker_agent.agent import AgentError
from worker_agent.contract import ContractMismatch
from worker_agent.engines.engine import Policy
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.tasks import Message, Task

pytestmark = pytest.mark.xdist_group("models")


def test_it_follows_the_pointer_and_generates_under_what_is_active(
    coordinator: Coordinator,
    server: ServerProcess,
    engine: VllmEngine,
    tiny_model: Path,
    tmp_path: Path,
    new_adapter: Callable[[int], tuple[Policy, Any]],
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    adapter = new_adapter(1)[0].folder
    assert adapter is not None
    with Working(coordinator, server, engine, tiny_model, tmp_path / "worker") as working:
        working.give("a", "b")
        until(lambda: len(arrived(run, "a")) == 2 and len(arrived(run, "b")) == 2)
        first = run.rollout("a:0.0")
        assert (first.spans[0].version, first.worker_id) == (0, "w1")
        assert first.incarnation == working.agent.incarnation
        published = run.publish(version=1, parent_version=0, folder=adapter, base_model=base_of(tiny_model))
        run.activate(1, wait_seconds=20)
        working.give("c")
        until(lambda: len(arrived(run, "c")) == 2)
        span = run.rollout("c:1.0").spans[0]
        assert (span.version, span.artifact_hash) == (1, published.artifact_hash)
        evidence = run.evidence("c:1.0")
        policy = Policy(
            "run", 1, published.artifact_hash, "lora", working.folder / "artifacts" / published.artifact_hash
        )
        scored = engine.score(policy, [evidence.token_ids])[0]
        sent = [value for value in evidence.behavior_log_probs if value is not None]
        assert sent == pytest.approx(scored[-len(sent) :], abs=1e-5)
        assert not working.spooled()
    assert [w.state for w in run.workers()] == ["deregistered"]
    assert not list(run.failures())


def test_a_task_that_the_engine_cannot_do_is_a_recorded_failure_of_each_member(
    coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, tiny_model: Path, tmp_path: Path
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    with Working(coordinator, server, engine, tiny_model, tmp_path / "worker") as working:
        messages = (Message(role="user", content="2 + 2 = " * 100),)  # more tokens than the engine takes
        working.give(Task(task_id="long", group_id="long", messages=messages, task_source="test"))
        working.give("a")
        until(lambda: len(arrived(run, "a")) == 2)
        until(lambda: len(list(run.rollouts(group_id="long"))) == 2)
    assert {r.state for r in run.rollouts(group_id="long")} == {"generation_failed"}
    failures = list(run.failures(stage="generation"))
    assert {(f.worker_id, f.rollout_id) for f in failures} == {("w1", f"long:{i}.0") for i in range(2)}
    assert all("tokens; this engine takes" in f.message for f in failures)


def test_rollouts_outlive_a_crash_of_the_coordinator(
    coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, tiny_model: Path, tmp_path: Path
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    hooked = Hooked(engine)
    with Working(coordinator, server, hooked, tiny_model, tmp_path / "worker") as working:
        working.give("a")
        until(lambda: arrived(run, "a"))
        hooked.hook = server.kill
        working.give("b")
        until(working.spooled)
        server.start()
        until(lambda: len(arrived(run, "b")) == 2)
        until(lambda: not working.spooled())
        working.give("c")
        until(lambda: len(arrived(run, "c")) == 2)
    assert run.counts().rollouts["generated"] == 6


def test_a_spool_that_was_left_is_sent_by_the_next_life(
    coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, tiny_model: Path, tmp_path: Path
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    hooked = Hooked(engine)
    with Working(coordinator, server, hooked, tiny_model, tmp_path / "worker") as working:
        hooked.hook = server.kill
        working.give("a")
        until(working.spooled)
        dead = working.agent.incarnation
    assert working.spooled()
    server.start()
    with Working(coordinator, server, engine, tiny_model, tmp_path / "worker") as working:
        working.give("a", "b")  # the same tasks again: a was done
        until(lambda: len(arrived(run, "b")) == 2)
        until(lambda: len(arrived(run, "a")) == 2)
        assert run.rollout("a:0.0").incarnation == dead != working.agent.incarnation
    assert not list((working.folder / "rejected").iterdir())


def test_a_damaged_artifact_is_reported_and_the_old_policy_goes_on(
    coordinator: Coordinator,
    server: ServerProcess,
    engine: VllmEngine,
    tiny_model: Path,
    tmp_path: Path,
    new_adapter: Callable[[int], tuple[Policy, Any]],
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    adapter = new_adapter(1)[0].folder
    assert adapter is not None
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    with Working(coordinator, server, engine, tiny_model, tmp_path / "worker") as working:
        working.give("a")
        until(lambda: arrived(run, "a"))
        run.publish(version=1, parent_version=0, folder=adapter, base_model=base_of(tiny_model))
        (stored,) = (p for p in (server.data / "artifacts").rglob("*") if p.is_file() and p.read_bytes() == weights)
        stored.chmod(0o600)
        stored.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
        run.open_activation(1, "try")
        failure = until(lambda: list(run.failures()))[0]
        assert (failure.stage, failure.worker_id, failure.version) == ("distribution", "w1", 1)
        assert (failure.kind, "adapter_model.safetensors" in failure.message) == ("verify", True)
        working.give("b")
        until(lambda: len(arrived(run, "b")) == 2)
        assert run.rollout("b:0.0").spans[0].version == 0
        assert run.view().active.version == 0
        stored.write_bytes(weights)
        until(lambda: run.view().active.version == 1)
        assert [worker.fenced for worker in run.workers()] == [False]


def test_an_item_that_is_rejected_is_put_aside(
    coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, tiny_model: Path, tmp_path: Path
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    hooked = Hooked(engine)
    with Working(coordinator, server, hooked, tiny_model, tmp_path / "worker") as working:
        active = run.view().active
        until(lambda: run.workers() and not run.workers()[0].fenced)
        working.give("a")
        until(lambda: len(arrived(run, "a")) == 2)
        # Another process claims an id of group b before the agent gets there, with other tokens.
        other = run.worker("w2", "w2-1")
        other.register("hand", "1")
        other.ack(active.version, active.artifact_hash)
        forged = group(other, active, "b")[0].model_copy(update={"contract": run.view().contract})
        hooked.hook = lambda: run.submit([forged])  # type: ignore[assignment,return-value]  # the answer is not needed
        working.give("b")
        reason = json.loads(until(lambda: list((working.folder / "rejected").glob("*.json")))[0].read_text())
        assert (reason["rollout_id"], reason["verdict"]) == ("b:0.0", "conflict")
        until(lambda: not working.spooled())
        assert len(list((working.folder / "rejected").glob("*.arrow"))) == 1
        assert run.rollout("b:1.0").worker_id == "w1"


def test_a_worker_that_does_not_fit_the_run_is_told_the_field(
    coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, tiny_model: Path, tmp_path: Path
) -> None:
    new_run(coordinator, engine, tiny_model, logprobs_mode="processed", tokenizer_hash="0" * 64)
    misfit = Working(coordinator, server, engine, tiny_model, tmp_path / "worker")
    with pytest.raises(ContractMismatch, match=r"tokenizer_hash: .*logprobs_mode: the run has processed"):
        misfit.agent.run()


def test_two_processes_do_not_share_a_worker_s_folder(
    coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, tiny_model: Path, tmp_path: Path
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    with Working(coordinator, server, engine, tiny_model, tmp_path / "worker"):
        until(run.workers)
        second = Working(coordinator, server, engine, tiny_model, tmp_path / "worker")
        with pytest.raises(AgentError, match="another process works as w1"):
            second.agent.run()
