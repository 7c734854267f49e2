"""The line goes back while others commit, reserve, submit and release."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from pathlib import Path

from coordinator.client import Coordinator, Refused, Run, UpdateFenced, Worker
from coordinator.wire.policies import PolicyRef
from coordinator.wire.rewinds import RewindView
from tests.client.runs import BASE, group, new_worker, reward, rewarded_groups
from tests.concurrency.together import at_once, codes, everywhere, log_probs
from tests.ledger_checker import check_ledger


def commit_groups(run: Run, update_id: str, groups: int = 1) -> int:
    """Commits an update over the next groups that are offered; its commit number."""
    with run.update(update_id) as update:
        found = update.candidates(groups)
        assert len(found.groups) == groups
        update.reserve(found, log_probs(found))
        number = update.commit().commit_no
    assert number is not None
    return number


def publish(run: Run, worker: Worker, folder: Path, version: int, *updates: str) -> PolicyRef:
    """Makes and activates a version that these updates led to."""
    files = folder / str(version)
    files.mkdir()
    (files / "adapter.bin").write_bytes(b"%d" % version)
    parent = run.view().active.version
    policy = run.publish(version=version, parent_version=parent, folder=files, base_model=BASE, updates=updates)
    run.open_activation(version, f"a{version}")
    assert worker.ack(version, policy.artifact_hash).matching
    assert run.view().active.version == version
    return PolicyRef(version=version, artifact_hash=policy.artifact_hash)


def restore(run: Run, worker: Worker, rewound: RewindView) -> int:
    """Activates the version that a rewind prepared; its number."""
    assert rewound.restoring is not None
    version = rewound.restoring.version
    run._connection.send("POST", ("runs", run.id, "policies", str(version), "commit"))
    run.open_activation(version, f"a{version}")
    assert worker.ack(version, rewound.restoring.artifact_hash).matching
    assert run.view().active.version == version
    return version


def test_a_commit_that_meets_a_rewind_is_undone_or_refused(
    coordinators: list[Coordinator], replicated_url: str
) -> None:
    runs = everywhere(coordinators)
    rewarded_groups(runs[0], new_worker(runs[0]), 2)
    kept = commit_groups(runs[0], "kept")
    ends: Counter[str] = Counter()
    for number in range(16):
        with contextlib.suppress(UpdateFenced), runs[number % 2].update(f"u{number}") as update:
            found = update.candidates(1)
            update.reserve(found, log_probs(found))
            committed, rewound = at_once(
                update.commit, partial(runs[(number + 1) % 2].rewind, kept, "back", rewind_id=f"r{number}")
            )
        assert not isinstance(rewound, Refused)
        state = runs[0].update_view(f"u{number}").state
        ends[state] += 1
        if isinstance(committed, Refused):
            assert (committed.code, state) == ("update_fenced", "fenced")
            assert (rewound.fenced_updates, rewound.rewound_updates) == ([f"u{number}"], [])
        else:
            assert state == "rewound"
            assert (rewound.fenced_updates, rewound.rewound_updates) == ([], [f"u{number}"])
        assert runs[0].view().last_commit_no == kept
        assert {runs[0].rollout(t.rollout_id).state for t in found} == {"rewarded"}
    assert ends.keys() <= {"fenced", "rewound"}
    assert check_ledger(replicated_url) == []


def test_a_reserve_that_meets_a_rewind_holds_nothing_afterwards(
    coordinators: list[Coordinator], replicated_url: str
) -> None:
    runs = everywhere(coordinators)
    rewarded_groups(runs[0], new_worker(runs[0]), 2)
    for number in range(16):
        with contextlib.suppress(UpdateFenced), runs[0].update(f"u{number}") as update:
            found = update.candidates(2)
            assert len(found) == 4
            reserved, rewound = at_once(
                partial(update.reserve, found, log_probs(found)),
                partial(runs[1].rewind, 0, "back", rewind_id=f"r{number}"),
            )
            assert not isinstance(reserved, Refused)
            assert not isinstance(rewound, Refused)
            assert {v.verdict for v in reserved.verdicts} in ({"reserved"}, {"update_fenced"})
            assert rewound.fenced_updates == [update.id]
            update.commit()
        moved = 2 if reserved.admitted else 0
        for trajectory in found:
            row = runs[0].rollout(trajectory.rollout_id)
            assert (row.state, row.revision) == ("rewarded", trajectory.revision + moved)
    assert check_ledger(replicated_url) == []


def test_what_arrives_while_its_version_is_withdrawn_is_quarantined(
    coordinators: list[Coordinator], replicated_url: str, tmp_path: Path
) -> None:
    """Whichever comes first: nothing that was made with undone weights is left to be trained on."""
    runs = everywhere(coordinators)
    worker = new_worker(runs[0])
    version = 0
    for number in range(8):
        rewarded_groups(runs[0], worker, 1, prefix=f"{number}:")
        before = runs[0].view().last_commit_no
        commit_groups(runs[0], f"u{number}")
        version += 1
        policy = publish(runs[0], worker, tmp_path, version, f"u{number}")
        batches = [[r for n in range(8) for r in group(worker, policy, f"{number}.{b}.{n}")] for b in range(4)]
        early = [r for n in range(8) for r in group(worker, policy, f"{number}.early.{n}")]
        runs[0].submit(early)
        outcomes = at_once(
            partial(runs[0].rewind, before, "back", rewind_id=f"r{number}"),
            partial(reward, runs[1], early),
            *(partial(runs[n % 2].submit, batch) for n, batch in enumerate(batches)),
        )
        assert codes(outcomes) == {"ok": len(outcomes)}
        rewound = outcomes[0]
        assert rewound.withdrawn_versions == [version]
        assert rewound.restoring is not None
        late = list(runs[0].rollouts(version=version))
        assert len(late) == sum(map(len, batches)) + len(early)
        assert Counter((row.state, row.reason) for row in late) == {("quarantined", "policy_withdrawn"): len(late)}
        version = restore(runs[0], worker, rewound)
        commit_groups(runs[0], f"again{number}")
    assert check_ledger(replicated_url) == []


def test_a_release_that_meets_a_rewind_frees_nothing_of_a_withdrawn_version(
    coordinators: list[Coordinator], replicated_url: str, tmp_path: Path
) -> None:
    """A worker confirms late what it had generated with; an operator releases it while the version is undone."""
    runs = everywhere(coordinators)
    worker = new_worker(runs[0])
    version = 0
    for number in range(8):
        rewarded_groups(runs[0], worker, 1, prefix=f"{number}:")
        before = runs[0].view().last_commit_no
        commit_groups(runs[0], f"u{number}")
        version += 1
        policy = publish(runs[0], worker, tmp_path, version, f"u{number}")
        hasty = runs[1].worker("hasty", f"hasty-{number}")
        hasty.register("hand", "1")
        held = [r for n in range(16) for r in group(hasty, policy, f"{number}.held.{n}")]
        assert {verdict.reason for verdict in runs[1].submit(held).verdicts} == {"worker_not_acked"}
        assert hasty.ack(version, policy.artifact_hash).matching
        hasty.deregister()
        names = [r.rollout_id for r in held]
        releases = [partial(runs[n % 2].release, names[n::4]) for n in range(4)]
        outcomes = at_once(partial(runs[0].rewind, before, "back", rewind_id=f"r{number}"), *releases)
        assert codes(outcomes) == {"ok": len(outcomes)}
        states = {row.state for row in runs[0].rollouts(version=version)}
        assert states <= {"quarantined", "offline"}
        version = restore(runs[0], worker, outcomes[0])
        commit_groups(runs[0], f"again{number}")
    assert check_ledger(replicated_url) == []


def test_of_two_rewinds_at_once_the_line_keeps_what_both_keep(
    coordinators: list[Coordinator], replicated_url: str
) -> None:
    runs = everywhere(coordinators)
    rewarded_groups(runs[0], new_worker(runs[0]), 4)
    kept = commit_groups(runs[0], "kept")
    for number in range(10):
        middle = commit_groups(runs[0], f"middle{number}")
        commit_groups(runs[1], f"last{number}")
        near, far, again = at_once(
            partial(runs[0].rewind, middle, "back", rewind_id=f"near{number}"),
            partial(runs[1].rewind, kept, "back", rewind_id=f"far{number}"),
            partial(runs[0].rewind, kept, "back", rewind_id=f"far{number}"),
        )
        assert not isinstance(far, Refused)
        assert again == far
        undone = set(far.rewound_updates)
        if isinstance(near, Refused):
            assert (near.code, undone) == ("commit_rewound", {f"middle{number}", f"last{number}"})
        else:
            assert (near.rewound_updates, undone) == ([f"last{number}"], {f"middle{number}"})
        assert runs[0].view().last_commit_no == kept
        assert Counter(row.state for row in runs[0].rollouts()) == {"consumed": 2, "rewarded": 6}
    assert check_ledger(replicated_url) == []


def test_one_rewind_id_with_two_targets_is_one_rewind(coordinators: list[Coordinator], replicated_url: str) -> None:
    runs = everywhere(coordinators)
    rewarded_groups(runs[0], new_worker(runs[0]), 2)
    for number in range(8):
        first, last = (commit_groups(runs[0], f"{name}{number}") for name in ("first", "last"))
        outcomes = at_once(
            *(partial(runs[n].rewind, to, "back", rewind_id=f"r{number}") for n, to in enumerate((first, 0)))
        )
        assert codes(outcomes) == {"ok": 1, "rewind_conflict": 1}
        assert runs[0].view().last_commit_no in (first, 0)
        assert last not in {update.commit_no for update in runs[0].updates() if update.state == "committed"}
        runs[0].rewind(0, "for the next round")
    assert check_ledger(replicated_url) == []
