"""The timeline of an activation: every step of the version and of each worker, in order, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from sqlalchemy import text

from coordinator.watching import queries
from coordinator.wire.timelines import ActivationTimeline
from tests.api.ledger import Json, Ledger, ok, refused


async def timeline(ledger: Ledger, activation_id: str) -> Json:
    """As the endpoint gives it; seconds and times must be those of the journal."""
    found = await ledger.get(f"/activations/{activation_id}/timeline")
    entries = {entry["event_no"]: entry for entry in (await ledger.get("/journal?limit=1000"))["entries"]}
    groups = [found["steps"], *(worker["steps"] for worker in found["workers"])]
    for steps in groups:
        assert [step["event_no"] for step in steps] == sorted({step["event_no"] for step in steps})
        assert all(entries[step["event_no"]]["at"] == step["at"] for step in steps)
    every = sorted(itertools.chain(*groups), key=lambda step: step["event_no"])
    assert [step["seconds"] for step in every] == sorted(step["seconds"] for step in every)
    return found


def told(steps: list[Json]) -> list[tuple[str, str | None]]:
    return [(step["step"], step["detail"]) for step in steps]


async def stage(ledger: Ledger, worker_id: str, version: int, *names: str) -> None:
    for name in names:
        body = {"incarnation": f"{worker_id}-1", "version": version, "stage": name}
        ok(await ledger.call("POST", f"/workers/{worker_id}/stage", body))


async def test_from_the_preparation_to_the_switch(ledger: Ledger) -> None:
    await ledger.worker("v")
    await ledger.worker("x")
    await ledger.publish(1, 0)
    ok(await ledger.open("1"))  # an update may have the name of a version
    await stage(ledger, "w", 1, "downloading")  # before the opening: of no activation
    ok(await ledger.activation(1, "to-1"))
    await stage(ledger, "w", 1, "downloading", "verifying")
    await stage(ledger, "v", 1, "downloading")
    await stage(ledger, "w", 0, "loading")  # of another version
    await stage(ledger, "w", 1, "loading")
    ok(await ledger.call("POST", "/workers/x/drain", {"incarnation": "x-1"}))
    await ledger.ack("w", 1)
    await ledger.ack("v", 1, "f" * 64)
    await ledger.ack("v", 1)
    await stage(ledger, "w", 1, "loading")  # after the end
    await ledger.worker("late", ack=False)
    await ledger.ack("late", 1)
    found = await timeline(ledger, "to-1")
    assert (found["state"], found["version"], found["artifact_hash"]) == ("succeeded", 1, ledger.hashes[1])
    assert [step for step, _ in told(found["steps"])] == ["prepared", "committed", "opened", "activated"]
    prepared, committed, opened, activated = (step["seconds"] for step in found["steps"])
    assert prepared < committed < opened == 0 < activated
    workers = {worker["worker_id"]: told(worker["steps"]) for worker in found["workers"]}
    assert list(workers) == ["v", "w", "x"]
    assert workers["w"] == [("downloading", None), ("verifying", None), ("loading", None), ("acked", None)]
    assert workers["x"] == [("dropped", "draining")]
    (downloading, mismatched, fenced, acked) = workers["v"]
    assert (downloading[0], mismatched[0], acked) == ("downloading", "mismatched", ("acked", None))
    assert mismatched[1] is not None and "serves " + "f" * 64 in mismatched[1]
    assert fenced == ("fenced", "worker_mismatch")


async def test_one_that_fails_and_the_attempt_after_it(ledger: Ledger) -> None:
    await ledger.publish(1, 0)
    ok(await ledger.activation(1, "first"))
    body = {"incarnation": "w-1", "version": 1, "stage": "verify", "message": "w.bin is torn"}
    ok(await ledger.call("POST", "/workers/w/failures", body))
    ok(await ledger.call("POST", "/workers/w/deregister", {"incarnation": "w-1"}))
    await ledger.worker("w", "w-2", ack=False)
    second = ok(await ledger.activation(1, "second"))
    assert second["state"] == "open"
    await ledger.worker("w", "w-3", ack=False)
    first = await timeline(ledger, "first")
    assert (first["state"], first["steps"][-1]["step"]) == ("failed", "failed")
    assert first["steps"][-1]["detail"] == first["reason"]
    (worker,) = first["workers"]
    assert told(worker["steps"]) == [
        ("failed", "verify: w.bin is torn"),
        ("fenced", "verify of version 1 failed"),
        ("dropped", "deregistered"),
    ]
    found = await timeline(ledger, "second")
    assert [step for step, _ in told(found["steps"])] == ["prepared", "committed", "opened"]
    assert [(w["worker_id"], told(w["steps"])) for w in found["workers"]] == [("w", [("registered", None)])]


async def test_one_that_waits_and_is_given_up(ledger: Ledger) -> None:
    await ledger.publish(1, 0)
    await ledger.publish(2, 0)
    ok(await ledger.activation(1, "first"))
    assert ok(await ledger.activation(2, "second"))["state"] == "waiting"
    found = await timeline(ledger, "second")
    assert (told(found["steps"])[-1], found["workers"]) == (("waiting", None), [])
    ok(await ledger.call("POST", "/activations/first/give-up", {"reason": "a bad batch"}))
    found = await timeline(ledger, "second")
    assert [step for step, _ in told(found["steps"])] == ["prepared", "committed", "waiting", "opened"]
    assert (found["steps"][-1]["seconds"], [w["worker_id"] for w in found["workers"]]) == (0, ["w"])
    first = await timeline(ledger, "first")
    assert told(first["steps"])[-1] == ("given_up", "a bad batch")


async def test_what_is_not_there_is_refused(ledger: Ledger) -> None:
    refused(await ledger.call("GET", "/activations/none/timeline"), 404, "activation_unknown")
    refused(await ledger.api.call("GET", "/runs/none/activations/a/timeline"), 404, "run_unknown")


async def test_it_can_be_printed(ledger: Ledger) -> None:
    await ledger.worker("gpu-12")
    await ledger.publish(1, 0)
    ok(await ledger.activation(1, "to-1"))
    await stage(ledger, "w", 1, "downloading")
    ok(await ledger.call("POST", "/activations/to-1/give-up", {"reason": "a bad batch"}))
    found = ActivationTimeline.model_validate(await ledger.get("/activations/to-1/timeline"))
    head, *lines = str(found).splitlines()
    assert head == "activation to-1 of version 1: given_up, a bad batch"
    assert [line.split(" s ", 1)[-1].split() for line in lines] == [
        ["prepared"],
        ["committed"],
        ["opened"],
        ["w", "downloading"],
        ["given_up:", "a", "bad", "batch"],
        ["gpu-12", "nothing", "yet"],
    ]
    assert len({line.index(word) for line, word in zip(lines[:4], ("prep", "comm", "open", "down"), strict=True)}) == 1


async def lengthen(ledger: Ledger, name: str) -> None:
    """Adds 3000 entries about something else."""
    async with ledger.api.database.engine.begin() as connection:
        await connection.execute(
            text(
                """
                WITH run AS (UPDATE runs SET event_no = event_no + 3000 RETURNING run_no, event_no - 3000 AS begin)
                INSERT INTO journal (run_no, event_no, event, subject, actor, detail, at)
                SELECT run_no, begin + n, 'update.renewed', CAST(:name AS text) || n % 100, 'test', '{}',
                       clock_timestamp()
                FROM run, generate_series(1, 3000) AS n
                """
            ),
            {"name": name},
        )


@pytest.mark.parametrize(
    ("statement", "values"),
    [
        (queries.ACTIVATION_STEPS, {"activation_id": "act-2", "version": "2"}),
        (queries.WORKER_STEPS, {"worker_ids": ["w"], "after": 0, "before": 2**40, "version": 2}),
    ],
)
async def test_a_long_journal_is_not_read_for_it(ledger: Ledger, statement: Any, values: Json) -> None:
    await ledger.activate(1, 0)
    await lengthen(ledger, "before")
    await ledger.activate(2, 1)
    await lengthen(ledger, "after")
    async with ledger.api.database.engine.connect() as connection:
        explained = text(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.text}")
        (plan,) = await connection.scalars(explained, {"run_no": 1} | values)
    seen = visits(plan[0]["Plan"])
    assert seen
    assert max(seen) < 100, plan


def visits(node: Json) -> list[int]:
    """How many rows of the journal each part of a plan looked at."""
    here = [node["Actual Rows"] + node.get("Rows Removed by Filter", 0)] if "Relation Name" in node else []
    return here + [rows for child in node.get("Plans", ()) for rows in visits(child)]
