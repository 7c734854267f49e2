"""What an operator lists: updates by page and state, and the quarantine by what can be released at once."""

from __future__ import annotations

from sqlalchemy import text

from coordinator.clocks import ONE_SWEEPER
from tests.api.ledger import Ledger, ok, refused


async def test_updates_are_paged_from_either_end_and_filtered_by_state(ledger: Ledger) -> None:
    for number in range(3):
        ok(await ledger.open(f"u{number}"))
    ok(await ledger.call("POST", "/updates/u1/abort", {"owner": "t-1", "reason": "no"}))

    async def listed(query: str) -> tuple[list[str], str | None]:
        answer = await ledger.get(f"/updates?{query}")
        return [update["update_id"] for update in answer["updates"]], answer["next_after"]

    assert await listed("") == (["u0", "u1", "u2"], None)
    assert await listed("limit=2") == (["u0", "u1"], "u1")
    assert await listed("limit=2&after=u1") == (["u2"], None)
    assert await listed("newest_first=true&limit=2") == (["u2", "u1"], "u1")
    assert await listed("newest_first=true&limit=2&after=u1") == (["u0"], None)
    assert await listed("state=open") == (["u0", "u2"], None)
    assert await listed("state=aborted&newest_first=true") == (["u1"], None)
    refused(await ledger.call("GET", "/updates?after=none"), 404, "update_unknown")
    refused(await ledger.call("GET", "/updates?state=gone"), 422, "invalid_request")


async def test_an_update_whose_lease_ended_is_listed_as_expired_before_anybody_tidied_up(ledger: Ledger) -> None:
    engine = ledger.api.database.engine
    ok(await ledger.open("late"))
    async with engine.begin() as sweeper:
        await sweeper.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ONE_SWEEPER})  # no sweep meanwhile
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE updates SET lease_until = clock_timestamp() - interval '1 s'"))
        assert [row.state for row in await ledger.api.rows("SELECT state FROM updates")] == ["open"]
        assert [u["update_id"] for u in (await ledger.get("/updates?state=expired"))["updates"]] == ["late"]
        assert (await ledger.get("/updates?state=open"))["updates"] == []


async def test_the_quarantine_is_counted_by_what_one_call_releases(ledger: Ledger) -> None:
    assert (await ledger.get("/quarantine"))["entries"] == []
    unknown = [ledger.rollout(f"x{i}", f"x{i}", 0, version=7) for i in range(3)]
    assert {v["reason"] for v in await ledger.submit(*unknown)} == {"policy_unknown"}
    drifted = [*await ledger.group("a"), *await ledger.group("b")]
    ok(await ledger.open("u1"))
    verdicts = ok(await ledger.try_reserve(*drifted, update="u1", shift=1.0))["verdicts"]
    assert {v["verdict"] for v in verdicts} == {"policy_drift"}
    held = await ledger.group("c")
    ok(await ledger.open("u2"))
    assert set(await ledger.reserve(*held, update="u2")) == {"reserved"}
    ok(await ledger.call("POST", "/updates/u2/abort", {"owner": "t-1", "reason": "nan", "quarantine": True}))
    entries = (await ledger.get("/quarantine"))["entries"]
    assert [(e["reason"], e["update_id"], e["rollouts"]) for e in entries] == [
        ("update_aborted", "u2", 2),
        ("policy_drift", "u1", 4),
        ("policy_unknown", None, 3),
    ]
    assert all(e["since"] <= e["until"] for e in entries)
    assert [e["reason"] for e in (await ledger.get("/quarantine?limit=1"))["entries"]] == ["update_aborted"]
    for entry in entries[:2]:
        body = {"update_id": entry["update_id"], "reason": entry["reason"]}
        answer = ok(await ledger.call("POST", "/rollouts/release", body))
        assert [v["verdict"] for v in answer["verdicts"]] == ["released"] * entry["rollouts"]
    assert [e["reason"] for e in (await ledger.get("/quarantine"))["entries"]] == ["policy_unknown"]
