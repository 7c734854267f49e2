"""Two real gloo ranks share an update: the shards come back in order, and no error leaves the other rank waiting."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.client import Coordinator
from tests.client.runs import group, new_run, new_worker, reward
from tests.client.server_process import ServerProcess
from tests.worker_agent.rank import PER_TOKEN


def test_an_update_on_two_ranks(server: ServerProcess, tmp_path: Path) -> None:
    with Coordinator(server.url, server.token) as coordinator:
        run = new_run(coordinator, group_size=5)
        rollouts = [r for name in ("g0", "g1") for r in group(new_worker(run), run.view().active, name, size=5)]
        run.submit(rollouts)
        reward(run, rollouts)
        said = play(server, tmp_path, run.id)

        # In order: the drift that the coordinator found is the one that each rollout's own log-probs have.
        expected = {f"g0:{i}.0": pytest.approx(PER_TOKEN * (5 + i)) for i in range(5)}
        assert [rank["whole"]["answer"] for rank in said] == [
            {"drifts": expected, "commit_no": 1, "state": "committed"}
        ] * 2
        # Of five, rank 0 scored three and rank 1 two, and its first again: both make equally many passes.
        assert [rank["scored"] for rank in said] == [[5, 7, 9], [6, 8, 6]]
        errors = {
            scene: [(rank[scene]["error"], rank[scene]["words"]) for rank in said if scene in rank]
            for scene in ("scoring_fails", "step_fails", "calls_differ")
        }
        assert errors["scoring_fails"] == [
            ("RankError", "rank 1: RuntimeError: out of memory"),
            ("RuntimeError", "out of memory"),
        ]
        assert errors["step_fails"] == [
            ("RankError", "rank 1: ZeroDivisionError: the step"),
            ("ZeroDivisionError", "the step"),
        ]
        different = "the ranks make different calls: rank 0 at candidates, rank 1 at commit"
        assert errors["calls_differ"] == [("RankError", different)] * 2
        assert [rank["coordinator_refuses"]["error"] for rank in said] == ["LineConflict", "RankError"]
        assert said[1]["coordinator_refuses"]["words"].startswith("rank 0: LineConflict: line_conflict (409)")
        assert said[0]["rank_dies"]["error"] == "RuntimeError"
        assert "rank_dies" not in said[1]

        # Rank 0 took every update of a failed step back at once: nothing waits for a lease to end.
        ends = {view.update_id: view.state for view in run.updates()}
        assert ends == {
            "whole": "committed",
            "scoring-fails": "aborted",
            "refused": "aborted",
            "step-fails": "aborted",
            "calls-differ": "aborted",
            "rank-dies": "aborted",
        }
        assert {r.state for r in run.rollouts(group_id="g0")} == {"consumed"}
        assert {r.state for r in run.rollouts(group_id="g1")} == {"rewarded"}


def play(server: ServerProcess, folder: Path, run_id: str) -> list[dict[str, Any]]:
    """What each rank said, by scene; `scored` is of the first one."""
    environment = os.environ | {
        "COORDINATOR_URL": server.url,
        "COORDINATOR_TOKEN": server.token,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(Path(__file__).with_name("rank.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), run_id],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 9], ended
    said = []
    for out, _ in ended:
        lines = [json.loads(line) for line in out.splitlines()]
        scenes = {line["scene"]: line for line in lines if "scene" in line}
        said.append(scenes | {"scored": next(line["scored"] for line in lines if "scored" in line)})
    return said
