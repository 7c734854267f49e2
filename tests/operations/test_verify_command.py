"""`coordinator verify` as people run it: a process of its own, beside a coordinator that serves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import asyncpg

from coordinator.client import Coordinator
from coordinator.storage.postgres import EmbeddedPostgres
from tests.api.ledger import Ledger
from tests.client.runs import new_run, new_worker, rewarded_groups
from tests.client.server_process import ServerProcess
from tests.operations.ledgers import execute, rewound

COMMAND = [sys.executable, "-m", "coordinator.cli", "verify"]
NEVER_ACKED = "UPDATE journal SET event = 'x' WHERE event = 'worker.acked' AND detail ->> 'version' = '0'"


def environment(database_url: str | None) -> dict[str, str]:
    names = {name for name in os.environ if name.startswith("COORDINATOR_")} | {"DATABASE_URL"}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | ({} if database_url is None else {"DATABASE_URL": database_url})


def verify(database_url: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=environment(database_url), capture_output=True, text=True, timeout=300
    )


def test_it_proves_an_embedded_database_that_is_being_served(server: ServerProcess) -> None:
    with Coordinator(server.url, server.token) as coordinator:
        run = new_run(coordinator, "served")
        rewarded_groups(run, new_worker(run), 3)
        done = verify(None, "--data", str(server.data))
        assert (done.returncode, done.stdout.splitlines()) == (
            0,
            [
                "run served statement 1 holds; rollouts 6, tombstones 0, revisions 12",
                "run served statement 2 holds; reserves 0, consumptions 0, releases 0",
                "run served statement 3 holds; commits 0, rewinds 0, on the line 0",
                "run served statement 4 holds; rollouts 6, tombstones 0",
                "run served statement 5 holds; reserves 0, updates 0",
                f"run served statement 6 holds; switches 0, journal entries {run.view().event_no}",
                "run served statement 7 holds; rollouts 6, spans 6",
                "runs 1, breaches 0",
            ],
        ), done.stderr
        assert len(rewarded_groups(run, run.worker("w1", "w1-1"), 1, "after")) == 2  # the server has its database still

        async def lose() -> None:
            connection = await asyncpg.connect(url.replace("+asyncpg", ""))
            try:
                await connection.execute("DELETE FROM rollouts WHERE rollout_id = 'g1:0.0'")
            finally:
                await connection.close()

        url = EmbeddedPostgres(server.data / "postgres").start()  # attaches: the server owns it
        asyncio.run(lose())
        done = verify(None, "--data", str(server.data))
        assert done.returncode == 1, done.stderr
        assert (
            "run served statement 4 BREACH g1:0.0: is gone: no row and no tombstone, but audit, evidence, rewards"
            in done.stdout.splitlines()
        )


async def test_breaches_are_told_one_a_line_and_end_with_1(ledger: Ledger, database_url: str) -> None:
    await rewound(ledger, "release")
    other = await Ledger.create(ledger.api, "other")
    await other.worker()
    await execute(
        ledger,
        NEVER_ACKED + " AND run_no = 1",
        "UPDATE rollout_audit SET lag = -1 WHERE rollout_id = 'a:0' AND event = 'reserve'",
    )
    done = await asyncio.to_thread(verify, database_url)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    ours = ledger.hashes[0]
    assert [line for line in lines if "BREACH" in line] == [
        "run run statement 5 BREACH a:0: revision 2 by u1: lag -1",
        "run run statement 5 BREACH a:0: revision 2 by u1: lag -1, but by the clocks of the versions 0",
        f"run run statement 7 BREACH a:0: w-1 had not acked version 0 as {ours} before",
        f"run run statement 7 BREACH a:1: w-1 had not acked version 0 as {ours} before",
    ]
    assert "run run statement 2 holds; reserves 6, consumptions 6, releases 2" in lines
    assert "run run statement 3 holds; commits 3, rewinds 1, on the line 2" in lines
    assert "run run statement 5 BROKEN, breaches 2; reserves 6, updates 3" in lines
    assert "run other statement 7 holds; rollouts 0, spans 0" in lines
    assert lines[-1] == "runs 2, breaches 4"
    done = await asyncio.to_thread(verify, database_url, "--run", "other")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "runs 1, breaches 0"), done.stderr


async def test_what_cannot_be_verified_ends_with_2(ledger: Ledger, database_url: str, tmp_path: Path) -> None:
    cases = {
        "there is no run gone": (database_url, "--run", "gone"),
        "there is no database in": (None, "--data", str(tmp_path / "nothing")),
        "cannot verify": ("postgresql://nobody:x@127.0.0.1:1/none",),
        "does not exist": (database_url.rpartition("/")[0] + "/none",),
        "No such option": (database_url, "--runs", "x"),
        "run 'coordinator migrate'": (database_url.rpartition("/")[0] + "/postgres",),
    }
    for said, (url, *arguments) in cases.items():
        done = await asyncio.to_thread(verify, url, *arguments)
        assert (done.returncode, done.stdout) == (2, ""), f"{said}: {done.stderr}"
        assert said in done.stderr
        assert "Traceback" not in done.stderr


async def test_it_sees_one_moment_and_says_what_it_is_doing(ledger: Ledger, database_url: str) -> None:
    await rewound(ledger, "release")
    blocker = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    process = None
    try:
        hold = blocker.transaction()
        await hold.start()
        await blocker.execute("LOCK update_members IN ACCESS EXCLUSIVE MODE")
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            env=environment(database_url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        said = b""
        while b"run run: statement 2, after" not in said:
            said = await process.stderr.readline()
            assert said, "it ended without a word"
        await execute(ledger, NEVER_ACKED)
        await hold.rollback()
        told, _ = await process.communicate()
        assert process.returncode == 0, told.decode()
    finally:
        await blocker.close()
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
    done = await asyncio.to_thread(verify, database_url)
    assert done.returncode == 1
    assert "run run statement 7 BROKEN" in done.stdout


COPIES = 20_000
PEAK = """
import resource, runpy, sys
sys.argv = ["coordinator", "verify"]
try:
    runpy.run_module("coordinator.cli", run_name="__main__")
finally:
    unit = 2**20 if sys.platform == "darwin" else 2**10
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, file=sys.stderr)
"""
# A process inherits the peak of the one that made it, and pytest is bigger than the command: something small between.
SMALL = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"


def peak_megabytes(database_url: str, returncode: int) -> tuple[float, str]:
    """The most memory that the command ever had, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", SMALL, sys.executable, "-c", PEAK],
        env=environment(database_url),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == returncode, done.stderr
    return float(done.stderr.split()[-1]), done.stdout


async def test_a_big_ledger_takes_no_more_memory_than_a_small_one(ledger: Ledger, database_url: str) -> None:
    size = 2_000
    members = [
        ledger.rollout(
            f"a:{index}",
            "a",
            index,
            token_ids=[7] * size,
            action_mask=[False] + [True] * (size - 1),
            behavior_log_probs=[None] + [-0.5] * (size - 1),
            spans=[{"version": 0, "artifact_hash": ledger.hashes[0], "start": 0, "end": size}],
        )
        for index in range(2)
    ]
    await ledger.submit(*members)
    for member in members:
        await ledger.reward(member["rollout_id"])
    await ledger.open()
    current = [None] + [-0.5] * (size - 1)
    body = {
        "owner": "t-1",
        "after_commit_no": 0,
        "rollouts": [
            {"rollout_id": member["rollout_id"], "revision": 1, "current_log_probs": current} for member in members
        ],
    }
    answer = (await ledger.call("POST", "/updates/u/reserve", body)).json()
    assert [verdict["verdict"] for verdict in answer["verdicts"]] == ["reserved"] * 2
    assert (await ledger.commit()).json()["commit_no"] == 1
    small, _ = await asyncio.to_thread(peak_megabytes, database_url, 0)

    named = "jsonb_build_object('rollout_id', 'copy:' || n)"
    grouped = f"{named} || jsonb_build_object('group_id', 'copy:' || n)"
    copied = {"rollouts": grouped, "rollout_evidence": named, "rollout_audit": named, "update_members": grouped}
    await execute(
        ledger,
        *(
            f"INSERT INTO {table} SELECT copy.* FROM {table} t CROSS JOIN generate_series(1, {COPIES}) n"
            f" CROSS JOIN LATERAL jsonb_populate_record(t, {changes}) copy WHERE t.rollout_id = 'a:0'"
            for table, changes in copied.items()
        ),
        "INSERT INTO rewards (run_no, rollout_id, value, ruleset_no, actor)"
        f" SELECT run_no, 'copy:' || n, value, ruleset_no, actor FROM rewards, generate_series(1, {COPIES}) n"
        " WHERE rollout_id = 'a:0'",
    )
    big, told = await asyncio.to_thread(peak_megabytes, database_url, 0)
    assert f"rollouts {COPIES + 2}, tombstones 0, revisions {4 * (COPIES + 2)}" in told
    assert f"rollouts {COPIES + 2}, spans {COPIES + 2}" in told

    await execute(ledger, "UPDATE rollout_audit SET lag = -1 WHERE event = 'reserve'")
    broken, told = await asyncio.to_thread(peak_megabytes, database_url, 1)
    assert told.count("BREACH") == 2 * (COPIES + 2)
    # The evidence alone would be 300 MB.
    assert max(big, broken) - small < 50
