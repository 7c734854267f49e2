"""What the command line changes: runs, activations, the ways back, workers, quarantine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coordinator.client import Coordinator, Run, Worker
from tests.cli.conftest import Command
from tests.client.runs import BASE, CONTRACT, new_run, new_worker, rewarded_groups, write_adapter
from tests.client.server_process import ServerProcess

BODY = {
    "settings": {"group_size": 4, "max_lag": 2},
    "contract": CONTRACT.model_dump(),
    "vocab_size": 100,
    "policy": {"base_model": BASE.model_dump()},
}
FLAGS = (
    *("--vocab-size", "100", "--base-model", "tiny", "--base-revision", "1", "--base-sha256", "c" * 64),
    *("--tokenizer-hash", "a" * 64, "--chat-template-hash", "b" * 64, "--temperature", "1", "--top-p", "1"),
    *("--logprobs-mode", "raw", "--dtype", "float32", "--set", "group_size=4", "--set", "max_lag=2"),
)
YAML = """
# A run of my own.
settings: {group_size: 8, on_lost: drop}
vocab_size: 100
contract:
  tokenizer_hash: %(tokenizer_hash)s
  chat_template_hash: %(chat_template_hash)s
  temperature: 1.0
  top_p: 1.0
  logprobs_mode: raw
policy: {base_model: {name: tiny, revision: "1", sha256: %(sha256)s}}
""" % (CONTRACT.model_dump() | BASE.model_dump())


def test_a_run_is_created_from_options_or_a_file_and_again_changes_nothing(
    cli: Command, coordinator: Coordinator, tmp_path: Path
) -> None:
    made = cli("run", "create", "by-options", *FLAGS, "--json")
    assert made.code == 0, made.err
    assert made.document == coordinator.run("by-options").view().model_dump(mode="json")
    assert (made.document["settings"]["group_size"], made.document["settings"]["max_lag"]) == (4, 2)
    (tmp_path / "run.json").write_text(json.dumps(BODY, indent="\t"))
    again = cli("run", "create", "by-options", "--file", str(tmp_path / "run.json"))
    assert (again.code, "group_size          4\n" in again.out) == (0, True)
    (tmp_path / "run.yaml").write_text(YAML)
    both = cli("run", "create", "by-file", "-f", str(tmp_path / "run.yaml"), "--dtype", "float32", "--set", "max_lag=1")
    assert both.code == 0, both.err
    settings = coordinator.run("by-file").view().settings
    assert (settings.group_size, settings.on_lost, settings.max_lag) == (8, "drop", 1)
    other = cli("run", "create", "by-options", *FLAGS, "--set", "max_lag=3")
    assert (other.code, other.out) == (1, "")
    assert other.err.startswith("coordinator: run_conflict: run by-options exists with other settings")


def test_all_that_a_run_lacks_is_told_at_once_with_the_options(cli: Command, tmp_path: Path) -> None:
    bare = cli("run", "create", "bare", "--temperature", "-1", "--set", "max_lg=1", "--base-sha256", "C" * 64)
    assert (bare.code, bare.out) == (2, "")
    head, *lines = bare.err.splitlines()
    assert head == "coordinator: the run cannot be created like that:"
    assert sorted(lines) == sorted(
        [
            "  settings.max_lg: 1 is not known (--set)",
            "  contract.tokenizer_hash: is missing (--tokenizer-hash)",
            "  contract.chat_template_hash: is missing (--chat-template-hash)",
            "  contract.temperature: -1.0 should be greater than or equal to 0 (--temperature)",
            "  contract.top_p: is missing (--top-p)",
            "  contract.logprobs_mode: is missing (--logprobs-mode)",
            "  contract.dtype: is missing (--dtype)",
            "  vocab_size: is missing (--vocab-size)",
            "  policy.base_model.name: is missing (--base-model)",
            "  policy.base_model.revision: is missing (--base-revision)",
            f"  policy.base_model.sha256: '{'C' * 64}' is not a sha256 as 64 lower-case hexadecimal digits "
            "(--base-sha256)",
        ]
    )
    (tmp_path / "broken").write_text("{a: [")
    for arguments, said in (
        (("--file", str(tmp_path / "broken")), "is neither JSON nor YAML: "),
        (("--file", str(tmp_path / "none")), "cannot read "),
        (("--file", str(Path(__file__))), "is neither JSON nor YAML"),
        (("--set", "group_size"), "group_size is not NAME=VALUE"),
        (("--dtype", "float31"), "contract.dtype: 'float31' should be 'float32', 'bfloat16', 'float16' or 'float8'"),
        (("--set", "group_size=lots"), "settings.group_size: 'lots' should be a valid integer (--set)"),
    ):
        done = cli("run", "create", "bare", *arguments)
        assert (done.code, done.out) == (2, ""), done.err
        assert said in " ".join(done.err.split()), done.err
    (tmp_path / "list").write_text("[1]")
    assert "does not hold the fields of a run" in cli("run", "create", "bare", "-f", str(tmp_path / "list")).err


@pytest.fixture
def published(coordinator: Coordinator, tmp_path: Path) -> tuple[Run, Worker]:
    """A run whose version 1 can be activated, and its one worker."""
    run = new_run(coordinator)
    worker = new_worker(run, "gpu-0")
    run.publish(version=1, parent_version=0, folder=write_adapter(tmp_path / "adapter"), base_model=BASE)
    return run, worker


def test_an_activation_is_followed_to_its_end(cli: Command, published: tuple[Run, Worker]) -> None:
    run, worker = published

    def confirm() -> None:
        while (candidate := worker.heartbeat().candidate) is None:
            time.sleep(0.02)
        worker.stage(1, "loading")
        worker.ack(1, candidate.artifact_hash)

    confirming = threading.Thread(target=confirm)
    confirming.start()
    done = cli("activate", run.id, "1")
    confirming.join()
    assert (done.code, done.out) == (0, "version 1 is active\n")
    told = [line.split(maxsplit=2)[-1] for line in done.err.splitlines() if not line.startswith("waits for")]
    assert told[:3] == ["version 1  prepared", "version 1  committed", "version 1  opened"]
    assert told[-3:] == ["gpu-0  loading", "gpu-0  acked", "version 1  activated"]
    assert "waits for gpu-0 (no ack yet); 5 min to its deadline" in done.err
    again = cli("activate", run.id, "1", "--json")
    (activation,) = run.activations()
    assert (again.code, again.document) == (0, activation.model_dump(mode="json"))


def test_one_that_goes_on_or_fails_has_an_exit_code_of_its_own(cli: Command, published: tuple[Run, Worker]) -> None:
    run, _ = published
    going = cli("activate", run.id, "1", "--wait-seconds", "0", "--json")
    assert (going.code, going.document["state"]) == (5, "open")
    assert "is open; it waits for gpu-0 (no ack yet)" in going.err
    give_up = ("give-up", run.id, going.document["activation_id"], "--reason", "it was wrong")
    asked = cli(*give_up)
    assert (asked.code, asked.out, run.activations()[0].state) == (2, "", "open")
    given = cli(*give_up, "--yes")
    assert (given.code, given.out) == (0, f"activation {give_up[2]} of version 1 is given_up\n")
    again = cli(*give_up, "--yes", "--json")
    assert (again.code, again.document) == (0, run.activations()[0].model_dump(mode="json"))
    ended = cli("activate", run.id, "1", "--activation-id", going.document["activation_id"])
    assert (ended.code, ended.out) == (1, "")
    assert "given_up; it was wrong" in ended.err


def test_ctrl_c_leaves_the_activation_as_it_is(server: ServerProcess, published: tuple[Run, Worker]) -> None:
    run, _ = published
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl+C
    following = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "activate", run.id, "1", "--data", str(server.data)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("COORDINATOR_")},
    )  # fmt: skip
    assert following.stderr is not None
    assert any("waits for gpu-0" in line for line in following.stderr)
    following.send_signal(signal.SIGINT)
    out, err = following.communicate(timeout=60)
    (activation,) = run.activations()
    assert (following.returncode, out, activation.state) == (130, "", "open")
    assert err.splitlines()[-1] == (
        f"activation {activation.activation_id} goes on as it is; 'coordinator activate {run.id} 1' follows it again"
    )


def test_a_rollback_asks_first_and_opens_its_activation(cli: Command, published: tuple[Run, Worker]) -> None:
    run, worker = published
    run.open_activation(1, "to-1")
    worker.ack(1, run.policy(1).artifact_hash)
    asked = cli("rollback", run.id, "0", "--reason", "worse")
    assert (asked.code, asked.out) == (2, "")
    assert f"this asks first: Roll run {run.id} back from version 1 to version 0, and" in asked.err
    assert "say --yes" in asked.err
    assert run.rollbacks() == []
    done = cli("rollback", run.id, "0", "--reason", "worse", "--yes")
    assert done.code == 0, done.err
    (rollback,) = run.rollbacks()
    assert "restored        version 0, as version 2\n" in done.out
    assert "withdrawn       1\n" in done.out
    assert done.err == f"'coordinator activate {run.id} 2' follows its activation\n"
    (activation,) = [a for a in run.activations() if a.version == 2]
    assert (activation.activation_id, activation.state) == (rollback.activation_id, "open")
    same = cli("rollback", run.id, "0", "--reason", "worse", "--yes", "--rollback-id", rollback.rollback_id)
    assert (same.code, "rollback_conflict" in same.err) == (1, True)  # it would open another activation


def test_a_rollback_without_its_activation_is_safe_to_repeat(cli: Command, published: tuple[Run, Worker]) -> None:
    run, worker = published
    run.open_activation(1, "to-1")
    worker.ack(1, run.policy(1).artifact_hash)
    command = ("rollback", run.id, "--reason", "worse", "--yes", "--no-activate", "--rollback-id", "night", "--json")
    first, second = cli(*command), cli(*command)
    assert first.document == second.document
    assert (first.document["to_version"], first.document["activation_id"]) == (0, None)
    assert [a.version for a in run.activations()] == [1]


def test_a_rewind_asks_first_and_says_what_it_undid(cli: Command, coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    rewarded_groups(run, new_worker(run), 1)
    with run.update("step-1") as update:
        candidates = update.candidates(groups=1)
        update.reserve(candidates, list(candidates.behavior_log_probs))  # type: ignore[arg-type]
        update.commit()
    asked = cli("rewind", run.id, "0", "--reason", "lost")
    assert (asked.code, asked.out) == (2, "")
    assert f"this asks first: Rewind run {run.id} from commit 1 to commit 0, and undo 1?" in asked.err
    command = ("rewind", run.id, "0", "--reason", "lost", "--yes", "--rewind-id", "night")
    done = cli(*command)
    assert done.code == 0, done.err
    assert "undone updates      step-1\n" in done.out
    assert "rollouts            2 came back, 0 quarantined\n" in done.out
    (rewind,) = run.rewinds()
    assert cli(*command, "--json").document == rewind.model_dump(mode="json")


def test_workers_are_drained_and_fenced(cli: Command, coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    new_worker(run, "a")
    new_worker(run, "b")
    drained = cli("workers", "drain", run.id, "a", "--json")
    assert (drained.code, drained.document["state"]) == (0, "draining")
    asked = cli("workers", "fence", run.id, "b", "--reason", "hot")
    assert (asked.code, asked.out, run.workers()[1].fenced) == (2, "", False)
    fenced = cli("workers", "fence", run.id, "b", "--reason", "hot \x1b[31m", "--yes")
    assert fenced.code == 0, fenced.err
    assert [(row[0], row[1], row[3]) for row in fenced.rows] == [("b", "live", r"hot \x1b[31m")]
    assert [(w.state, w.fenced) for w in run.workers()] == [("draining", False), ("live", True)]
    empty = cli("workers", "fence", run.id, "b", "--reason", "", "--yes")
    assert (empty.code, empty.err) == (2, "coordinator: reason: '' should have at least 1 character\n")


def test_what_is_released_and_what_stays_is_told(cli: Command, coordinator: Coordinator) -> None:
    run = new_run(coordinator)
    rewarded_groups(run, new_worker(run), 3)
    with run.update("step-1") as update:
        candidates = update.candidates(groups=2)
        update.reserve(candidates, [row - 1.0 for row in candidates.behavior_log_probs])  # type: ignore[misc]
    released = cli("quarantine", "release", run.id, "g0:0.0", "g0:1.0", "nowhere")
    assert released.code == 0
    assert released.rows == [
        *([rollout, "released", "rewarded", "-"] for rollout in ("g0:0.0", "g0:1.0")),
        ["nowhere", "missing_rollout", "-", "-"],
    ]
    assert released.err == "1 missing_rollout, 2 released\n"
    rest = cli("quarantine", "release", run.id, "--update", "step-1", "--reason", "policy_drift", "--json")
    assert [v["verdict"] for v in rest.document["verdicts"]] == ["released"] * 2
    none = cli("quarantine", "release", run.id, "--update", "step-1", "--reason", "policy_drift")
    assert (none.code, none.out) == (0, "")
    for wrong in ((), ("--update", "step-1"), ("--reason", "x"), ("g0:0.0", "--update", "u", "--reason", "x")):
        done = cli("quarantine", "release", run.id, *wrong)
        assert (done.code, done.out) == (2, "")
        assert "name rollouts, or --update and --reason" in done.err
