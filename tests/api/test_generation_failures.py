"""Attempts that gave no tokens: each is a rollout of its own at its end, and settles its member at the last attempt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.ledger import Api, Json, Ledger, ok, refused


def failure(rollout_id: str, index: int = 0, group: str = "g", **changes: Any) -> Json:
    return {
        "rollout_id": rollout_id,
        "task_id": "task",
        "task_source": "hand",
        "group_id": group,
        "sample_index": index,
        "worker_id": "w",
        "incarnation": "w-1",
        "kind": "timeout",
        "message": "no token after 600 s",
    } | changes


async def fail(ledger: Ledger, *failures: Json, who: str = "admin") -> list[Json]:
    response = await ledger.call("POST", "/rollouts/failures", {"failures": failures}, who=who)
    verdicts: list[Json] = ok(response)["verdicts"]
    return verdicts


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, **settings)
    await ledger.worker()
    return ledger


async def test_a_failed_attempt_stands_with_its_failure(api: Api) -> None:
    ledger = await ledger_of(api, max_attempts=2)
    [verdict] = await fail(ledger, failure("f"))
    assert (verdict["verdict"], verdict["state"], verdict["revision"]) == ("accepted", "generation_failed", 0)
    view = await ledger.get("/rollouts/f")
    assert (view["state"], view["revision"], view["worker_id"], view["task_id"], view["attempt"]) == (
        "generation_failed", 0, "w", "task", 0,
    )  # fmt: skip
    assert (view["tokens"], view["spans"], view["contract_hash"], view["reward"]) == (0, [], None, None)
    history = (await ledger.get("/rollouts/f/history"))["transitions"]
    assert [(t["event"], t["from_state"], t["to_state"], t["reason"], t["actor"]) for t in history] == [
        ("generation_fail", None, "generation_failed", "timeout", "admin:admin")
    ]
    [recorded] = (await ledger.get("/failures"))["failures"]
    assert [recorded[name] for name in ("stage", "kind", "message", "rollout_id", "worker_id")] == [
        "generation", "timeout", "no token after 600 s", "f", "w",
    ]  # fmt: skip
    assert (await ledger.get("/counts"))["rollouts"]["generation_failed"] == 1
    refused(await ledger.call("GET", "/rollouts/f/evidence"), 404, "rollout_unknown")
    assert ok(await ledger.call("POST", "/rollouts/evidence", {"rollout_ids": ["f"]}))["missing"] == ["f"]


async def test_sent_again_it_is_a_duplicate_however_it_is_worded(api: Api) -> None:
    ledger = await ledger_of(api, max_attempts=2)
    await fail(ledger, failure("f"))
    again = failure("f", kind="aborted", message="the engine went away")
    [verdict] = await fail(ledger, again)
    assert (verdict["verdict"], verdict["state"], verdict["revision"]) == ("duplicate", "generation_failed", 0)
    assert [f["kind"] for f in (await ledger.get("/failures"))["failures"]] == ["timeout"]


@pytest.mark.parametrize(
    "other",
    [
        failure("f", task_id="other"),
        failure("f", 1),
        failure("f", group="h"),
        failure("f", incarnation="w-2"),
        failure("other"),  # the attempt of that member is taken
    ],
)
async def test_other_content_under_a_taken_id_or_attempt_is_a_conflict(api: Api, other: Json) -> None:
    ledger = await ledger_of(api, max_attempts=2)
    await fail(ledger, failure("f"))
    before = await api.rows("SELECT * FROM rollouts")
    [verdict] = await fail(ledger, other)
    assert (verdict["verdict"], verdict["state"]) == ("conflict", None)
    assert await api.rows("SELECT * FROM rollouts") == before
    assert [row.group_id for row in await api.rows("SELECT group_id FROM groups")] == ["g"]
    assert len((await ledger.get("/failures"))["failures"]) == 1


async def test_a_failure_and_a_rollout_are_not_the_same(api: Api) -> None:
    """Neither may take the place of the other, under the same id or under the same attempt."""
    ledger = await ledger_of(api, max_attempts=2)
    await ledger.submit(ledger.rollout("r"))
    await fail(ledger, failure("f", 1))
    assert [v["verdict"] for v in await fail(ledger, failure("r"), failure("r2"))] == ["conflict", "conflict"]
    bodies = (ledger.rollout("f", index=1), ledger.rollout("f2", index=1))
    assert [v["verdict"] for v in await ledger.submit(*bodies)] == ["conflict", "conflict"]
    assert (await ledger.state("r"), await ledger.state("f")) == (
        ("generated", None, 0), ("generation_failed", None, 0),
    )  # fmt: skip


async def test_within_one_batch_the_first_wins(api: Api) -> None:
    ledger = await ledger_of(api, max_attempts=2)
    verdicts = await fail(
        ledger,
        failure("a"),
        failure("a"),
        failure("a", task_id="other"),
        failure("b"),
        failure("c", 1),
        failure("d", 7),
    )
    assert [(v["rollout_id"], v["verdict"], v["reason"]) for v in verdicts] == [
        ("a", "accepted", None), ("a", "duplicate", None), ("a", "conflict", None), ("b", "conflict", None),
        ("c", "accepted", None), ("d", "rejected", "sample_index_out_of_range"),
    ]  # fmt: skip


async def test_a_later_attempt_saves_the_member(api: Api) -> None:
    ledger = await ledger_of(api, max_attempts=2)
    await fail(ledger, failure("f"))
    await ledger.submit(ledger.rollout("a", attempt=1), ledger.rollout("b", index=1))
    await ledger.reward("a")
    ok(await ledger.open())
    assert (await ledger.candidates())["empty"]["reason"] == "groups_incomplete"
    await ledger.reward("b")
    assert await ledger.reserve("a", "b") == ["reserved"] * 2


async def test_the_last_attempt_settles_the_member(api: Api) -> None:
    """Two of three are enough: the group is ready as soon as the third can come no more."""
    ledger = await ledger_of(api, group_size=3, max_attempts=2)
    for n in range(2):
        await ledger.submit(ledger.rollout(f"r{n}", index=n))
        await ledger.reward(f"r{n}")
    ok(await ledger.open())
    await fail(ledger, failure("f0", 2))
    assert (await ledger.candidates())["empty"]["reason"] == "groups_incomplete"
    await fail(ledger, failure("f1", 2, attempt=1))
    assert (await ledger.candidates())["groups"] == ["g"]
    assert await ledger.reserve("r0", "r1") == ["reserved"] * 2


async def test_a_group_that_cannot_have_enough_members_any_more_is_refused(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.submit(ledger.rollout("a"))
    await ledger.reward("a")
    [verdict] = await fail(ledger, failure("f", 1))
    assert (verdict["verdict"], verdict["state"]) == ("accepted", "generation_failed")
    assert await ledger.state("a") == ("offline", "group_refused", 2)
    assert await ledger.state("f") == ("generation_failed", None, 0)


async def test_a_failure_of_a_spent_group_is_still_recorded(api: Api) -> None:
    ledger = await ledger_of(api, group_size=3, group_deadline_seconds=0.1)
    await ledger.submit(ledger.rollout("a"), ledger.rollout("b", index=1))
    await ledger.reward("a")
    await ledger.reward("b")
    ok(await ledger.open())
    await ledger.candidates(groups=1, wait=5)
    await ledger.reserve("a", "b")
    ok(await ledger.commit())
    assert (await fail(ledger, failure("f", 2)))[0]["verdict"] == "accepted"
    assert await ledger.state("f") == ("generation_failed", None, 0)


async def test_nothing_more_can_happen_to_a_failed_generation(api: Api) -> None:
    ledger = await ledger_of(api, max_attempts=2)
    await fail(ledger, failure("f"))
    reward = await ledger.reward("f")
    assert (reward["verdict"], reward["state"], reward["revision"]) == ("rejected", "generation_failed", 0)
    ok(await ledger.open())
    assert await ledger.reserve(("f", 0)) == ["not_rewarded"]
    answer = ok(await ledger.call("POST", "/rollouts/release", {"rollout_ids": ["f"]}))["verdicts"]
    assert [v["verdict"] for v in answer] == ["not_releasable"]
    assert await ledger.state("f") == ("generation_failed", None, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempt": 2}, "attempt_out_of_range"),
        ({"sample_index": 2}, "sample_index_out_of_range"),
        ({"worker_id": "v"}, "wrong_worker"),
    ],
)
async def test_what_does_not_belong_is_rejected_and_counted(api: Api, changes: Json, reason: str) -> None:
    ledger = await ledger_of(api, max_attempts=2)
    await api.token("gpu", "worker", "run", "w")
    bad, good = await fail(ledger, failure("f", **changes), failure("fits"), who="gpu")
    assert (bad["verdict"], bad["reason"], good["verdict"]) == ("rejected", reason, "accepted")
    assert bad["detail"]
    [row] = await api.rows("SELECT worker_id, incarnation, reason, n FROM rejections")
    assert tuple(row) == ("w", "w-1", reason, 1)
    assert [r.rollout_id for r in await api.rows("SELECT rollout_id FROM rollouts")] == ["fits"]


async def test_a_run_without_groups_has_one_attempt_in_each(api: Api) -> None:
    ledger = await ledger_of(api, group_size=None)
    [verdict] = await fail(ledger, failure("f"))
    assert verdict["detail"] == "the run has no group_size: this rollout is a group of its own, not a member of g"
    await ledger.submit(ledger.rollout("r", index=1))
    await ledger.reward("r")
    ok(await ledger.open())
    assert await ledger.reserve("r") == ["reserved"]
    refused(await ledger.call("POST", "/rollouts/failures", {"failures": []}), 422, "invalid_request")
