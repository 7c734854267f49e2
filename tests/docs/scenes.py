"""What stands around a block when it is played: the things that the text calls yours, and what must have come of it.

A scene gives a Python block its names; a shell block finds the coordinator's data folder as `.data`, the examples, and
the programs of this environment. What follows its `yield` is what the block must have brought about.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy.engine import make_url

from coordinator.client import AsyncCoordinator, AsyncRun, Candidates, Coordinator, Run, Worker
from coordinator.wire.policies import PolicyRef
from coordinator.wire.rollouts import Rollout
from tests.client.runs import BASE, group, new_worker, rewarded_groups, write_adapter
from tests.database import Databases


@dataclass
class Stage:
    """One block's own run on the coordinator that all blocks share, and a folder; `said` is what a script printed."""

    coordinator: Coordinator
    run: Run
    folder: Path
    postgres: Databases
    environment: dict[str, str]
    said: str = ""
    replace: dict[str, str] = field(default_factory=dict)
    """What a shell block has in place of something that it could not know, such as an address."""


Scene = Callable[[Stage], AbstractContextManager[dict[str, Any]]]
SCENES: dict[str, Scene] = {}


def scene(name: str) -> Callable[[Callable[[Stage], Iterator[dict[str, Any]]]], Scene]:
    """Names a scene as the marks name it."""

    def add(play: Callable[[Stage], Iterator[dict[str, Any]]]) -> Scene:
        SCENES[name] = contextmanager(play)
        return SCENES[name]

    return add


@scene("alone")
def alone(stage: Stage) -> Iterator[dict[str, Any]]:
    """Nothing but the block."""
    yield {}


class Learner:
    """What the trainer's lines ask of a learner."""

    base_model = BASE

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, 0
        self.consumed: list[str] = []

    def log_probs(self, tokens: Any, masks: Any) -> list[npt.NDArray[np.float64]]:
        return [np.full(len(row), -0.7) for row in tokens]

    def step(self, admitted: Candidates) -> None:
        self.steps += 1
        self.consumed += [trajectory.rollout_id for trajectory in admitted]

    def export(self) -> Path:
        return write_adapter(self.folder / str(self.steps), str(self.steps).encode())


@contextmanager
def confirming(worker: Worker) -> Iterator[None]:
    """A worker that acks each candidate meanwhile."""
    done = threading.Event()

    def confirm() -> None:
        while not done.wait(0.1):
            candidate = worker.heartbeat().candidate
            if candidate is not None:
                worker.ack(candidate.version, candidate.artifact_hash)

    acking = threading.Thread(target=confirm)
    acking.start()
    try:
        yield
    finally:
        done.set()
        acking.join()


@scene("trainer")
def trainer(stage: Stage) -> Iterator[dict[str, Any]]:
    """24 groups wait, one worker is there; three updates of eight make three versions."""
    worker = new_worker(stage.run)
    rewarded_groups(stage.run, worker, 24)
    learner = Learner(stage.folder)
    with confirming(worker):
        yield {"learner": learner}
    assert stage.run.view().active.version == 3
    assert (stage.run.view().last_commit_no, len(set(learner.consumed))) == (3, 48)


@scene("trainer with asyncio")
def trainer_with_asyncio(stage: Stage) -> Iterator[dict[str, Any]]:
    """The block defines one step; three are made."""
    worker = new_worker(stage.run)
    rewarded_groups(stage.run, worker, 24)
    learner = Learner(stage.folder)
    names: dict[str, Any] = {"asyncio": asyncio, "AsyncRun": AsyncRun, "learner": learner}
    yield names

    async def train() -> None:
        async with AsyncCoordinator() as coordinator:
            for version in range(1, 4):
                await names["step"](coordinator.run(stage.run.id), version)

    with confirming(worker):
        asyncio.run(train())
    assert (stage.run.view().active.version, len(set(learner.consumed))) == (3, 48)


@scene("one step")
def one_step(stage: Stage) -> Iterator[dict[str, Any]]:
    """Eight groups wait; the block has the run, its parts of one step, and may leave the update to the scene."""
    rewarded_groups(stage.run, new_worker(stage.run), 8)
    yield {"run": stage.run, "learner": Learner(stage.folder)}


@scene("a consumed update")
def a_consumed_update(stage: Stage) -> Iterator[dict[str, Any]]:
    """Two commits and a worker, for what comes after: rewinds, lineage, events."""
    worker = new_worker(stage.run)
    rewarded_groups(stage.run, worker, 2)
    for number in (1, 2):
        with stage.run.update(f"step-{number}") as update:
            candidates = update.candidates(groups=1)
            update.reserve(candidates, [row.copy() for row in candidates.behavior_log_probs])
            update.commit()
    yield {"run": stage.run}


@scene("several ranks")
def several_ranks(stage: Stage) -> Iterator[dict[str, Any]]:
    """A world of one rank; the version that it makes is there to be activated."""
    import torch.distributed as dist

    worker = new_worker(stage.run)
    rewarded_groups(stage.run, worker, 8)
    learner = Learner(stage.folder)
    stage.run.publish(
        version=1, parent_version=0, folder=write_adapter(stage.folder / "adapter"), base_model=BASE, updates=[]
    )
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with confirming(worker):
            yield {
                "run": stage.run,
                "rank": 0,
                "world": 1,
                "gloo": dist.group.WORLD,
                "log_probs": learner.log_probs,
                "step": learner.step,
                "version": 1,
            }
    finally:
        dist.destroy_process_group()
    assert (stage.run.view().active.version, stage.run.view().last_commit_no) == (1, 1)


class Engine:
    """What the worker's lines ask of an engine: work for three rounds."""

    process_id = "gpu-0-life-1"

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.rounds = 0

    def has_work(self) -> bool:
        self.rounds += 1
        return self.rounds <= 3

    def load(self, run: Run, policy: PolicyRef) -> None:
        self.run = run
        self.loaded.add(policy.version)

    def generate(self, policy: PolicyRef) -> list[Rollout]:
        return group(self.run.worker("gpu-0", self.process_id), policy, f"g{self.rounds}")


@scene("worker")
def worker(stage: Stage) -> Iterator[dict[str, Any]]:
    yield {"engine": Engine()}
    assert len(list(stage.run.rollouts(state="generated"))) == 6


@scene("reward service")
def reward_service(stage: Stage) -> Iterator[dict[str, Any]]:
    """Two groups wait; of one the score takes too long."""
    there, active = new_worker(stage.run), stage.run.view().active
    stage.run.submit(group(there, active, "scored") + group(there, active, "slow"))

    def score(task_id: str, token_ids: list[int]) -> float:
        if task_id == "slow":
            raise TimeoutError
        return float(token_ids[-1])

    yield {"score": score, "rules_sha256": "d" * 64}
    scored = list(stage.run.rollouts(group_id="scored"))
    assert [(r.state, r.reward) for r in scored] == [("rewarded", 5.0), ("rewarded", 6.0)]
    slow = list(stage.run.rollouts(group_id="slow"))
    assert [(r.reward_status, r.reward) for r in slow] == [("timeout", None)] * 2


@scene("a rewarded group")
def a_rewarded_group(stage: Stage) -> Iterator[dict[str, Any]]:
    """The group `sum-1` has its rewards; the block scores it again."""
    rollouts = rewarded_groups(stage.run, new_worker(stage.run), 1, prefix="sum-")
    yield {"run": stage.run, "group_id": rollouts[0].group_id, "rules_sha256": "e" * 64, "score": lambda *_: 0.5}
    assert [r.reward for r in stage.run.rollouts()] == [0.5, 0.5]


@scene("an identified model")
def an_identified_model(stage: Stage) -> Iterator[dict[str, Any]]:
    """What `worker-agent identify` prints lies in model.json; the block makes a run of it, under another name here."""
    view = stage.run.view()
    told = {
        "contract": view.contract.model_dump(mode="json"),
        "vocab_size": view.vocab_size,
        "policy": {"base_model": BASE.model_dump(mode="json")},
    }
    (stage.folder / "model.json").write_text(json.dumps(told), encoding="utf-8")
    stage.replace['"sums"'] = f'"{stage.run.id}-2"'
    yield {}
    assert stage.coordinator.run(f"{stage.run.id}-2").view().settings.group_size == 4


@scene("curl from nothing")
def curl_from_nothing(stage: Stage) -> Iterator[dict[str, Any]]:
    """The script makes its run `first-run` itself, and ends with three facts."""
    yield {}
    *answers, state, commit_no, activation = stage.said.splitlines()
    assert (state, commit_no, activation) == ("consumed", "1", "succeeded"), stage.said
    assert not [answer for answer in answers if '"next_step"' in answer]
    lineage = stage.coordinator.run("first-run").lineage("step-1")
    assert [(m.rollout_id, m.outcome) for m in lineage.members] == [("sum-1:0", "consumed")]


@scene("a quarantined update")
def a_quarantined_update(stage: Stage) -> Iterator[dict[str, Any]]:
    """The update `update-17` found a group to have drifted; the block releases it."""
    rewarded_groups(stage.run, new_worker(stage.run), 1)
    with stage.run.update("update-17") as update:
        candidates = update.candidates(groups=1)
        verdicts = update.reserve(candidates, [row - 3.0 for row in candidates.behavior_log_probs]).verdicts
        assert {verdict.verdict for verdict in verdicts} == {"policy_drift"}
    yield {"run": stage.run}
    assert {r.state for r in stage.run.rollouts()} == {"rewarded"}


@scene("thirteen versions")
def thirteen_versions(stage: Stage) -> Iterator[dict[str, Any]]:
    """Version 13 is active, made from 12; the block brings 12 back, and the worker confirms it."""
    worker = new_worker(stage.run)
    folder = write_adapter(stage.folder / "adapter")
    with confirming(worker):
        for version, parent in ((12, 0), (13, 12)):
            stage.run.publish(version=version, parent_version=parent, folder=folder, base_model=BASE, updates=[])
            stage.run.activate(version)
        yield {"run": stage.run}
        for _ in stage.run.events(0, only=["policy.activated"]):
            if stage.run.view().active.version == 14:
                break
    assert stage.run.policy(13).state == "withdrawn"


def plain(url: str) -> str:
    """The address as Postgres' own programs want it, and as an operator writes it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


@scene("own Postgres")
def own_postgres(stage: Stage) -> Iterator[dict[str, Any]]:
    """An empty database of one's own in place of the address in the text, and a folder that holds nothing yet."""
    (stage.folder / ".data").unlink()
    stage.replace["postgresql://user:password@host/database"] = plain(stage.postgres.empty())
    yield {}
    assert "serving http://" in stage.said


@scene("an exported run")
def an_exported_run(stage: Stage) -> Iterator[dict[str, Any]]:
    """A group was exported to sums.parquet."""
    rewarded_groups(stage.run, new_worker(stage.run), 1)
    export = ["coordinator", "rollouts", "export", stage.run.id, "sums.parquet"]
    subprocess.run(export, cwd=stage.folder, env=stage.environment, capture_output=True, check=True)
    names: dict[str, Any] = {}
    yield names
    assert names["rollouts"].num_rows == 2


@scene("a traced step")
def a_traced_step(stage: Stage) -> Iterator[dict[str, Any]]:
    """An update is open, and the trainer has a tracer of its own."""
    from opentelemetry import trace

    with stage.run.update("step-1") as update:
        yield {"tracer": trace.get_tracer("trainer"), "update": update}
    assert stage.run.update_view("step-1").state == "committed"
