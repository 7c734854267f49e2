"""prune: it counts first, removes only what is over, and leaves the tombstones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.client import Coordinator, Refused, Run, Worker
from tests.cli.conftest import Command
from tests.client.runs import BASE, group, new_run, new_worker, rewarded_groups, write_adapter

YEARS = 5 * 366 * 24 * 3600.0


def consumed(run: Run, worker: Worker, prefix: str) -> list[str]:
    """The ids of a group that an update consumed."""
    ids = [rollout.rollout_id for rollout in rewarded_groups(run, worker, 1, prefix)]
    with run.update() as update:
        candidates = update.candidates(groups=1)
        update.reserve(candidates, [np.asarray(row, dtype=np.float64) for row in candidates.behavior_log_probs])
        update.commit()
    return ids


def tokens_of(run: Run, rollout_id: str) -> bool:
    try:
        return bool(run.evidence(rollout_id).token_ids)
    except Refused as refused:
        assert refused.code == "rollout_unknown"
        return False


def test_what_is_over_is_counted_and_removed_only_when_asked(cli: Command, coordinator: Coordinator) -> None:
    run = new_run(coordinator, rewind_commits=0, rollout_retention_seconds=YEARS)
    worker = new_worker(run)
    first = consumed(run, worker, "over")
    run.submit(group(worker, run.view().active, "live"))

    dry = cli("prune", "--older-than", "0", "--run", run.id)
    assert (dry.code, dry.rows) == (0, [[run.id, "2", "0.0", "2", "0", "0.0"]])
    assert "nothing was removed: --delete does it" in dry.err
    young = cli("prune", "--older-than", "1", "--run", run.id)
    assert young.rows == [[run.id, "0", "0.0", "0", "0", "0.0"]]
    asked = cli("prune", "--older-than", "0", "--run", run.id, "--delete")
    assert (asked.code, tokens_of(run, first[0])) == (2, True)
    assert "this asks first: Remove all of this, for good?" in asked.err

    done = cli("prune", "--older-than", "0", "--run", run.id, "--delete", "--yes", "--json")
    assert (done.code, done.document) == (
        0,
        {
            "deleted": True,
            "runs": [
                {
                    "run_id": run.id,
                    "evidence": 2,
                    "evidence_bytes": 2 * 5 * 9,
                    "rollouts": 2,
                    "versions": [],
                    "file_bytes": 0,
                }
            ],
        },
    )
    assert [view.group_id for view in run.rollouts()] == ["live", "live"]
    again = run.submit(group(worker, run.view().active, "over0"))
    assert {verdict.verdict for verdict in again.verdicts} == {"duplicate"}
    assert cli("verify", "--run", run.id).code == 0
    nothing = cli("prune", "--older-than", "0", "--run", run.id, "--delete")
    assert (nothing.code, nothing.rows) == (0, [[run.id, "0", "0.0", "0", "0", "0.0"]])


def test_what_a_rewind_may_bring_back_stays_and_so_do_the_rows_of_a_run_that_keeps_them(
    cli: Command, coordinator: Coordinator
) -> None:
    rewindable = new_run(coordinator)
    ids = consumed(rewindable, new_worker(rewindable), "kept")
    assert cli("prune", "--older-than", "0", "--run", rewindable.id, "--delete", "--yes").code == 0
    assert tokens_of(rewindable, ids[0])
    keeps_rows = new_run(coordinator, rewind_commits=0)
    ids = consumed(keeps_rows, new_worker(keeps_rows), "rows")
    done = cli("prune", "--older-than", "0", "--run", keeps_rows.id, "--delete", "--yes")
    assert done.rows == [[keeps_rows.id, "2", "0.0", "0", "0", "0.0"]]
    assert "removed: the tokens of 2 rollouts, the rows of 0, the files of 0 versions" in done.err
    assert not tokens_of(keeps_rows, ids[0])
    assert keeps_rows.rollout(ids[0]).state == "consumed"


def test_files_of_versions_go_but_for_those_that_something_needs(
    cli: Command, coordinator: Coordinator, tmp_path: Path
) -> None:
    run = new_run(coordinator)
    worker = new_worker(run)
    for version in (1, 2, 3):
        folder = write_adapter(tmp_path / str(version), f"{run.id} version {version}".encode())
        policy = run.publish(version=version, parent_version=version - 1, folder=folder, base_model=BASE)
        run.open_activation(version, f"to-{version}")
        worker.ack(version, policy.artifact_hash)
    size = sum(file.size for file in run.policy(1).files)
    dry = cli("prune", "--older-than", "0", "--run", run.id, "--json")
    assert (dry.document["deleted"], dry.document["runs"][0]["versions"]) == (False, [1])
    assert dry.document["runs"][0]["file_bytes"] == size
    assert cli("prune", "--older-than", "0", "--run", run.id, "--delete", "--yes").code == 0
    assert [p.version for p in run.policies() if p.files_removed_at is not None] == [1]


def test_all_runs_are_counted_and_an_unknown_one_is_refused(cli: Command, coordinator: Coordinator, sums: Run) -> None:
    counted = cli("prune", "--older-than", "3650", "--json")
    assert [found["run_id"] for found in counted.document["runs"]] == [run.run_id for run in coordinator.runs()]
    unknown = cli("prune", "--older-than", "1", "--run", "nowhere")
    assert (unknown.code, unknown.out) == (1, "")
    assert "coordinator: run_unknown: there is no run nowhere\n  " in unknown.err


@pytest.mark.parametrize("days", ["-1", "soon"])
def test_days_that_are_none_are_a_wrong_use(cli: Command, days: str) -> None:
    done = cli("prune", "--older-than", days)
    assert (done.code, done.out) == (2, "")
