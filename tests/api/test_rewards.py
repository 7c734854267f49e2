"""Rewards, and what they do to groups."""

from __future__ import annotations

import pytest

from tests.api.ledger import Json, Ledger, ok


@pytest.mark.parametrize("status", ["timeout", "error"])
async def test_a_failed_reward_is_recorded_and_never_a_value(ledger: Ledger, status: str) -> None:
    ledger = await Ledger.create(ledger.api, "four", group_size=4)
    await ledger.worker()
    await ledger.submit(ledger.rollout("r"))
    verdict = await ledger.reward("r", None, status=status, message="the sandbox hung")
    assert (verdict["verdict"], verdict["state"], verdict["revision"]) == ("recorded_failure", "reward_failed", 1)
    view = await ledger.get("/rollouts/r")
    assert (view["reward"], view["reward_status"]) == (None, status)
    await ledger.reward("r", None, status=status)
    failures = (await ledger.get("/failures"))["failures"]
    assert [(f["stage"], f["kind"], f["rollout_id"]) for f in failures] == [("reward", status, "r")] * 2
    assert failures[0]["message"] == "the sandbox hung"
    assert await ledger.state("r") == ("reward_failed", None, 1)
    change = (await ledger.get("/rollouts/r/history"))["transitions"][-1]
    assert (change["event"], change["reason"]) == ("reward_fail", f"reward_{status}")


async def test_a_late_good_reward_counts(ledger: Ledger) -> None:
    four = await Ledger.create(ledger.api, "four", group_size=4)
    await four.worker()
    await four.submit(four.rollout("r"))
    await four.reward("r", None, status="timeout")
    assert (await four.reward("r", 2.0))["state"] == "rewarded"
    assert await four.state("r") == ("rewarded", None, 2)


async def test_a_second_reward_is_a_duplicate_or_a_conflict(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("r"))
    parts = {"a": 0.25, "b": 0.5}
    first = await ledger.reward("r", None, components=parts)
    assert (first["verdict"], (await ledger.get("/rollouts/r"))["reward"]) == ("stored", 0.75)
    assert (await ledger.reward("r", None, components=parts))["verdict"] == "duplicate"
    for value, more in ((0.5, {}), (0.75, {}), (0.75, {"components": {"a": 0.75}})):
        assert (await ledger.reward("r", value, **more))["verdict"] == "conflict"
    assert (await ledger.reward("r", None, components=parts, ruleset_id="other"))["verdict"] == "conflict"
    assert (await ledger.reward("r", None, status="error"))["verdict"] == "recorded_failure"
    assert await ledger.state("r") == ("rewarded", None, 1)
    assert (await ledger.get("/rollouts/r"))["reward"] == 0.75


@pytest.mark.parametrize(
    "reward", [{"value": None}, {"value": 0.0, "status": "timeout"}, {"value": None, "components": {}}]
)
async def test_a_reward_without_sense_is_rejected(ledger: Ledger, reward: Json) -> None:
    await ledger.submit(ledger.rollout("r"))
    assert (await ledger.reward("r", **reward))["verdict"] == "rejected"
    assert await ledger.state("r") == ("generated", None, 0)


async def test_a_group_s_first_good_reward_pins_its_ruleset(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("a"), ledger.rollout("b", index=1), ledger.rollout("c", "h"))
    await ledger.reward("a")
    assert (await ledger.reward("b", ruleset_id="other"))["verdict"] == "ruleset_conflict"
    assert (await ledger.reward("c", ruleset_id="other"))["verdict"] == "stored"
    assert await ledger.state("b") == ("generated", None, 0)


async def test_within_one_batch_the_first_ruleset_of_a_group_pins_it(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("a"), ledger.rollout("b", index=1))
    h = ledger.view["contract"]["tokenizer_hash"]
    items = [
        {"rollout_id": r, "status": "ok", "value": 1.0, "ruleset_id": rules, "ruleset_hash": h}
        for r, rules in (("b", "second"), ("a", "first"), ("b", "second"), ("x", "second"))
    ]
    verdicts = ok(await ledger.call("POST", "/rewards", {"rewards": items}))["verdicts"]
    assert [v["verdict"] for v in verdicts] == ["stored", "ruleset_conflict", "duplicate", "missing_rollout"]


async def test_a_reward_for_a_quarantined_rollout_is_stored_and_moves_nothing(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("r", version=9))
    verdict = await ledger.reward("r", 3.0)
    assert (verdict["verdict"], verdict["state"], verdict["revision"]) == ("stored", "quarantined", 1)
    assert (await ledger.get("/rollouts/r"))["reward"] == 3.0


async def test_a_group_waits_until_every_member_is_settled(ledger: Ledger) -> None:
    three = await Ledger.create(ledger.api, "three", group_size=3)
    await three.worker()
    ok(await three.open())
    await three.submit(*(three.rollout(r, index=i) for i, r in enumerate("abc")))
    for r in "ab":
        assert (await three.candidates())["groups"] == []
        await three.reward(r)
    assert (await three.candidates())["empty"]["reason"] == "groups_incomplete"
    await three.reward("c", None, status="timeout")
    assert (await three.candidates())["groups"] == ["g"]
    assert await three.reserve("a", "b") == ["reserved"] * 2


async def test_a_group_is_ready_at_its_deadline(ledger: Ledger) -> None:
    hasty = await Ledger.create(ledger.api, "hasty", group_size=3, group_deadline_seconds=0.3)
    await hasty.worker()
    ok(await hasty.open())
    await hasty.submit(*(hasty.rollout(r, index=i) for i, r in enumerate("ab")))
    await hasty.reward("a")
    await hasty.reward("b")
    assert (await hasty.candidates(groups=1, wait=5))["groups"] == ["g"]


async def test_a_group_that_cannot_reach_enough_members_is_refused(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("a"), ledger.rollout("b", index=1))
    await ledger.reward("a")
    verdict = await ledger.reward("b", None, status="error")
    assert (verdict["state"], verdict["revision"]) == ("offline", 2)
    assert await ledger.state("a") == ("offline", "group_refused", 2)
    assert await ledger.state("b") == ("offline", "group_refused", 2)


async def test_an_arrival_tells_that_its_group_fell_with_it(ledger: Ledger) -> None:
    good, bad = await ledger.submit(ledger.rollout("a"), ledger.rollout("b", index=1, version=9))
    assert (good["verdict"], good["state"], good["reason"], good["revision"]) == (
        "accepted", "offline", "group_refused", 1,
    )  # fmt: skip
    assert (bad["state"], bad["reason"]) == ("quarantined", "policy_unknown")


async def test_another_attempt_saves_the_member(ledger: Ledger) -> None:
    twice = await Ledger.create(ledger.api, "twice", max_attempts=2)
    await twice.worker()
    await twice.submit(twice.rollout("a"), twice.rollout("b", index=1))
    await twice.reward("a")
    await twice.reward("b", None, status="error")
    assert (await twice.state("a"))[0] == "rewarded"
    await twice.submit(twice.rollout("b2", index=1, attempt=1))
    await twice.reward("b2")
    ok(await twice.open())
    assert await twice.reserve("a", "b2") == ["reserved"] * 2
    ok(await twice.commit())
    assert await twice.state("b") == ("offline", "group_spent", 2)


@pytest.mark.parametrize("last", ["reward_failed", "quarantined"])
async def test_a_member_is_settled_by_its_last_attempt_whatever_became_of_the_earlier_ones(
    ledger: Ledger, last: str
) -> None:
    run = await Ledger.create(ledger.api, "twice", group_size=3, max_attempts=2)
    await run.worker()
    ok(await run.open())
    await run.submit(*(run.rollout(r, index=i) for i, r in enumerate("abc")))
    await run.reward("a")
    await run.reward("b")
    await run.reward("c", None, status="timeout")
    assert (await run.candidates())["empty"]["reason"] == "groups_incomplete"
    await run.submit(run.rollout("c2", index=2, attempt=1, version=9 if last == "quarantined" else 0))
    if last == "reward_failed":
        assert (await run.candidates())["empty"]["reason"] == "groups_incomplete"
        await run.reward("c2", None, status="error")
    assert (await run.state("c2"))[0] == last
    assert (await run.candidates())["groups"] == ["g"]


async def test_latecomers_of_a_spent_group_go_offline(ledger: Ledger) -> None:
    four = await Ledger.create(ledger.api, "four", group_size=4, group_deadline_seconds=0.2)
    await four.worker()
    await four.submit(four.rollout("a"), four.rollout("b", index=1), four.rollout("c", index=2))
    await four.reward("a")
    await four.reward("b")
    ok(await four.open())
    assert len((await four.candidates(groups=1, wait=5))["rollouts"]) == 2
    assert await four.reserve("a", "b") == ["reserved"] * 2
    ok(await four.commit())
    assert await four.state("c") == ("offline", "group_spent", 1)
    await four.submit(four.rollout("d", index=3))
    assert await four.state("d") == ("offline", "group_spent", 1)


async def test_a_repeated_or_conflicting_arrival_is_told_as_such_when_its_group_falls(ledger: Ledger) -> None:
    """The row that was there falls with its group in this very call; the item is no new arrival for that."""
    for verdict, changes in (("duplicate", {}), ("conflict", {"task_id": "other"})):
        first = ledger.rollout(f"{verdict}-a", verdict)
        await ledger.submit(first)
        bad = ledger.rollout(f"{verdict}-b", verdict, index=1, version=9)
        answer, _ = await ledger.submit(first | changes, bad)
        assert answer["verdict"] == verdict
        assert await ledger.state(f"{verdict}-a") == ("offline", "group_refused", 1)
        if verdict == "duplicate":
            assert (answer["state"], answer["reason"], answer["revision"]) == ("offline", "group_refused", 1)
