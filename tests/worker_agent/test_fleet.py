"""Two workers with real engines as processes of their own, and a real coordinator: what makes a version active."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from coordinator.client import Coordinator, Run
from coordinator.wire.policies import ActivationView, PolicyView, RequiredWorker
from coordinator.wire.runs import CreateRun, FirstPolicy, GenerationContract, JournalEntry, RunSettings
from tests.client.server_process import ServerProcess
from tests.worker_agent.adapters import draw_adapter
from tests.worker_agent.working import base_of, until
from worker_agent.learner.publishing import publish_adapter
from worker_agent.models import identify

START_SECONDS = 120.0
PLAIN = ("-m", "worker_agent.cli")
ODD = (str(Path(__file__).with_name("odd_worker.py")),)
STAGES = ["downloading", "verifying", "loading"]


class Fleet:
    """A run, its versions, and worker processes that are started, told what to do wrong, and killed."""

    def __init__(self, coordinator: Coordinator, url: str, model: Path, folder: Path, run_id: str) -> None:
        identity = identify(model)
        self.run: Run = coordinator.create_run(
            CreateRun(
                run_id=run_id,
                settings=RunSettings(group_size=2, heartbeat_seconds=0.5, lost_after_seconds=60),
                contract=GenerationContract(
                    tokenizer_hash=identity.tokenizer_hash,
                    chat_template_hash=identity.chat_template_hash,
                    temperature=1.0,
                    top_p=1.0,
                    logprobs_mode="raw",
                    dtype="float32",
                ),
                vocab_size=identity.vocab_size,
                policy=FirstPolicy(base_model=base_of(model)),
            )
        )
        self._coordinator = coordinator
        self._url = url
        self._model = model
        self._folder = folder / run_id
        self._folder.mkdir()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, worker_id: str, program: Sequence[str]) -> None:
        token = self._coordinator.create_token(
            f"{self.run.id}-{worker_id}-{len(self.incarnations(worker_id))}",
            "worker",
            run_id=self.run.id,
            worker_id=worker_id,
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COORDINATOR_")} | {
            "COORDINATOR_URL": self._url,
            "COORDINATOR_TOKEN": token.token,
            "ODD_WORKER": str(self.word(worker_id)),
        }
        with self.log(worker_id).open("ab") as log:
            self.processes[worker_id] = subprocess.Popen(
                [sys.executable, *program, "run", "--run", self.run.id, "--worker-id", worker_id,
                 "--model", str(self._model), "--tasks", "-", "--threads", "1", "--data", str(self._folder)],
                stdin=subprocess.PIPE,  # tasks that may still come: it stays until it is ended
                stdout=log,
                stderr=log,
                env=environment,
            )  # fmt: skip

    def confirmed(self, worker_id: str, version: int, seconds: float = START_SECONDS) -> None:
        """Waits until the worker's newest life has rightly acked this version."""

        def acked() -> bool:
            process = self.processes[worker_id]
            assert process.poll() is None, self.log(worker_id).read_text()[-2000:]
            lives = self.incarnations(worker_id)
            acks = self.of("worker.acked", worker_id, version)
            return any(e.detail["matching"] and e.detail["incarnation"] == lives[-1] for e in acks if lives)

        until(acked, seconds)

    def kill(self, worker_id: str) -> None:
        process = self.processes.pop(worker_id)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def word(self, worker_id: str) -> Path:
        return self._folder / f"{worker_id}.odd"

    def reached(self, worker_id: str, stage: str) -> None:
        """Waits until the worker stays there."""
        file = self._folder / f"{worker_id}.odd.reached"
        until(lambda: file.is_file() and file.read_text() == stage, START_SECONDS)

    def log(self, worker_id: str) -> Path:
        return self._folder / f"{worker_id}.log"

    def logged(self, worker_id: str, event: str) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self.log(worker_id).read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def artifacts(self, worker_id: str) -> list[str]:
        """The names in the worker's cache."""
        return sorted(path.name for path in (self._folder / self.run.id / worker_id / "artifacts").iterdir())

    def publish(self, version: int) -> PolicyView:
        folder = draw_adapter(self._folder / f"v{version}", version)
        return publish_adapter(
            self.run,
            version=version,
            parent_version=self.active(),
            folder=folder,
            base_model=base_of(self._model),
        )

    def active(self) -> int:
        return self.run.view().active.version

    def activation(self) -> ActivationView:
        return self.run.activations()[-1]

    def required(self, worker_id: str) -> RequiredWorker:
        return next(w for w in self.activation().required if w.worker_id == worker_id)

    def incarnations(self, worker_id: str) -> list[str]:
        return [
            str(e.detail["incarnation"])
            for e in self.run.journal()
            if (e.event, e.subject) == ("worker.registered", worker_id)
        ]

    def of(self, event: str, worker_id: str, version: int) -> list[JournalEntry]:
        return [
            e
            for e in self.run.journal()
            if (e.event, e.subject) == (event, worker_id) and e.detail["version"] == version
        ]

    def switched_at(self, version: int) -> int:
        (switch,) = (e for e in self.run.journal() if (e.event, e.subject) == ("policy.activated", str(version)))
        return switch.event_no


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Coordinator, str]]:
    server = ServerProcess(tmp_path_factory.mktemp("fleet") / "data")
    server.start()
    with Coordinator(server.url, server.token) as coordinator:
        yield coordinator, server.url
    server.stop()


@pytest.fixture(scope="module")
def two(
    coordinator: tuple[Coordinator, str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """The worker `right` as it is, the worker `odd` that may be told to go wrong, and version 1 active."""
    fleet = Fleet(*coordinator, tiny_model, tmp_path_factory.mktemp("two"), "two")
    try:
        fleet.start("right", PLAIN)
        fleet.start("odd", ODD)
        fleet.confirmed("right", 0)
        fleet.confirmed("odd", 0)
        fleet.publish(1)
        fleet.run.activate(1, wait_seconds=60)
        yield fleet
    finally:
        fleet.stop()


@pytest.mark.xdist_group("fleet")
def test_both_tell_their_stages_and_ack_before_the_switch(two: Fleet) -> None:
    policy = two.run.policy(1)
    for worker in ("right", "odd"):
        stages = two.of("worker.stage", worker, 1)
        assert [e.detail["stage"] for e in stages] == STAGES
        (ack,) = two.of("worker.acked", worker, 1)
        assert stages[-1].event_no < ack.event_no < two.switched_at(1)
        digest = ack.detail["digest"]
        assert policy.digests[digest["layout"]] == digest["registered"] == digest["active"]


@pytest.mark.xdist_group("fleet")
def test_a_load_that_kept_the_old_weights_is_held(two: Fleet) -> None:
    version = two.active() + 1
    two.word("odd").write_text("keep_old")
    policy = two.publish(version)
    opened = two.run.open_activation(version, f"to-{version}")
    until(lambda: two.required("odd").ack == "mismatched")
    until(lambda: two.required("right").ack == "matching")
    assert two.activation().state == "open" and two.active() == version - 1
    (stated,) = policy.digests.values()
    wrong = two.of("worker.acked", "odd", version)[0]
    assert wrong.detail["artifact_hash"] == policy.artifact_hash  # the label is right
    assert stated in str(wrong.detail["detail"])
    two.word("odd").unlink()
    until(lambda: two.active() == version)
    assert two.run.activation(opened.activation_id).state == "succeeded"


@pytest.mark.xdist_group("fleet")
def test_a_tensor_that_one_worker_lost_is_seen_against_the_other(two: Fleet) -> None:
    version = two.active() + 1
    two.word("odd").write_text("loading")
    policy = two.publish(version)
    two.run.open_activation(version, f"to-{version}")
    until(lambda: two.required("right").ack == "matching")
    two.reached("odd", "loading")
    two.word("odd").write_text("zero_one")
    until(lambda: two.required("odd").ack == "mismatched")
    assert two.activation().state == "open" and two.active() == version - 1
    wrong = two.of("worker.acked", "odd", version)[0].detail
    assert wrong["digest"]["registered"] in policy.digests.values()
    assert "active weights" in str(wrong["detail"]) and "worker right" in str(wrong["detail"])
    two.word("odd").unlink()
    until(lambda: two.active() == version)


@pytest.mark.long
def test_a_worker_killed_at_each_stage_comes_back_and_is_the_last_ack(
    coordinator: tuple[Coordinator, str], tiny_model: Path, tmp_path: Path
) -> None:
    fleet = Fleet(*coordinator, tiny_model, tmp_path, "killed")
    try:
        fleet.word("w").write_text("downloading")
        fleet.start("w", ODD)
        fleet.confirmed("w", 0)
        policy = fleet.publish(1)
        opened = fleet.run.open_activation(1, "to-1")
        for stage, following in zip(STAGES, [*STAGES[1:], ""], strict=True):
            fleet.reached("w", stage)
            fleet.kill("w")
            names = fleet.artifacts("w")
            if stage == "downloading":  # half of it, under another name
                assert policy.artifact_hash not in names and len(names) == 1
            else:
                assert names == [policy.artifact_hash]
            assert not fleet.of("worker.acked", "w", 1)
            assert {line["version"] for line in fleet.logged("w", "policy_loaded")} == {0}
            assert (fleet.active(), fleet.activation().state) == (0, "open")
            fleet.word("w").write_text(following)
            fleet.start("w", ODD)
        fleet.confirmed("w", 1)
        until(lambda: fleet.active() == 1)
    finally:
        fleet.stop()
    lives = fleet.incarnations("w")
    assert len(set(lives)) == 4
    assert fleet.run.activation(opened.activation_id).state == "succeeded"
    (ack,) = fleet.of("worker.acked", "w", 1)
    assert ack.detail["incarnation"] == lives[-1] and ack.event_no < fleet.switched_at(1)
    stages = [(lives.index(str(e.detail["incarnation"])), e.detail["stage"]) for e in fleet.of("worker.stage", "w", 1)]
    assert (
        stages
        == [
            *((0, stage) for stage in STAGES[:1]),
            *((1, stage) for stage in STAGES[:2]),
            *((2, stage) for stage in STAGES[1:]),  # what was downloaded is verified again
            *((3, stage) for stage in STAGES[1:]),
        ]
    )
