"""Reading: lists with every filter and their cursors, the audit in the order of time, failures, and tokens in bulk."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import text

from coordinator.storage.settled import SETTLED_BEFORE
from coordinator.wire.columns import ARROW_MEDIA_TYPE, decode_evidence
from tests.api.ledger import BEHAVIOR, Api, H, Json, Ledger, ok, refused


@pytest.fixture
async def mixed(api: Api) -> Ledger:
    """Rollouts that differ in each thing that can be asked for."""
    ledger = await Ledger.create(api, min_usable=1, max_lag=0)
    await ledger.worker()
    await ledger.worker("v")
    await ledger.submit(
        ledger.rollout("a", "g1"),
        ledger.rollout("b", "g1", 1, worker_id="v", incarnation="v-1"),
        ledger.rollout("c", "g2", task_source="math"),
        ledger.rollout("d", "g3", version=9),
    )
    await ledger.reward("a")
    await ledger.activate(1, 0, "w", "v")
    spans = [
        {"version": 0, "artifact_hash": ledger.hashes[0], "start": 0, "end": 3},
        {"version": 1, "artifact_hash": ledger.hashes[1], "start": 3, "end": 6},
    ]
    await ledger.submit(ledger.rollout("e", "g4", spans=spans), ledger.rollout("f", "g5", version=0))
    return ledger


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("", "abcdef"),
        ("state=generated", "bce"),
        ("state=rewarded", "a"),
        ("state=offline", "f"),
        ("state=consumed", ""),
        ("group_id=g1", "ab"),
        ("group_id=none", ""),
        ("version=0", "abcef"),
        ("version=1", "e"),
        ("version=9", "d"),
        ("task_source=math", "c"),
        ("worker_id=v", "b"),
        ("reason=policy_unknown", "d"),
        ("reason=stale_policy", "f"),
        ("worker_id=w&state=generated&version=0&task_source=hand", "e"),
        ("group_id=g1&worker_id=w", "a"),
        ("group_id=g1&reason=stale_policy", ""),
    ],
)
async def test_every_filter_and_all_of_them_together(mixed: Ledger, query: str, ids: str) -> None:
    answer = await mixed.get(f"/rollouts?{query}")
    assert [r["rollout_id"] for r in answer["rollouts"]] == list(ids)
    assert answer["next_after"] is None


async def test_by_the_time_of_arrival_from_and_before(mixed: Ledger) -> None:
    at = {r["rollout_id"]: r["arrived_at"] for r in (await mixed.get("/rollouts"))["rollouts"]}
    assert at["a"] < at["e"]

    async def ids(**query: str) -> str:
        asked = "&".join(f"{name}={quote(value)}" for name, value in query.items())
        return "".join(r["rollout_id"] for r in (await mixed.get(f"/rollouts?{asked}"))["rollouts"])

    assert await ids(arrived_from=at["e"]) == "ef"
    assert await ids(arrived_before=at["e"]) == "abcd"
    assert await ids(arrived_from=at["a"], arrived_before=at["e"]) == "abcd"
    assert await ids(arrived_from=at["e"], arrived_before=at["e"]) == ""
    elsewhere = datetime.fromisoformat(at["e"]).astimezone(tz=None).isoformat()
    assert await ids(arrived_before=elsewhere) == "abcd"
    for moment in ("2030-01-01T00:00:00", "yesterday", ""):
        refused(await mixed.call("GET", f"/rollouts?arrived_from={moment}"), 422, "invalid_request")


async def settle(ledger: Ledger) -> None:
    """Waits until whatever was being written is done, the sweeper's own rounds too: a list shows no more than that."""
    [[now]] = await ledger.api.rows("SELECT clock_timestamp()")
    for _ in range(1000):
        [[before]] = await ledger.api.rows(SETTLED_BEFORE.text)
        if before >= now:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a transaction never ended")


async def pages(ledger: Ledger, path: str, items: str) -> list[list[Json]]:
    """Every page of a list, by its cursor."""
    await settle(ledger)
    found = []
    after: Any = None
    while True:
        cursor = "" if after is None else f"&after={quote(str(after))}"
        answer = await ledger.get(path + cursor)
        after = answer["next_after"]
        if answer[items]:
            found.append(answer[items])
        if after is None or not answer[items]:
            return found


async def test_a_list_of_rollouts_goes_on_where_it_ended(mixed: Ledger) -> None:
    found = await pages(mixed, "/rollouts?limit=4", "rollouts")
    assert [[r["rollout_id"] for r in page] for page in found] == [list("abcd"), list("ef")]
    found = await pages(mixed, "/rollouts?limit=2&state=generated", "rollouts")
    assert [[r["rollout_id"] for r in page] for page in found] == [["b", "c"], ["e"]]
    found = await pages(mixed, "/rollouts?limit=3", "rollouts")  # the last page ends with the list
    assert [len(page) for page in found] == [3, 3]


async def audit(ledger: Ledger, query: str = "") -> list[Json]:
    await settle(ledger)
    entries: list[Json] = (await ledger.get(f"/audit?{query}"))["entries"]
    return entries


def named(entries: list[Json]) -> list[tuple[str, int, str]]:
    return [(e["rollout_id"], e["revision"], e["event"]) for e in entries]


async def test_the_audit_of_one_rollout_is_its_history(mixed: Ledger) -> None:
    entries = await audit(mixed, "rollout_id=a")
    history = (await mixed.get("/rollouts/a/history"))["transitions"]
    assert [{k: v for k, v in e.items() if k != "rollout_id"} for e in entries] == history
    assert named(entries) == [("a", 0, "arrive"), ("a", 1, "reward_ready")]
    assert await audit(mixed, "rollout_id=none") == []


async def test_the_audit_of_one_update_is_what_it_did(ledger: Ledger) -> None:
    g, h = await ledger.group("g"), await ledger.group("h")
    ok(await ledger.open("u"))
    ok(await ledger.open("v"))
    await ledger.reserve(*g)
    await ledger.reserve(*h, update="v")
    ok(await ledger.commit(discards=[{"rollout_id": "g:1", "reason": "no advantage"}]))
    ok(await ledger.call("POST", "/updates/v/abort", {"owner": "t-1", "reason": "x"}))
    entries = await audit(ledger, "update_id=u")
    assert [(e["rollout_id"], e["event"], e["to_state"], e["reason"]) for e in entries] == [
        ("g:0", "reserve", "reserved", None), ("g:1", "reserve", "reserved", None),
        ("g:0", "commit", "consumed", None), ("g:1", "discard", "offline", "no advantage"),
    ]  # fmt: skip
    reserve = entries[0]
    assert [reserve[k] for k in ("lag", "drift", "max_lag", "max_drift", "actor")] == [0, 0.0, 4, 0.2, "admin:admin"]
    assert named(await audit(ledger, "update_id=v")) == [
        ("h:0", 2, "reserve"), ("h:1", 2, "reserve"), ("h:0", 3, "abort"), ("h:1", 3, "abort"),
    ]  # fmt: skip
    assert named(await audit(ledger, "update_id=u&rollout_id=g:1")) == [("g:1", 2, "reserve"), ("g:1", 3, "discard")]
    refused(await ledger.call("GET", "/audit?update_id=none"), 404, "update_unknown")


async def test_the_audit_by_time_page_by_page(mixed: Ledger) -> None:
    whole = await audit(mixed)
    assert sorted(named(whole)) == sorted(
        [*((r, 0, "arrive") for r in "abcdef"), ("d", 1, "quarantine"), ("a", 1, "reward_ready"), ("f", 1, "set_aside")]
    )
    order = [(e["at"], e["rollout_id"], e["revision"]) for e in whole]
    assert order == sorted(order)
    for limit in (1, 2, 4, 9):
        found = await pages(mixed, f"/audit?limit={limit}", "entries")
        assert [e for page in found for e in page] == whole
    middle = quote(whole[4]["at"])
    assert await audit(mixed, f"at_from={middle}") == [e for e in whole if e["at"] >= whole[4]["at"]]
    assert await audit(mixed, f"at_before={middle}") == [e for e in whole if e["at"] < whole[4]["at"]]
    assert await audit(mixed, f"at_from={middle}&at_before={middle}") == []
    future = quote((datetime.now(UTC) + timedelta(hours=1)).isoformat())
    assert await audit(mixed, f"at_from={future}") == []


async def test_rows_of_one_moment_are_cut_anywhere_and_none_is_lost(mixed: Ledger) -> None:
    """A page may end between changes of the very same time."""
    async with mixed.api.database.engine.begin() as connection:
        await connection.execute(text("UPDATE rollout_audit SET at = '2026-01-01T00:00:00.5Z'"))
    whole = await audit(mixed)
    assert named(whole) == sorted(named(whole))
    for limit in (1, 2, 3):
        found = await pages(mixed, f"/audit?limit={limit}", "entries")
        assert [e for page in found for e in page] == whole


@pytest.mark.parametrize(
    "after", ["x", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z|r", "2026-01-01T00:00:00Z|r|x", "|r|1",
              "2026-01-01T00:00:00|r|1", "2026-01-01T00:00:00Z|r|1|2"],
)  # fmt: skip
async def test_a_cursor_that_is_none_is_refused(ledger: Ledger, after: str) -> None:
    problem = refused(await ledger.call("GET", f"/audit?after={quote(after)}"), 422, "invalid_request")
    assert problem["field"] == "after"


async def test_a_cursor_with_a_revision_that_no_rollout_can_have_is_refused(ledger: Ledger) -> None:
    after = quote(f"2026-01-01T00:00:00Z|r|{10**30}")
    refused(await ledger.call("GET", f"/audit?after={after}"), 422, "invalid_request")


async def test_a_writer_under_way_holds_the_audit_back_so_that_nothing_is_passed_over(ledger: Ledger) -> None:
    """Its change has an earlier time than one that was committed after it began; a reader must get both, in order."""
    await ledger.submit(ledger.rollout("before"))
    await settle(ledger)
    writer = await ledger.api.database.engine.connect()
    transaction = await writer.begin()
    await writer.execute(
        text(
            "INSERT INTO rollout_audit (run_no, rollout_id, revision, event, to_state, actor) "
            "SELECT run_no, 'slow', 0, 'arrive', 'generated', 'test' FROM runs"
        )
    )
    await ledger.submit(ledger.rollout("after", index=1))
    first = await ledger.get("/audit?limit=1")
    assert named(first["entries"]) == [("before", 0, "arrive")]
    held = await ledger.get(f"/audit?after={quote(first['next_after'])}")
    assert (held["entries"], held["next_after"]) == ([], first["next_after"])
    await transaction.commit()
    await writer.close()
    await settle(ledger)
    rest = await ledger.get(f"/audit?after={quote(first['next_after'])}")
    assert named(rest["entries"]) == [("slow", 0, "arrive"), ("after", 0, "arrive")]


async def test_a_writer_under_way_holds_failures_back_too(ledger: Ledger) -> None:
    """Failure numbers are given before their transaction ends."""
    writer = await ledger.api.database.engine.connect()
    transaction = await writer.begin()
    await writer.execute(
        text(
            "INSERT INTO failures (run_no, stage, kind, message, actor) "
            "SELECT run_no, 'update', 'slow', 'm', 'test' FROM runs"
        )
    )
    ok(await ledger.open())
    ok(await ledger.call("POST", "/updates/u/abort", {"owner": "t-1", "reason": "x"}))
    held = await ledger.get("/failures?after=0")
    assert (held["failures"], held["next_after"]) == ([], 0)
    await transaction.commit()
    await writer.close()
    await settle(ledger)
    rest = await ledger.get(f"/failures?after={held['next_after']}")
    assert [f["kind"] for f in rest["failures"]] == ["slow", "aborted"]


async def test_a_reader_that_follows_while_many_write_gets_every_change_once(ledger: Ledger) -> None:
    """Eight writers at once; the reader goes on from its cursor until they have all ended."""
    run = await Ledger.create(ledger.api, "busy", group_size=None)
    await run.worker()

    async def write(n: int) -> None:
        for k in range(6):
            await run.submit(run.rollout(f"r{n}-{k}", f"g{n}-{k}"))
            await run.reward(f"r{n}-{k}")

    writers = asyncio.gather(*(write(n) for n in range(8)))
    seen: list[tuple[str, int, str]] = []
    after = ""
    while True:
        ended = writers.done()
        answer = await run.get(f"/audit?limit=5&after={quote(after)}")
        seen += named(answer["entries"])
        if answer["entries"]:
            last = answer["entries"][-1]
            after = answer["next_after"] or f"{last['at']}|{last['rollout_id']}|{last['revision']}"
        elif ended:
            await settle(ledger)
            if not (await run.get(f"/audit?after={quote(after)}"))["entries"]:
                break
    await writers
    ids = [f"r{n}-{k}" for n in range(8) for k in range(6)]
    assert sorted(seen) == sorted([*((r, 0, "arrive") for r in ids), *((r, 1, "reward_ready") for r in ids)])


async def test_failures_by_stage_each_with_what_it_was_about(api: Api) -> None:
    """No stage is folded into another."""
    ledger = await Ledger.create(api, group_size=4, max_attempts=2)
    await ledger.worker()
    await ledger.submit(ledger.rollout("r"))
    await ledger.reward("r", None, status="timeout", message="slow")
    await ledger.reward("r", None, status="error", message="crashed")
    failure = {
        "rollout_id": "f", "task_id": "t", "task_source": "s", "group_id": "g", "sample_index": 1, "worker_id": "w",
        "incarnation": "w-1", "kind": "out_of_memory", "message": "40 GiB",
    }  # fmt: skip
    ok(await ledger.call("POST", "/rollouts/failures", {"failures": [failure]}))
    ok(await ledger.open())
    ok(await ledger.call("POST", "/updates/u/abort", {"owner": "t-1", "reason": "NaN"}))
    ok(await ledger.prepare(1, 0))
    await ledger.call("POST", "/policies/1/commit")
    ok(await ledger.activation(1))
    body = {"incarnation": "w-1", "version": 1, "stage": "verify", "message": "another hash"}
    ok(await ledger.call("POST", "/workers/w/failures", body))
    ok(await ledger.call("POST", "/activations/act-1/give-up", {"reason": "enough"}))
    await settle(ledger)
    everything = (await ledger.get("/failures"))["failures"]
    about = ("rollout_id", "update_id", "version", "worker_id")
    assert [(f["stage"], f["kind"], f["message"], *(f[name] for name in about)) for f in everything] == [
        ("reward", "timeout", "slow", "r", None, None, None),
        ("reward", "error", "crashed", "r", None, None, None),
        ("generation", "out_of_memory", "40 GiB", "f", None, None, "w"),
        ("update", "aborted", "NaN", None, "u", None, None),
        ("artifact", "artifact_not_committed", "missing or changed: a/w.bin", None, None, 1, None),
        ("distribution", "verify", "another hash", None, None, 1, "w"),
        ("activation", "given_up", "enough", None, None, 1, None),
    ]
    for stage in ("generation", "reward", "update", "artifact", "distribution", "activation"):
        of_stage = (await ledger.get(f"/failures?stage={stage}"))["failures"]
        assert of_stage == [f for f in everything if f["stage"] == stage] != []
    one = await ledger.get("/failures?limit=1&stage=reward")
    two = await ledger.get(f"/failures?limit=1&stage=reward&after={one['next_after']}")
    assert [f["kind"] for f in one["failures"] + two["failures"]] == ["timeout", "error"]
    assert (await ledger.get(f"/failures?stage=reward&after={two['next_after']}"))["failures"] == []
    refused(await ledger.call("GET", "/failures?stage=weather"), 422, "invalid_request")


async def test_tokens_in_bulk_are_the_same_from_json_and_from_arrow(ledger: Ledger) -> None:
    await ledger.submit(
        ledger.rollout("a"),
        ledger.rollout("b", index=1, token_ids=[9, 8, 7], action_mask=[False, True, True],
                       behavior_log_probs=[0.25, BEHAVIOR, -1e-3],
                       spans=[{"version": 0, "artifact_hash": ledger.hashes[0], "start": 1, "end": 3}]),
        ledger.rollout("c", "h", version=9),
    )  # fmt: skip
    body = {"rollout_ids": ["c", "none", "b", "a", "none", "gone"]}
    answer = ok(await ledger.call("POST", "/rollouts/evidence", body))
    assert [r["rollout_id"] for r in answer["rollouts"]] == ["c", "b", "a"]
    assert answer["missing"] == ["none", "gone"]
    assert answer["rollouts"][1]["token_ids"] == [9, 8, 7]
    assert answer["rollouts"][1]["action_mask"] == [False, True, True]
    assert answer["rollouts"][1]["behavior_log_probs"][0] == 0.25
    assert answer["rollouts"][2]["behavior_log_probs"][:3] == [None] * 3
    for one in answer["rollouts"]:
        assert one == await ledger.get(f"/rollouts/{one['rollout_id']}/evidence")
    accept = {"accept": ARROW_MEDIA_TYPE}
    response = await ledger.call("POST", "/rollouts/evidence", body, headers=accept)
    assert response.headers["content-type"] == ARROW_MEDIA_TYPE
    assert decode_evidence(response.content).to_model().model_dump(mode="json") == answer
    none = await ledger.call("POST", "/rollouts/evidence", {"rollout_ids": ["none"]}, headers=accept)
    assert decode_evidence(none.content).to_model().model_dump(mode="json") == {"rollouts": [], "missing": ["none"]}
    refused(await ledger.call("POST", "/rollouts/evidence", {"rollout_ids": []}), 422, "invalid_request")
    refused(await ledger.call("POST", "/rollouts/evidence", {"rollout_ids": ["a/b"]}), 422, "invalid_request")


async def test_one_run_is_never_read_in_another(mixed: Ledger) -> None:
    other = await Ledger.create(mixed.api, "other")
    assert (await other.get("/rollouts"))["rollouts"] == []
    assert (await other.get("/audit"))["entries"] == []
    assert (await other.get("/failures"))["failures"] == []
    assert ok(await other.call("POST", "/rollouts/evidence", {"rollout_ids": ["a"]}))["missing"] == ["a"]
    refused(await other.call("GET", "/rollouts/a"), 404, "rollout_unknown")
    assert other.hashes[0] != H


async def test_updates_and_failures_are_listed_from_the_newest_too(ledger: Ledger) -> None:
    for name in ("u1", "u2", "u3"):
        ok(await ledger.open(name))
        ok(await ledger.call("POST", f"/updates/{name}/abort", {"owner": "t-1", "reason": "x"}))
    await settle(ledger)
    updates = await ledger.get("/updates?newest_first=true&limit=2")
    assert [update["update_id"] for update in updates["updates"]] == ["u3", "u2"]
    first = await ledger.get("/failures?newest_first=true&limit=2")
    assert [failure["update_id"] for failure in first["failures"]] == ["u3", "u2"]
    rest = await ledger.get(f"/failures?newest_first=true&after={first['next_after']}")
    assert [failure["update_id"] for failure in rest["failures"]] == ["u1"]
    end = await ledger.get(f"/failures?newest_first=true&after={rest['next_after']}")
    assert (end["failures"], end["next_after"]) == ([], rest["next_after"])
