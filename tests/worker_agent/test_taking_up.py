"""How a worker takes a version up, and what it does when that goes wrong: in the test's process, real engine."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from coordinator.client import Coordinator, Refused, Run, Unreachable, Worker
from coordinator.wire.policies import PolicyView
from coordinator.wire.runs import JournalEntry
from tests.client.server_process import ServerProcess
from tests.worker_agent.adapters import draw_adapter
from tests.worker_agent.working import Hooked, Working, arrived, base_of, new_run, until
from worker_agent.engines.engine import EngineError, Policy
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.learner.publishing import publish_adapter

pytestmark = pytest.mark.xdist_group("models")

WEIGHTS = "adapter_model.safetensors"


class Scene:
    """One run, one worker around the engine, and versions that are published with what they must be in memory."""

    def __init__(
        self, coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, model: Path, folder: Path
    ) -> None:
        self.coordinator = coordinator
        self.server = server
        self.engine = engine
        self.hooked = Hooked(engine)
        self.model = model
        self.folder = folder
        self.run: Run

    def create_run(self, **settings: object) -> None:
        self.run = new_run(self.coordinator, self.engine, self.model, settings)

    def working(self) -> Working:
        return Working(self.coordinator, self.server, self.hooked, self.model, self.folder / "worker")

    def publish(self, version: int, parent: int = 0) -> PolicyView:
        return publish_adapter(
            self.run,
            version=version,
            parent_version=parent,
            folder=draw_adapter(self.folder / f"v{version}", version),
            base_model=base_of(self.model),
        )

    def active(self) -> int:
        return self.run.view().active.version

    def trusted(self) -> bool:
        """Whether the worker is registered, has acked, and is not fenced."""
        return any(not worker.fenced for worker in self.run.workers()) and bool(self.said("worker.acked"))

    def told(self, after: int = 0) -> list[tuple[str, object]]:
        """What the worker said of which version, and when it was trusted again: in order, acks left out."""
        told: list[tuple[str, object]] = []
        for e in self.run.journal(after):
            if e.event == "worker.unfenced":
                told.append(("back", None))
            elif e.event in ("worker.stage", "worker.failed"):
                told.append((("failed " if e.event == "worker.failed" else "") + str(e.detail["stage"]),
                             e.detail["version"]))  # fmt: skip
        return told

    def said(self, event: str) -> list[JournalEntry]:
        return [entry for entry in self.run.journal() if entry.event == event]

    def newest(self) -> int:
        return self.run.watch().event_no


@pytest.fixture
def scene(
    coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, tiny_model: Path, tmp_path: Path
) -> Iterator[Scene]:
    yield Scene(coordinator, server, engine, tiny_model, tmp_path)
    for key in list(engine._adapters):
        engine._remove(key)


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content[:-1])


def stored(server: ServerProcess, content: bytes) -> Path:
    return next(p for p in (server.data / "artifacts").rglob("*") if p.is_file() and p.read_bytes() == content)


def test_stages_come_before_the_ack_and_a_fence_makes_it_load_whole(scene: Scene) -> None:
    """Also without a task that would ask for a ticket; and what lies damaged in its cache is never loaded."""
    scene.create_run()
    with scene.working() as working:
        until(scene.trusted)
        assert scene.told() == [("loading", 0)]
        version = scene.publish(1)
        assert list(version.digests) == [f"vllm-{scene.engine.version}/lora/float32/tp1"]
        before = scene.newest()
        scene.run.activate(1, wait_seconds=20)
        whole = [("downloading", 1), ("verifying", 1), ("loading", 1)]
        assert scene.told(before) == whole
        (ack,) = (e for e in scene.said("worker.acked") if e.detail["version"] == 1)
        assert max(e.event_no for e in scene.said("worker.stage")) < ack.event_no
        stated = next(iter(version.digests.items()))
        digest = ack.detail["digest"]
        assert (digest["layout"], digest["registered"]) == stated and digest["active"] == digest["registered"]

        before = scene.newest()
        scene.hooked.calls.clear()
        scene.run.fence("w1", "an operator's doubt")
        until(lambda: ("back", None) in scene.told(before))
        assert scene.told(before) == [*whole[1:], ("back", None)]
        assert scene.hooked.calls == [("unload", 1), ("load", 1)]

        for damage in (flip, truncate):
            before = scene.newest()
            scene.hooked.calls.clear()
            damage(working.folder / "artifacts" / version.artifact_hash / WEIGHTS)
            scene.run.fence("w1", "an operator's doubt")
            until(lambda before=before: ("back", None) in scene.told(before))
            assert scene.told(before) == [("verifying", 1), ("failed verify", 1), *whole, ("back", None)]
            assert scene.hooked.calls == [("unload", 1), ("load", 1)]
            (failed,) = (e for e in scene.run.journal(before) if e.event == "worker.failed")
            assert WEIGHTS in str(failed.detail["message"])
        working.give("a")
        until(lambda: len(arrived(scene.run, "a")) == 2)


def test_a_file_that_was_cut_short_in_the_store_is_reported_and_waited_for(scene: Scene) -> None:
    scene.create_run()
    with scene.working() as working:
        until(scene.trusted)
        scene.publish(1)
        content = (scene.folder / "v1" / WEIGHTS).read_bytes()
        path = stored(scene.server, content)
        truncate(path)
        scene.run.open_activation(1, "try")
        failure = until(lambda: list(scene.run.failures()))[0]
        assert (failure.stage, failure.kind, failure.version) == ("distribution", "verify", 1)
        assert WEIGHTS in failure.message
        until(lambda: ("back", None) in scene.told())
        working.give("a")
        until(lambda: len(arrived(scene.run, "a")) == 2)
        assert scene.run.rollout("a:0.0").spans[0].version == 0
        assert ("load", 1) not in scene.hooked.calls
        path.write_bytes(content)
        until(lambda: scene.active() == 1)


@pytest.mark.parametrize("heard", [True, False])
def test_a_half_updated_engine_generates_nothing_until_it_loaded_whole(
    scene: Scene, heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not its failure is heard, and it fenced for it."""

    def unheard(*_: object) -> None:
        raise Unreachable("nobody answers")

    if not heard:
        monkeypatch.setattr(Worker, "fail", unheard)
    scene.create_run()
    engine, whole = scene.engine, Event()

    def die_half_way(policy: Policy) -> None:
        """The candidate's load leaves the active version's live buffers in ruins as well."""
        if policy.version != 2:
            return
        (active,) = (request for key, request in engine._adapters.items() if key[1] == 1)

        def ruin(worker: Any) -> None:
            manager = worker.model_runner.lora_manager._adapter_manager
            for module in manager.modules.values():
                module.lora_b_stacked[0][manager.lora_index_to_id.index(active.lora_int_id)].zero_()

        engine._llm.collective_rpc(ruin)
        scene.hooked.before_load = lambda policy: None if policy.version == 2 else whole.wait(30)  # type: ignore[assignment,return-value]
        raise EngineError("out of memory half-way")

    with scene.working() as working:
        until(scene.trusted)
        scene.publish(1)
        scene.run.activate(1, wait_seconds=20)
        scene.publish(2, parent=1)
        scene.hooked.after_load = die_half_way
        scene.run.open_activation(2, "try")
        until(lambda: ("load", 2) in scene.hooked.calls)
        working.give("a")
        until(lambda: scene.hooked.calls[-1] == ("load", 1))
        assert [w.fenced_reason for w in scene.run.workers()] == ["load of version 2 failed" if heard else None]
        assert not list(scene.run.rollouts())
        scene.hooked.after_load = lambda policy: None
        whole.set()
        until(lambda: len(arrived(scene.run, "a")) == 2)
        until(lambda: scene.active() == 2)
    assert scene.hooked.calls.count(("unload", 1)) >= 2  # before its second load, and when it was retired
    evidence = scene.run.evidence("a:0.0")
    span = scene.run.rollout("a:0.0").spans[0]
    policy = Policy("again", span.version, span.artifact_hash, "lora", scene.folder / f"v{span.version}")
    engine.load(policy)
    sent = [value for value in evidence.behavior_log_probs if value is not None]
    assert sent == pytest.approx(engine.score(policy, [evidence.token_ids])[0][-len(sent) :], abs=1e-5)


def test_a_slow_worker_lets_the_activation_fail_and_drops_the_candidate(scene: Scene) -> None:
    scene.create_run(activation_deadline_seconds=2)
    go = Event()
    with scene.working() as working:
        until(scene.trusted)
        scene.publish(1)
        scene.hooked.before_load = lambda policy: None if policy.version == 0 else go.wait(30)  # type: ignore[assignment,return-value]
        scene.run.open_activation(1, "try")
        until(lambda: scene.run.activation("try").state == "failed")
        assert "missing_worker_ack (w1)" in str(scene.run.activation("try").reason)
        go.set()
        until(lambda: scene.hooked.calls[-1] == ("unload", 1))
        assert scene.active() == 0 and scene.engine._llm.llm_engine.list_loras() == set()
        working.give("a")
        until(lambda: len(arrived(scene.run, "a")) == 2)
        assert scene.run.rollout("a:0.0").spans[0].version == 0
        assert scene.run.activate(1, activation_id="again", wait_seconds=20).state == "succeeded"


def test_a_worker_that_was_replaced_stops_and_its_ack_is_refused(scene: Scene) -> None:
    scene.create_run()
    go = Event()
    working = scene.working()
    with pytest.raises(Refused) as refused, working:
        until(scene.trusted)
        scene.publish(1)
        scene.hooked.before_load = lambda policy: go.wait(30)  # type: ignore[assignment,return-value]
        scene.run.open_activation(1, "try")
        until(lambda: scene.hooked.calls[-1] == ("load", 1))
        scene.run.worker("w1", "w1-again").register("hand", "1")
        go.set()
        working.join()
    assert refused.value.code == "incarnation_superseded"
    assert not [e for e in scene.said("worker.acked") if e.detail["version"] == 1]
    assert [w.ack for w in scene.run.activation("try").required] == ["missing"]


def test_a_worker_that_drains_is_not_waited_for(scene: Scene) -> None:
    scene.create_run()
    other = scene.run.worker("w2", "w2-1")
    other.register("hand", "1")
    go = Event()
    with scene.working() as working:
        until(scene.trusted)
        version = scene.publish(1)
        scene.hooked.before_load = lambda policy: go.wait(30)  # type: ignore[assignment,return-value]
        scene.run.open_activation(1, "try")
        until(lambda: scene.hooked.calls[-1] == ("load", 1))
        assert other.ack(1, version.artifact_hash).matching
        working.agent.stop()
        scene.run.worker("w1", working.agent.incarnation).drain()  # as its farewell does, once the load is through
        until(lambda: scene.active() == 1)
        go.set()
    assert [w.worker_id for w in scene.run.activation("try").required] == ["w2"]


def test_a_sleeping_worker_takes_no_tickets_and_is_waited_for(scene: Scene) -> None:
    scene.create_run()
    with scene.working() as working:
        until(scene.trusted)
        generating, go = Event(), Event()
        scene.hooked.hook = lambda: (generating.set(), go.wait(30))  # type: ignore[assignment,return-value]
        working.give("before")
        assert generating.wait(30)
        falls_asleep = Thread(target=working.agent.asleep, args=(600,))
        falls_asleep.start()
        until(lambda: [w.state for w in scene.run.workers()] == ["asleep"])
        assert falls_asleep.is_alive()  # the GPU is not free before the generation is through
        go.set()
        falls_asleep.join(30)
        assert not falls_asleep.is_alive()
        until(lambda: len(arrived(scene.run, "before")) == 2)  # what was begun is handed in
        until(lambda: [w.state for w in scene.run.workers()] == ["asleep"])
        working.give("a")
        me = scene.run.worker("w1", working.agent.incarnation)
        answer = me.tickets(["b"])
        assert (answer.granted, answer.capacity) == ((), 0)
        scene.publish(1)
        scene.run.open_activation(1, "try")
        assert [w.worker_id for w in scene.run.activation("try").required] == ["w1"]
        assert scene.hooked.memory == ["released"]
        beat = scene.run.workers()[0].heartbeat_at
        until(lambda: scene.run.workers()[0].heartbeat_at > beat)
        assert scene.hooked.calls == [("unload", 0), ("load", 0)] and not arrived(scene.run, "a")
        working.agent.awake()
        until(lambda: len(arrived(scene.run, "a")) == 2)
        until(lambda: scene.active() == 1)
        assert [w.state for w in scene.run.workers()] == ["live"]
        assert scene.hooked.memory == ["released", "resumed"]
        with pytest.raises(ValueError, match="at most"):
            working.agent.asleep(0)


def test_a_sleep_that_nobody_ends_ends_at_its_time(scene: Scene) -> None:
    scene.create_run()
    with scene.working() as working:
        until(scene.trusted)
        working.agent.asleep(1.0)
        working.give("a")
        until(lambda: len(arrived(scene.run, "a")) == 2)
        assert scene.hooked.memory == ["released", "resumed"]


def test_whole_weights_are_refused_by_name_of_what_the_engine_takes(scene: Scene) -> None:
    scene.create_run()
    with scene.working() as working:
        until(scene.trusted)
        folder = draw_adapter(scene.folder / "whole", 1)
        scene.run.publish(version=1, parent_version=0, folder=folder, base_model=base_of(scene.model), kind="full")
        scene.run.open_activation(1, "try")
        failure = until(lambda: list(scene.run.failures()))[0]
        assert (failure.stage, failure.kind) == ("distribution", "load")
        assert "is of kind full; the engine vllm takes base and lora" in failure.message
        working.give("a")
        until(lambda: len(arrived(scene.run, "a")) == 2)
    assert ("downloading", 1) not in scene.told()


def test_a_coordinator_that_does_not_hear_a_stage_stops_no_load(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def unheard(self: Worker, version: int, stage: str, **_: Any) -> None:
        self._connection.call("POST", ("runs", "run", "nowhere", stage), PolicyView, retry_seconds=0.0)

    monkeypatch.setattr(Worker, "stage", unheard)
    scene.create_run()
    with scene.working():
        until(scene.trusted)
        scene.publish(1)
        scene.run.activate(1, wait_seconds=20)
    assert scene.told() == [] and scene.active() == 1
