"""One activation is open at a time: the newest version waits its turn, or supersedes when it is asked to."""

from __future__ import annotations

import asyncio

from tests.api.ledger import Api, Json, Ledger, ok, refused


async def states(ledger: Ledger) -> dict[str, str]:
    return {a["activation_id"]: a["state"] for a in (await ledger.get("/activations"))["activations"]}


async def published(ledger: Ledger, *numbers: int) -> None:
    for version in numbers:
        await ledger.publish(version, version - 1)


async def test_a_newer_version_waits_and_opens_when_the_open_one_ends(ledger: Ledger) -> None:
    await published(ledger, 1, 2)
    ok(await ledger.activation(1))
    waiting = ok(await ledger.activation(2))
    assert (waiting["state"], waiting["required"], waiting["opened_at"], waiting["deadline_at"]) == (
        "waiting", [], None, None,
    )  # fmt: skip
    assert ok(await ledger.activation(2))["state"] == "waiting"  # the same call again
    assert (await ledger.get("/watch"))["candidate"]["version"] == 1
    # An ack before its turn vouches for rollouts and counts for no activation.
    assert (await ledger.ack("w", 2))["activation"] is None
    await ledger.worker("late")
    assert (await ledger.ack("w", 1))["activation"]["activated"]
    opened = await ledger.get("/activations/act-2")
    assert opened["state"] == "open"
    # The set was frozen when its turn came: who joined meanwhile is in it, and an ack is needed anew.
    assert [(r["worker_id"], r["ack"]) for r in opened["required"]] == [("late", "missing"), ("w", "missing")]
    assert (await ledger.get("/watch"))["candidate"]["version"] == 2
    await ledger.ack("w", 2)
    assert (await ledger.ack("late", 2))["activation"]["activated"]
    assert await ledger.versions() == {0: "retired", 1: "retired", 2: "active"}
    told = [(e["event"], e["subject"]) for e in (await ledger.get("/journal"))["entries"] if "activat" in e["event"]]
    assert told == [
        ("activation.opened", "act-1"),
        ("activation.waiting", "act-2"),
        ("policy.activated", "1"),
        ("activation.opened", "act-2"),
        ("policy.activated", "2"),
    ]


async def test_only_the_newest_waits(ledger: Ledger) -> None:
    await published(ledger, 1, 2, 3)
    ok(await ledger.activation(1))
    ok(await ledger.activation(2))
    ok(await ledger.activation(3))
    assert await states(ledger) == {"act-1": "open", "act-2": "superseded", "act-3": "waiting"}
    assert await ledger.versions() == {0: "active", 1: "committed", 2: "abandoned", 3: "committed"}
    refused(await ledger.activation(2, "again"), 409, "policy_state")
    failures = [(f["stage"], f["kind"], f["version"]) for f in (await ledger.get("/failures"))["failures"]]
    assert failures == [("activation", "superseded", 2)]


async def test_the_one_that_waits_opens_after_a_failure_and_after_giving_up(api: Api) -> None:
    for how in ("deadline", "give-up"):
        ledger = await Ledger.create(api, how, activation_deadline_seconds=3 if how == "deadline" else 300)
        await ledger.worker()
        await published(ledger, 1, 2)
        ok(await ledger.activation(1))
        ok(await ledger.activation(2))
        if how == "give-up":
            ok(await ledger.call("POST", "/activations/act-1/give-up", {"reason": "a bad batch"}))
        for _ in range(100):
            if (await states(ledger))["act-2"] != "waiting":
                break
            await asyncio.sleep(0.1)
        assert (await ledger.ack("w", 2))["activation"]["activated"]
        assert await states(ledger) == {
            "act-1": "failed" if how == "deadline" else "given_up",
            "act-2": "succeeded",
        }


async def test_superseding_abandons_the_open_candidate_and_what_was_made_with_it(ledger: Ledger) -> None:
    await ledger.worker("v")
    await published(ledger, 1, 2)
    ok(await ledger.activation(1))
    await ledger.ack("w", 1)
    assert (await ledger.submit(ledger.rollout("r", version=1)))[0]["verdict"] == "accepted"
    opened = ok(await ledger.activation(2, supersede=True))
    assert opened["state"] == "open"
    assert await states(ledger) == {"act-1": "superseded", "act-2": "open"}
    assert (await ledger.state("r"))[:2] == ("quarantined", "candidate_not_activated")
    late = (await ledger.submit(ledger.rollout("late", index=1, version=1)))[0]
    assert late["reason"] == "candidate_not_activated"
    await ledger.ack("w", 2)
    assert (await ledger.ack("v", 2))["activation"]["activated"]


async def test_superseding_takes_the_place_of_the_one_that_waits_too(ledger: Ledger) -> None:
    await published(ledger, 1, 2, 3)
    ok(await ledger.activation(1))
    ok(await ledger.activation(2))
    ok(await ledger.activation(3, supersede=True))
    assert await states(ledger) == {"act-1": "superseded", "act-2": "superseded", "act-3": "open"}
    assert (await ledger.ack("w", 3))["activation"]["activated"]
    assert await ledger.versions() == {0: "retired", 1: "abandoned", 2: "abandoned", 3: "active"}


async def test_a_refused_supersede_changes_nothing(ledger: Ledger) -> None:
    await published(ledger, 1, 2)
    ok(await ledger.activation(1))
    refused(await ledger.activation(2, supersede=True, required_workers=["nobody"]), 404, "worker_unknown")
    ok(await ledger.call("POST", "/workers/w/fence", {"reason": "test"}))
    refused(await ledger.activation(2, supersede=True), 409, "no_required_workers")
    assert await states(ledger) == {"act-1": "open"}
    assert await ledger.versions() == {0: "active", 1: "committed", 2: "committed"}


async def test_giving_up_the_one_that_waits(ledger: Ledger) -> None:
    await published(ledger, 1, 2)
    ok(await ledger.activation(1))
    ok(await ledger.activation(2))
    given_up = ok(await ledger.call("POST", "/activations/act-2/give-up", {"reason": "no more"}))
    assert given_up["state"] == "given_up"
    refused(await ledger.call("POST", "/policies/2/activate"), 409, "activation_ended")
    assert (await ledger.ack("w", 1))["activation"]["activated"]
    assert await ledger.versions() == {0: "retired", 1: "active", 2: "abandoned"}


async def test_nobody_is_left_when_its_turn_comes(ledger: Ledger) -> None:
    await published(ledger, 1, 2)
    ok(await ledger.activation(1))
    ok(await ledger.activation(2))
    await ledger.ack("w", 1, "0" * 64)  # fences
    ok(await ledger.call("POST", "/activations/act-1/give-up", {"reason": "a bad batch"}))
    view = await ledger.get("/activations/act-2")
    assert (view["state"], view["reason"][:20]) == ("failed", "no_required_workers:")
    assert (await ledger.ack("w", 0))["matching"]
    assert ok(await ledger.activation(2, "again"))["state"] == "open"


async def test_a_version_that_waits_is_not_activated(ledger: Ledger) -> None:
    await published(ledger, 1, 2)
    ok(await ledger.activation(1))
    ok(await ledger.activation(2))
    refused(await ledger.call("POST", "/policies/2/activate"), 409, "activation_open")


def required(view: Json) -> list[str]:
    return [r["worker_id"] for r in view["required"]]


async def dropping(api: Api, **settings: object) -> Ledger:
    ledger = await Ledger.create(api, "spot", on_lost="drop", **settings)
    for name in ("a", "b", "c"):
        await ledger.worker(name)
    await ledger.publish(1, 0)
    return ledger


async def ended(ledger: Ledger, activation_id: str = "act-1") -> Json:
    for _ in range(150):
        view = await ledger.get(f"/activations/{activation_id}")
        if view["state"] not in ("open", "waiting"):
            return view
        await asyncio.sleep(0.1)
    raise AssertionError(view)


async def test_lost_and_fenced_workers_are_dropped_at_once_with_a_record(api: Api) -> None:
    ledger = await dropping(api, lost_after_seconds=2.5)
    ok(await ledger.activation(1))
    await ledger.ack("a", 1)
    await ledger.ack("b", 1, "0" * 64)
    for _ in range(150):  # c is silent, a and b are not
        for name in ("a", "b"):
            ok(await ledger.call("POST", f"/workers/{name}/heartbeat", {"incarnation": f"{name}-1"}))
        view = await ledger.get("/activations/act-1")
        if view["state"] != "open":
            break
        await asyncio.sleep(0.1)
    assert (view["state"], required(view)) == ("succeeded", ["a"])
    assert {d["worker_id"]: d["reason"] for d in view["dropped"]} == {"b": "fenced: worker_mismatch", "c": "lost"}
    workers = {w["worker_id"]: w["fenced_reason"] for w in (await ledger.get("/workers"))["workers"]}
    assert workers["a"] is None
    assert workers["c"] == "dropped from activation act-1: lost"
    # Only an ack of the active version brings a dropped worker back.
    assert (await ledger.ack("c", 0))["matching"]
    workers = {w["worker_id"]: w["fenced"] for w in (await ledger.get("/workers"))["workers"]}
    assert workers == {"a": False, "b": True, "c": True}
    for name in ("b", "c"):
        await ledger.ack(name, 1)
    assert not any(w["fenced"] for w in (await ledger.get("/workers"))["workers"])


async def test_the_silent_are_dropped_at_the_deadline(api: Api) -> None:
    ledger = await dropping(api, activation_deadline_seconds=4, min_workers=2)
    ok(await ledger.activation(1))
    await ledger.ack("a", 1)
    await ledger.ack("b", 1)
    view = await ended(ledger)
    assert (view["state"], required(view)) == ("succeeded", ["a", "b"])
    assert [(d["worker_id"], d["reason"]) for d in view["dropped"]] == [("c", "no matching ack in time")]


async def test_too_few_are_left(api: Api) -> None:
    ledger = await dropping(api, activation_deadline_seconds=4, min_workers=2)
    ok(await ledger.activation(1))
    await ledger.ack("a", 1)
    ok(await ledger.call("POST", "/workers/b/fence", {"reason": "test"}))
    ok(await ledger.call("POST", "/workers/c/fence", {"reason": "test"}))
    view = await ended(ledger)
    # One of the two could leave; the other is one of the two that must confirm, and did not.
    assert (view["state"], view["reason"], required(view)) == (
        "failed", "deadline: missing_worker_ack (c)", ["a", "c"],
    )  # fmt: skip
    assert (await ledger.get(""))["active"]["version"] == 0


async def test_an_artifact_that_never_came_is_no_fault_of_the_workers(api: Api) -> None:
    ledger = await Ledger.create(api, "spot", on_lost="drop", activation_deadline_seconds=1)
    await ledger.worker()
    ok(await ledger.prepare(1, 0))
    ok(await ledger.activation(1))
    view = await ended(ledger)
    assert (view["state"], view["dropped"]) == ("failed", [])
    assert view["reason"] == "deadline: artifact_not_committed (w)"


async def test_a_sleeper_is_required_and_not_dropped(api: Api) -> None:
    ledger = await dropping(api, lost_after_seconds=0.5)
    for name in ("a", "b", "c"):
        body = {"incarnation": f"{name}-1", "asleep_seconds": 600}
        ok(await ledger.call("POST", f"/workers/{name}/heartbeat", body))
    ok(await ledger.activation(1))
    await asyncio.sleep(2.5)  # two rounds of the clock
    view = await ledger.get("/activations/act-1")
    assert (view["state"], required(view), view["dropped"]) == ("open", ["a", "b", "c"], [])


async def test_by_hand_nobody_is_dropped_for_a_switch_that_nobody_made(api: Api) -> None:
    ledger = await dropping(api, activation="by_hand", activation_deadline_seconds=4)
    ok(await ledger.activation(1))
    for name in ("a", "b", "c"):
        await ledger.ack(name, 1)
    view = await ended(ledger)
    assert (view["state"], view["dropped"]) == ("failed", [])
    assert view["reason"] == "deadline: it was ready, and nobody activated it by hand"


async def test_the_active_version_is_the_last_thing_that_a_dropped_worker_confirms(api: Api) -> None:
    """It confirmed the candidate before, while it was fenced: with the fence the last obstacle is gone."""
    ledger = await dropping(api, activation_deadline_seconds=1.5, min_workers=2)
    ok(await ledger.activation(1))
    await ledger.ack("a", 1)
    await ledger.ack("b", 1)
    assert (await ended(ledger))["state"] == "succeeded"  # without c
    await ledger.publish(2, 1)
    ok(await ledger.activation(2, required_workers=["c"]))
    verdict = (await ledger.ack("c", 2))["activation"]
    assert (verdict["reason"], verdict["missing_workers"]) == ("missing_worker_ack", ["c"])
    assert (await ledger.ack("c", 1))["activation"] is None
    assert (await ledger.get("/activations/act-2"))["state"] == "succeeded"
