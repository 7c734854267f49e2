"""The journal: whatever happens to a run that is not a rollout's, numbered without holes, with who and what."""

from __future__ import annotations

import asyncio

from tests.api.ledger import Api, Json, Ledger, ok

DIGEST = {"layout": "l", "registered": "f" * 64, "active": None}


async def entries(ledger: Ledger) -> list[Json]:
    found: list[Json] = (await ledger.get("/journal"))["entries"]
    assert [e["event_no"] for e in found] == list(range(1, len(found) + 1))
    return found


def told(found: list[Json], *fields: str) -> list[tuple[object, ...]]:
    return [(e["event"], e["subject"], *(e["detail"].get(f) for f in fields)) for e in found]


async def test_workers(ledger: Ledger) -> None:
    ok(await ledger.call("POST", "/workers/w/fence", {"reason": "its disk is dying"}))
    await ledger.ack("w", 0, digest=DIGEST)
    await ledger.ack("w", 0, digest=DIGEST)  # the same again is no event
    body = {"incarnation": "w-1", "version": 0, "stage": "load", "message": "out of memory"}
    ok(await ledger.call("POST", "/workers/w/failures", body))
    for way in ("drain", "drain", "deregister", "deregister"):
        ok(await ledger.call("POST", f"/workers/w/{way}", {"incarnation": "w-1"}))
    found = await entries(ledger)
    assert told(found, "incarnation", "version", "matching", "reason", "stage") == [
        ("run.created", "run", None, 0, None, None, None),
        ("worker.registered", "w", "w-1", None, None, None, None),
        ("worker.acked", "w", "w-1", 0, True, None, None),
        ("worker.fenced", "w", None, None, None, "its disk is dying", None),
        ("worker.acked", "w", "w-1", 0, True, None, None),
        ("worker.unfenced", "w", None, None, None, None, None),
        ("worker.failed", "w", None, 0, None, None, "load"),
        ("worker.fenced", "w", None, None, None, "load of version 0 failed", None),
        ("worker.draining", "w", None, None, None, None, None),
        ("worker.deregistered", "w", None, None, None, None, None),
    ]
    assert {e["actor"] for e in found} == {"admin:admin"}


async def test_updates(api: Api) -> None:
    ledger = await Ledger.create(api)
    await ledger.worker()
    ids = await ledger.group("g")
    await ledger.publish(1, 0)
    first = len(await entries(ledger))
    ok(await ledger.open("u"))
    ok(await ledger.open("u"))  # the same again is no event
    ok(await ledger.open("u", version=1))
    renewed = ok(await ledger.call("POST", "/updates/u/renew", {"owner": "t-1"}))
    assert await ledger.reserve(*ids) == ["reserved"] * 2
    ok(await ledger.commit(discards=[{"rollout_id": "g:1", "reason": "no advantage"}]))
    ok(await ledger.commit())
    ok(await ledger.open("v"))
    ok(await ledger.call("POST", "/updates/v/abort", {"owner": "t-1", "reason": "NaN"}))
    ok(await ledger.open("w"))
    ok(await ledger.call("PUT", "/rewinds/back", {"to_commit_no": 0, "reason": "restored"}))
    found = (await entries(ledger))[first:]
    assert told(found, "policy_version", "commit_no", "consumed", "discarded", "reason") == [
        ("update.opened", "u", 0, None, None, None, None),
        ("update.restated", "u", 1, None, None, None, None),
        ("update.renewed", "u", None, None, None, None, None),
        ("update.committed", "u", None, 1, 1, 1, None),
        ("update.opened", "v", 0, None, None, None, None),
        ("update.aborted", "v", None, None, None, None, "NaN"),
        ("update.opened", "w", 0, None, None, None, None),
        ("update.fenced", "w", None, None, None, None, "rewind back: restored"),
        ("line.rewound", "back", None, None, "release", None, "restored"),
    ]
    assert found[2]["detail"]["lease_until"] == found[3]["detail"]["lease_until"] is not None
    assert renewed["lease_until"]
    rewound = found[-1]["detail"]
    assert (rewound["to_commit_no"], rewound["rewound"], rewound["fenced"], rewound["released"]) == (0, ["u"], ["w"], 2)


async def test_policies_and_activations(api: Api) -> None:
    ledger = await Ledger.create(api)
    await ledger.worker()
    await ledger.worker("v")
    ids = await ledger.group("g")
    ok(await ledger.open())
    await ledger.reserve(*ids)
    ok(await ledger.commit())
    first = len(await entries(ledger))
    ok(await ledger.prepare(1, 0, updates=["u"]))
    ok(await ledger.upload(1))
    ok(await ledger.call("POST", "/policies/1/commit"))
    ok(await ledger.activation(1))
    ok(await ledger.call("POST", "/workers/v/drain", {"incarnation": "v-1"}))
    await ledger.ack("w", 1)
    ok(await ledger.prepare(2, 1, b"two"))
    ok(await ledger.activation(2))
    ok(await ledger.call("POST", "/activations/act-2/give-up", {"reason": "a bad batch"}))
    ok(await ledger.call("PUT", "/rewinds/back", {"to_commit_no": 0, "reason": "restored"}))
    found = [e for e in (await entries(ledger))[first:] if not e["event"].startswith("worker.")]
    assert told(found, "version", "worker_id", "reason") == [
        ("policy.prepared", "1", None, None, None),
        ("policy.committed", "1", None, None, None),
        ("activation.opened", "act-1", 1, None, None),
        ("activation.dropped", "act-1", None, "v", "draining"),
        ("policy.activated", "1", None, None, None),
        ("policy.prepared", "2", None, None, None),
        ("activation.opened", "act-2", 2, None, None),
        ("activation.given_up", "act-2", 2, None, "a bad batch"),
        ("policy.withdrawn", "1", None, None, "rewind back: restored"),
        ("policy.prepared", "3", None, None, None),
        ("line.rewound", "back", None, None, "restored"),
        ("policy.committed", "3", None, None, None),
    ]
    assert found[0]["detail"]["updates"] == ["u"]
    assert found[9]["detail"]["restores"] == 0


async def test_it_goes_on_where_it_ended_and_has_no_hole_among_many_writers(ledger: Ledger) -> None:
    async def story(n: int) -> None:
        for k in range(4):
            ok(await ledger.open(f"u{n}-{k}", owner=f"t-{n}"))
            ok(await ledger.call("POST", f"/updates/u{n}-{k}/abort", {"owner": f"t-{n}", "reason": "x"}))

    writers = asyncio.gather(*(story(n) for n in range(5)))
    seen: list[int] = []
    after = 0
    while True:
        ended = writers.done()
        answer = await ledger.get(f"/journal?after={after}&limit=7")
        seen += [e["event_no"] for e in answer["entries"]]
        after = answer["next_after"]
        if ended and not answer["entries"]:
            break
    await writers
    assert seen == list(range(1, 3 + 1 + 40))
    assert (await ledger.get(""))["event_no"] == seen[-1]
