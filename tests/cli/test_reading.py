"""What the command line shows: as tables for people, and as the very JSON of the API for scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from coordinator.client import Coordinator, Run
from tests.cli.conftest import Command, Ended
from tests.client.runs import new_run
from tests.client.server_process import ServerProcess

Get = Callable[[str], Any]


@pytest.fixture
def get(server: ServerProcess) -> Get:
    """The answer of the API itself."""

    def get(path: str) -> Any:
        answer = httpx.get(f"{server.url}/v1{path}", headers={"authorization": f"Bearer {server.token}"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return get


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ("run list", "/runs"),
        ("run show sums", "/runs/sums"),
        ("rollouts list sums", "/runs/sums/rollouts"),
        ("rollouts list sums --limit 2 --after g0:0.0", "/runs/sums/rollouts?limit=2&after=g0:0.0"),
        ("rollouts list sums --state consumed --version 0", "/runs/sums/rollouts?state=consumed&version=0"),
        ("rollouts list sums --group g1 --worker gpu-0", "/runs/sums/rollouts?group_id=g1&worker_id=gpu-0"),
        ("rollouts list sums --reason policy_drift", "/runs/sums/rollouts?reason=policy_drift"),
        ("rollouts list sums --task-source nowhere", "/runs/sums/rollouts?task_source=nowhere"),
        ("rollouts show sums g0:0.0", "/runs/sums/rollouts/g0:0.0"),
        ("updates list sums", "/runs/sums/updates?newest_first=true"),
        ("updates list sums --limit 1", "/runs/sums/updates?newest_first=true&limit=1"),
        ("updates list sums --state committed --oldest-first", "/runs/sums/updates?state=committed"),
        ("updates show sums step-1", "/runs/sums/updates/step-1"),
        ("policies list sums", "/runs/sums/policies"),
        ("policies show sums 0", "/runs/sums/policies/0"),
        ("workers list sums", "/runs/sums/workers"),
        ("quarantine list sums", "/runs/sums/quarantine"),
    ],
)
def test_json_is_the_answer_of_the_api_and_nothing_else(
    cli: Command, sums: Run, get: Get, arguments: str, path: str
) -> None:
    done = cli(*arguments.split(), "--json")
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    assert done.document == get(path)


def table(done: Ended) -> list[list[str]]:
    assert done.code == 0, done.err
    return done.rows


def test_runs_are_listed_and_shown(cli: Command, sums: Run) -> None:
    assert [row[:4] for row in table(cli("run", "list")) if row[0] == "sums"] == [["sums", "0", "1", "2"]]
    shown = cli("run", "show", "sums").out
    assert "rollouts            2 generated, 2 rewarded, 2 consumed, 2 quarantined\n" in shown
    assert "temperature         1\n" in shown
    assert shown.endswith("dtype               float32\ngroup_size          2\n")  # what is not the default


def test_rollouts_are_listed_and_one_is_shown_with_its_history(cli: Command, sums: Run) -> None:
    rows = {row[0]: row[1:9] for row in table(cli("rollouts", "list", "sums"))}
    assert len(rows) == 8
    assert rows["g0:1.0"] == ["g0", "consumed", "-", "0", "1", "5", "gpu-0", "step-1"]
    assert rows["g1:0.0"] == ["g1", "quarantined", "policy_drift", "0", "0", "5", "gpu-0", "-"]
    assert rows["unrewarded:0.0"][4] == "-"
    more = cli("rollouts", "list", "sums", "--limit", "3")
    assert (len(more.rows), more.err) == (3, f"there may be more: --after {more.rows[-1][0]}\n")
    none = cli("rollouts", "list", "sums", "--state", "offline")
    assert (none.code, none.out, none.err) == (0, "", "no rollout is like that\n")
    shown = cli("rollouts", "show", "sums", "g1:0.0").out
    assert "tokens [2, 5), " in shown and "5, 3 of them actions" in shown
    history = [line.split() for line in shown[shown.index("REVISION") :].splitlines()[1:]]
    assert [(row[0], row[3], row[4]) for row in history] == [
        ("0", "arrive", "generated"),
        ("1", "reward_ready", "rewarded"),
        ("2", "quarantine", "quarantined"),
    ]


def test_updates_and_policies_and_workers_are_listed_and_shown(cli: Command, sums: Run) -> None:
    updates = table(cli("updates", "list", "sums"))
    assert [row[:4] for row in updates] == [["step-2", "aborted", "0", "-"], ["step-1", "committed", "0", "1"]]
    shown = cli("updates", "show", "sums", "step-1").out
    assert "reserved       2 consumed\n" in shown and "lag            0 to 0\n" in shown
    assert "refused        2 policy_drift\n" in (drifted := cli("updates", "show", "sums", "step-2").out)
    assert "drift          1 to 1\n" in drifted
    assert [row[:3] for row in table(cli("policies", "list", "sums"))] == [["0", "active", "base"]]
    assert "base model        tiny at 1, cccc" in cli("policies", "show", "sums", "0").out
    (row,) = table(cli("workers", "list", "sums"))
    assert (row[0], row[1], row[3:6]) == ("gpu-0", "live", ["-", "-", "hand 1"])


def test_the_quarantine_is_listed_by_reason_and_update(cli: Command, sums: Run) -> None:
    assert [row[:3] for row in table(cli("quarantine", "list", "sums"))] == [["policy_drift", "step-2", "2"]]


def test_a_diagnosis_is_told_in_words_and_by_its_exit_code(cli: Command, coordinator: Coordinator, sums: Run) -> None:
    new_run(coordinator, "idle")
    idle = cli("diagnose", "idle")
    assert idle.code == 4
    assert idle.out.startswith(
        "run idle waits for this, the first to be looked at first:\n"
        "1. no_workers: no worker is registered\n   Start a worker agent.\n"
        "2. nothing_generated: no open group has a member\n   Give the workers tasks.\n\n"
    )
    assert "workers           0 live, 0 draining, 0 lost, 0 fenced\n" in idle.out
    document = cli("diagnose", "idle", "--json")
    assert (document.code, document.err) == (4, "")
    assert [blocker["code"] for blocker in document.document["blockers"]] == ["no_workers", "nothing_generated"]
    ready = cli("diagnose", "sums")
    assert "1. no_open_update, for " in ready.out
    assert "rewards           2 rollouts wait, 0 failed; the oldest for " in ready.out
    assert "refused in 5 min  2 policy_drift\n" in ready.out
    with sums.update("step-3"):
        going = cli("diagnose", "sums")
        assert going.code == 0, going.out
        assert going.out.startswith("nothing blocks run sums\n")
        assert "update step-3     on version 0, holds 0, open for " in going.out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("run show nowhere", "run_unknown"),
        ("rollouts list nowhere", "run_unknown"),
        ("rollouts show sums nowhere", "rollout_unknown"),
        ("updates list nowhere", "run_unknown"),
        ("updates show sums nowhere", "update_unknown"),
        ("policies list nowhere", "run_unknown"),
        ("policies show sums 99", "policy_version_unknown"),
        ("workers list nowhere", "run_unknown"),
        ("workers drain sums nowhere", "worker_unknown"),
        ("workers fence sums nowhere --reason x --yes", "worker_unknown"),
        ("quarantine list nowhere", "run_unknown"),
        ("quarantine release sums --update nowhere --reason x", "update_unknown"),
        ("activate sums 99", "policy_version_unknown"),
        ("rollback sums 99 --reason x --yes", "policy_version_unknown"),
        ("rewind sums 99 --reason x --yes", "commit_unknown"),
        ("diagnose nowhere", "run_unknown"),
        ("rollouts show sums a/b", "not_found"),
        ("run show no!id", "invalid_request"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_what_is_refused_is_told_with_its_code_and_the_next_step(
    cli: Command, sums: Run, arguments: str, code: str, form: tuple[str, ...]
) -> None:
    done = cli(*arguments.split(), *form)
    assert (done.code, done.out) == (1, "")
    what, _, next_step = done.err.partition("\n  ")
    assert what.startswith(f"coordinator: {code}"), done.err
    assert len(next_step.strip()) > 10
