"""A label proves nothing: what an engine holds in memory is told by a digest, and a wrong one is a mismatch."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from tests.api.ledger import Api, Json, Ledger, ok


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest(registered: str, active: str | None = None, layout: str = "vllm/float32") -> Json:
    return {
        "layout": layout,
        "registered": sha256(registered),
        "active": None if active is None else sha256(active),
    }


async def published(ledger: Ledger, version: int, parent: int, **more: object) -> None:
    ok(await ledger.prepare(version, parent, b"%d" % version, **more))
    ok(await ledger.upload(version, b"%d" % version))
    ok(await ledger.call("POST", f"/policies/{version}/commit"))


@pytest.fixture
async def two(ledger: Ledger) -> Ledger:
    """Two workers, and version 1 with an open activation."""
    await ledger.worker("v")
    await published(ledger, 1, 0, digests={"vllm/float32": sha256("one")})
    ok(await ledger.activation(1))
    return ledger


async def test_the_learner_says_what_an_engine_must_hold(two: Ledger) -> None:
    kept_the_old = await two.ack("w", 1, digest=digest("base"))
    assert (kept_the_old["matching"], kept_the_old["reason"]) == (False, "worker_mismatch")
    assert sha256("one") in kept_the_old["detail"]
    assert kept_the_old["activation"]["mismatched_workers"] == ["w"]
    fenced = {w["worker_id"]: w["fenced_reason"] for w in (await two.get("/workers"))["workers"]}
    assert fenced == {"v": None, "w": "worker_mismatch"}
    assert (await two.ack("w", 1, digest=digest("one")))["matching"]
    assert (await two.ack("v", 1, digest=digest("one")))["activation"]["activated"]


async def test_another_layout_is_not_compared(two: Ledger) -> None:
    assert (await two.ack("w", 1, digest=digest("one in halves", layout="vllm/float32/tp2")))["matching"]
    assert (await two.ack("v", 1))["activation"]["activated"]  # an engine that can give none


async def test_engines_of_one_layout_hold_the_same(two: Ledger) -> None:
    assert (await two.ack("w", 1, digest=digest("one", "live")))["matching"]
    zeroed = await two.ack("v", 1, digest=digest("one", "live, but for one tensor"))
    assert (zeroed["matching"], zeroed["reason"]) == (False, "worker_mismatch")
    assert "active weights" in zeroed["detail"] and "worker w" in zeroed["detail"]
    assert not zeroed["activation"]["activated"]
    assert (await two.ack("v", 1, digest=digest("one", "live")))["activation"]["activated"]


async def test_the_first_is_believed_until_it_is_fenced(two: Ledger) -> None:
    """Nothing tells which of two engines is right; an operator does, by fencing the other."""
    assert (await two.ack("v", 1, digest=digest("one", "wrong from the start")))["matching"]
    assert not (await two.ack("w", 1, digest=digest("one", "live")))["matching"]
    ok(await two.call("POST", "/workers/v/fence", {"reason": "its weights are wrong"}))
    assert (await two.ack("w", 1, digest=digest("one", "live")))["matching"]
    assert not (await two.ack("v", 1, digest=digest("one", "wrong from the start")))["matching"]
    assert (await two.ack("v", 1, digest=digest("one", "live")))["activation"]["activated"]


async def test_a_digest_that_nobody_stated_must_agree_as_well(ledger: Ledger) -> None:
    await ledger.worker("v")
    await published(ledger, 1, 0)
    ok(await ledger.activation(1))
    assert (await ledger.ack("w", 1, digest=digest("one")))["matching"]
    other = await ledger.ack("v", 1, digest=digest("another"))
    assert not other["matching"] and "registered weights" in other["detail"]


async def test_a_load_that_left_the_old_weights_is_a_mismatch(ledger: Ledger) -> None:
    await published(ledger, 1, 0)
    ok(await ledger.activation(1))
    assert (await ledger.ack("w", 1, digest=digest("one", "live")))["activation"]["activated"]
    await published(ledger, 2, 1)
    ok(await ledger.activation(2))
    for stale in (digest("one", "live"), digest("two", "live"), digest("one")):
        answer = await ledger.ack("w", 2, digest=stale)
        assert not answer["matching"] and "version 1" in answer["detail"]
    assert (await ledger.ack("w", 2, digest=digest("two", "fresh")))["activation"]["activated"]


async def test_a_restored_artifact_has_its_digest_again(ledger: Ledger) -> None:
    """The same bytes under a new number are the same weights; those between were others."""
    await published(ledger, 1, 0)
    await ledger.ack("w", 1, digest=digest("one"))
    await published(ledger, 2, 1)
    await ledger.ack("w", 2, digest=digest("two"))
    assert (await ledger.ack("w", 1, digest=digest("one")))["matching"]


async def test_a_mismatch_of_one_says_nothing_of_others(ledger: Ledger) -> None:
    await ledger.worker("v")
    await published(ledger, 1, 0, digests={"vllm/float32": sha256("one")})
    ok(await ledger.activation(1))
    assert not (await ledger.ack("w", 1, digest=digest("wrong")))["matching"]
    assert (await ledger.ack("v", 1, digest=digest("one")))["matching"]


async def test_the_same_version_with_other_digests_is_another(ledger: Ledger) -> None:
    ok(await ledger.prepare(1, 0, digests={"l": sha256("one")}))
    assert (await ledger.prepare(1, 0, digests={"l": sha256("one")})).status_code == 200
    refused = await ledger.prepare(1, 0, digests={"l": sha256("two")})
    assert (refused.status_code, refused.json()["code"]) == (409, "policy_conflict")


async def test_stages_are_events_and_decide_nothing(two: Ledger) -> None:
    for stage in ("downloading", "verifying", "loading"):
        ok(await two.call("POST", "/workers/w/stage", {"incarnation": "w-1", "version": 1, "stage": stage}))
    entries = (await two.get("/journal"))["entries"]
    told = [(e["event"], e["subject"], e["detail"]["stage"]) for e in entries[-3:]]
    assert told == [
        ("worker.stage", "w", "downloading"),
        ("worker.stage", "w", "verifying"),
        ("worker.stage", "w", "loading"),
    ]
    assert all(e["detail"]["activation_id"] is not None for e in entries[-3:])
    unknown = await two.call("POST", "/workers/w/stage", {"incarnation": "w-1", "version": 9, "stage": "loading"})
    assert unknown.json()["code"] == "policy_version_unknown"
    old = await two.call("POST", "/workers/w/stage", {"incarnation": "w-0", "version": 1, "stage": "loading"})
    assert old.json()["code"] == "incarnation_superseded"


async def test_asleep_is_not_lost_and_gets_no_tickets(api: Api) -> None:
    ledger = await Ledger.create(api, lost_after_seconds=0.2)
    await ledger.worker()
    asleep = {"incarnation": "w-1", "asleep_seconds": 60}
    ok(await ledger.call("POST", "/workers/w/heartbeat", asleep))
    await asyncio.sleep(0.4)
    (worker,) = (await ledger.get("/workers"))["workers"]
    assert worker["state"] == "asleep" and worker["asleep_until"] is not None
    answer = ok(await ledger.call("POST", "/workers/w/tickets", {"incarnation": "w-1", "group_ids": ["g"]}))
    assert answer["granted"] == [] and answer["capacity"] == 0
    await published(ledger, 1, 0)
    assert [w["worker_id"] for w in ok(await ledger.activation(1))["required"]] == ["w"]
    ok(await ledger.call("POST", "/workers/w/heartbeat", {"incarnation": "w-1"}))
    (worker,) = (await ledger.get("/workers"))["workers"]
    assert worker["state"] == "live" and worker["asleep_until"] is None


async def test_the_same_ack_is_judged_anew_once_another_engine_took_its_word_back(ledger: Ledger) -> None:
    await ledger.worker("v")
    await published(ledger, 1, 0)
    ok(await ledger.activation(1))
    assert (await ledger.ack("w", 1, digest=digest("wrong")))["matching"]
    assert not (await ledger.ack("v", 1, digest=digest("one")))["matching"]
    assert (await ledger.ack("w", 1, digest=digest("one")))["activation"]["mismatched_workers"] == ["v"]
    again = await ledger.ack("v", 1, digest=digest("one"))
    assert (again["matching"], again["activation"]["reason"]) == (True, "activated")
