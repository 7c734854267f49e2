"""What goes by ends no worker: a coordinator behind a proxy that answers in its place, a disk that is full, tasks that
nobody could do, batches that a disk has eaten."""

import errno
from pathlib import Path
from threading import Event

import pytest

from coordinator.client import Coordinator
from tests.client.relay import Relay
from tests.client.runs import group
from tests.client.server_process import ServerProcess
from tests.worker_agent.adapters import draw_adapter
from tests.worker_agent.working import Hooked, Working, arrived, base_of, new_run, until
from worker_agent import spool
from worker_agent.agent import AgentError
from worker_agent.engines.engine import Completion, EngineError, Policy
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.learner.publishing import publish_adapter

pytestmark = pytest.mark.xdist_group("models")


IN_ITS_PLACE = [(500, b"oops"), (429, b"full"), (404, b"<html>no backend</html>"), (200, b"<html>log in</html>")]


def test_a_proxy_that_answers_in_the_coordinators_place(
    coordinator: Coordinator, server: ServerProcess, engine: VllmEngine, tiny_model: Path, tmp_path: Path
) -> None:
    """Each kind of call is answered so once, one in this way and the next in that, and then passed on."""
    run = new_run(coordinator, engine, tiny_model)
    answered: set[str] = set()
    with (
        Relay(server.url) as relay,
        Working(coordinator, relay, engine, tiny_model, tmp_path / "worker") as working,
    ):

        def instead(method: str, path: str) -> tuple[int, bytes] | None:
            kind = f"{method} {path.partition('?')[0]}"
            if kind in answered:
                return None
            answered.add(kind)
            # What no coordinator says means a wrong address, until the first answer of one.
            ways = IN_ITS_PLACE if working.vitals.registered else IN_ITS_PLACE[:2]
            return ways[len(answered) % len(ways)]

        relay.retry_after = 5
        relay.instead = instead
        working.give("a")
        until(lambda: working.failed or len(arrived(run, "a")) == 2, 60)
        assert not working.failed
        draw_adapter(tmp_path / "v1", 1)
        publish_adapter(run, version=1, parent_version=0, folder=tmp_path / "v1", base_model=base_of(tiny_model))
        answered.clear()
        run.activate(1, wait_seconds=60)
        working.give("b")
        until(lambda: working.failed or len(arrived(run, "b")) == 2, 60)
        assert not working.failed
    assert run.counts().rollouts["generated"] == 4


def test_a_load_that_fails_while_nobody_hears(
    coordinator: Coordinator,
    server: ServerProcess,
    engine: VllmEngine,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    hooked = Hooked(engine)
    with Working(coordinator, server, hooked, tiny_model, tmp_path / "worker") as working:
        working.give("a")
        until(lambda: len(arrived(run, "a")) == 2)
        publish_adapter(
            run, version=1, parent_version=0, folder=draw_adapter(tmp_path / "v1", 1), base_model=base_of(tiny_model)
        )

        def once(policy: Policy) -> None:
            if policy.version == 1:
                hooked.before_load = lambda policy: None
                server.kill()
                raise EngineError("out of memory")

        hooked.before_load = once
        run.open_activation(1, "try")
        until(lambda: ("load", 1) in hooked.calls)
        server.start()
        until(lambda: run.view().active.version == 1, 60)


def test_every_group_that_failed_is_reported(
    coordinator: Coordinator,
    server: ServerProcess,
    engine: VllmEngine,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    run = new_run(coordinator, engine, tiny_model)

    class Broken(Hooked):
        def finished(self, wait_seconds: float) -> dict[str, Completion | EngineError]:
            return {name: EngineError("gone") for name in self.interrupt()}

    names = ["a", "b", "c", "d"]
    working = Working(coordinator, server, Broken(engine), tiny_model, tmp_path / "worker")
    working.give(*names)
    with pytest.raises(AgentError), working:
        working.join()
    finished = (working.folder / "finished.log").read_text().split()
    failed = {r.group_id for r in run.rollouts() if r.state == "generation_failed"}
    assert set(finished) == failed


def test_the_same_group_twice(
    coordinator: Coordinator,
    server: ServerProcess,
    engine: VllmEngine,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    with Working(coordinator, server, engine, tiny_model, tmp_path / "worker", max_tokens=60) as working:
        working.give("a", "a", "b")
        until(lambda: working.failed or (len(arrived(run, "a")) == 2 and len(arrived(run, "b")) == 2))
        assert not working.failed


def test_a_batch_that_was_cut_short(
    coordinator: Coordinator,
    server: ServerProcess,
    engine: VllmEngine,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    hooked = Hooked(engine)
    with Working(coordinator, server, hooked, tiny_model, tmp_path / "worker") as working:
        hooked.hook = server.kill
        working.give("a")
        until(working.spooled)
    server.start()
    for left in working.spooled():
        content = left.read_bytes()
        left.write_bytes(content[: len(content) * 3 // 4])
    with Working(coordinator, server, engine, tiny_model, tmp_path / "worker") as working:
        working.give("b")
        until(lambda: working.failed or len(arrived(run, "b")) == 2)
        assert not working.failed


@pytest.mark.parametrize("where", ["spool", "finished", "rejected"])
def test_a_disk_that_is_full_for_a_while(
    where: str,
    coordinator: Coordinator,
    server: ServerProcess,
    engine: VllmEngine,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = new_run(coordinator, engine, tiny_model)
    full, refused = True, Event()
    fsync = spool.os.fsync

    def no_room(number: int) -> None:
        path = Path(f"/proc/self/fd/{number}").readlink()
        if full and (path.parent.name == where or path.stem == where):
            refused.set()
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        fsync(number)

    hooked = Hooked(engine)
    with Working(coordinator, server, hooked, tiny_model, tmp_path / "worker") as working:
        until(lambda: run.workers() and not run.workers()[0].fenced)
        monkeypatch.setattr(spool.os, "fsync", no_room)
        if where == "rejected":
            active = run.view().active
            other = run.worker("w2", "w2-1")
            other.register("hand", "1")
            other.ack(active.version, active.artifact_hash)
            forged = group(other, active, "a")[0].model_copy(update={"contract": run.view().contract})
            hooked.hook = lambda: run.submit([forged])  # type: ignore[assignment,return-value]  # the answer is not needed
        working.give("a")
        until(refused.is_set)
        assert not working.failed
        full = False
        until(lambda: working.failed or len(arrived(run, "a")) == 2, 30)
        working.give("b")
        until(lambda: working.failed or len(arrived(run, "b")) == 2, 30)
        assert not working.failed
