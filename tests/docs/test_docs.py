"""The documentation says what the code does: generated parts, code blocks, links."""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from coordinator.client import AsyncCoordinator, AsyncRun, Candidates, Coordinator, Run, Worker
from coordinator.wire.policies import PolicyRef
from coordinator.wire.rollouts import Rollout
from tests.client.runs import BASE, group, new_run, new_worker, rewarded_groups, write_adapter
from tests.client.server_process import ServerProcess
from tests.docs.pages import DOCS, PAGES, fill

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(heading: str) -> str:
    """The first Python block below this heading of the README."""
    section = README.split(f"# {heading}\n", 1)[1]
    return section.split("```python\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def run(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("COORDINATOR_URL", server.url)
    monkeypatch.setenv("COORDINATOR_TOKEN", server.token)
    with Coordinator() as coordinator:
        yield new_run(coordinator, "sums", activation_deadline_seconds=20)


@pytest.mark.parametrize("part", PAGES)
def test_generated_parts_are_up_to_date(part: str) -> None:
    page = PAGES[part].read_text(encoding="utf-8")
    assert page == fill(part, page), "run: python tests/docs/pages.py"


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *DOCS.glob("*.md"), ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tests_that_hold_a_guarantee_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "guarantees.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    for file, name in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{file}::{name}"


def test_the_calls_with_curl(server: ServerProcess, tmp_path: Path) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    script = page.split("# From nothing to a consumed rollout\n", 1)[1].split("```bash\n", 1)[1].split("```", 1)[0]
    (tmp_path / ".data").symlink_to(server.data)
    played = subprocess.run(
        ["bash", "-eu", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert played.returncode == 0, played.stderr
    *answers, state, commit_no, activation = played.stdout.splitlines()
    assert (state, commit_no, activation) == ("consumed", "1", "succeeded"), played.stdout
    assert len(answers) == script.count("\ncall ") - 3
    assert not [answer for answer in answers if '"next_step"' in answer]
    with Coordinator(server.url, server.token) as coordinator:
        run = coordinator.run("first-run")
        assert run.view().active.version == 1
        lineage = run.lineage("step-1")
    assert [(m.rollout_id, m.outcome) for m in lineage.members] == [("sum-1:0", "consumed")]


class Learner:
    """What the README asks of a learner; each step is followed by new groups and, as workers do, by an ack."""

    base_model = BASE

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder, self.steps = run, folder, 0
        self.consumed: list[str] = []

    def log_probs(self, tokens: Any, masks: Any) -> list[npt.NDArray[np.float64]]:
        return [np.full(len(row), -0.7) for row in tokens]

    def step(self, admitted: Candidates) -> None:
        self.steps += 1
        self.consumed += [t.rollout_id for t in admitted]

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


def test_the_trainer_s_lines(run: Run, tmp_path: Path) -> None:
    worker = new_worker(run)
    rewarded_groups(run, worker, 24)
    learner = Learner(run, tmp_path)
    with confirming(worker):
        exec(compile(block("Ten lines for a trainer"), "README.md", "exec"), {"learner": learner})
    assert run.view().active.version == 3
    assert (run.view().last_commit_no, len(set(learner.consumed))) == (3, 48)


def test_the_trainer_s_lines_with_asyncio(run: Run, tmp_path: Path) -> None:
    worker = new_worker(run)
    rewarded_groups(run, worker, 24)
    learner = Learner(run, tmp_path)
    names: dict[str, Any] = {"asyncio": asyncio, "AsyncRun": AsyncRun, "learner": learner}
    exec(compile(block("The same with asyncio"), "README.md", "exec"), names)

    async def train() -> None:
        async with AsyncCoordinator() as coordinator:
            for version in range(1, 4):
                await names["step"](coordinator.run("sums"), version)

    with confirming(worker):
        asyncio.run(train())
    assert run.view().active.version == 3
    assert (run.view().last_commit_no, len(set(learner.consumed))) == (3, 48)


class Engine:
    """What the README asks of an engine: work for three rounds."""

    process_id = "gpu-0-life-1"

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.rounds = 0

    def has_work(self) -> bool:
        self.rounds += 1
        return self.rounds <= 3

    def load(self, run: Run, policy: PolicyRef) -> None:
        self.loaded.add(policy.version)

    def generate(self, policy: PolicyRef) -> list[Rollout]:
        from coordinator.client import Coordinator

        return group(Coordinator().run("sums").worker("gpu-0", self.process_id), policy, f"g{self.rounds}")


def test_the_worker_s_lines(run: Run) -> None:
    exec(compile(block("Ten lines for a worker"), "README.md", "exec"), {"engine": Engine()})
    rollouts = list(run.rollouts(state="generated"))
    assert len(rollouts) == 6


def test_the_reward_service_s_lines(run: Run) -> None:
    worker, active = new_worker(run), run.view().active
    run.submit(group(worker, active, "scored") + group(worker, active, "slow"))

    def score(task_id: str, token_ids: list[int]) -> float:
        if task_id == "slow":
            raise TimeoutError
        return float(token_ids[-1])

    exec(compile(block("A reward service"), "README.md", "exec"), {"score": score, "rules_sha256": "d" * 64})
    assert [(r.state, r.reward) for r in run.rollouts(group_id="scored")] == [("rewarded", 5.0), ("rewarded", 6.0)]
    assert [(r.reward_status, r.reward) for r in run.rollouts(group_id="slow")] == [("timeout", None)] * 2
