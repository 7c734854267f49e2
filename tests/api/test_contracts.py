"""The generation contract: another one is rejected or kept apart, and nothing ever holds two."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.rules.identity import canonical_hash
from coordinator.wire.runs import GenerationContract
from tests.api.ledger import CONTRACT, Api, Json, Ledger, ok

WARM: Json = CONTRACT | {"temperature": 0.7}
OTHERS: Json = {
    "tokenizer_hash": "0" * 64, "chat_template_hash": "0" * 64, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
    "min_p": 0.1, "logprobs_mode": "processed", "dtype": "bfloat16",
}  # fmt: skip


def hash_of(contract: Json) -> str:
    return canonical_hash(GenerationContract.model_validate(contract).model_dump())


async def ledger_of(api: Api, other_contract: str = "keep_apart", **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, other_contract=other_contract, **settings)
    await ledger.worker()
    return ledger


def test_the_table_below_names_every_part_of_the_contract() -> None:
    assert OTHERS.keys() == GenerationContract.model_fields.keys()


@pytest.mark.parametrize("field", OTHERS)
async def test_any_difference_rejects_and_names_the_field(ledger: Ledger, field: str) -> None:
    body = ledger.rollout("r", contract=CONTRACT | {field: OTHERS[field]})
    [verdict] = await ledger.submit(body)
    assert (verdict["verdict"], verdict["reason"]) == ("rejected", "contract_mismatch")
    assert f"contract.{field} is {OTHERS[field]}" in verdict["detail"]
    assert await ledger.api.rows("SELECT rollout_id FROM rollouts") == []


async def test_what_is_recorded_beside_the_contract_is_no_part_of_it(ledger: Ledger) -> None:
    generation = {"seed": 7, "max_tokens": 3, "stop": ["x"], "finish_reason": "stop", "engine": "e"}
    verdicts = await ledger.submit(
        ledger.rollout("a", generation=generation),
        ledger.rollout("b", index=1, generation=generation | {"seed": 8, "engine_version": "2"}),
    )
    assert [v["verdict"] for v in verdicts] == ["accepted", "accepted"]
    hashes = {(await ledger.get(f"/rollouts/{r}"))["contract_hash"] for r in ("a", "b")}
    assert hashes == {ledger.view["contract_hash"]} == {hash_of(CONTRACT)}


async def test_kept_apart_means_stored_under_its_own_hash(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.group("own")
    await ledger.group("warm", contract=WARM)
    assert (await ledger.get("/rollouts/own:0"))["contract_hash"] == hash_of(CONTRACT)
    assert (await ledger.get("/rollouts/warm:0"))["contract_hash"] == hash_of(WARM)
    [row] = await api.rows("SELECT contract FROM contracts WHERE contract_hash = :h", h=hash_of(WARM))
    assert row.contract == GenerationContract.model_validate(WARM).model_dump()


@pytest.mark.parametrize("first", [CONTRACT, WARM])
async def test_a_member_under_another_contract_than_its_group_s_is_rejected(api: Api, first: Json) -> None:
    ledger = await ledger_of(api)
    other = WARM if first is CONTRACT else CONTRACT
    await ledger.submit(ledger.rollout("a", contract=first))
    [late] = await ledger.submit(ledger.rollout("b", index=1, contract=other))
    assert (late["verdict"], late["reason"], late["state"]) == ("rejected", "contract_mismatch", None)
    assert "group g" in late["detail"]
    [fits] = await ledger.submit(ledger.rollout("b", index=1, contract=first))
    assert fits["verdict"] == "accepted"


async def test_within_one_batch_the_first_gives_a_group_its_contract(api: Api) -> None:
    ledger = await ledger_of(api)
    r = ledger.rollout
    verdicts = await ledger.submit(
        r("a", contract=WARM),
        r("b", index=1),
        r("b", index=1),
        r("b", index=1, contract=WARM),
        r("c", "h"),
        r("d", "h", index=1, contract=WARM),
        r("e", "i", contract=WARM),
    )
    assert [(v["verdict"], v["reason"]) for v in verdicts] == [
        ("accepted", None), ("rejected", "contract_mismatch"), ("rejected", "contract_mismatch"), ("accepted", None),
        ("accepted", None), ("rejected", "contract_mismatch"), ("accepted", None),
    ]  # fmt: skip
    stored = await api.rows("SELECT rollout_id FROM rollouts ORDER BY 1")
    assert [row.rollout_id for row in stored] == ["a", "b", "c", "e"]


async def test_a_group_that_a_failed_generation_made_takes_the_contract_of_its_first_rollout(api: Api) -> None:
    ledger = await ledger_of(api, group_size=3)
    failure = {
        "rollout_id": "f", "task_id": "t", "task_source": "s", "group_id": "g", "sample_index": 0, "worker_id": "w",
        "incarnation": "w-1", "message": "out of memory",
    }  # fmt: skip
    ok(await ledger.call("POST", "/rollouts/failures", {"failures": [failure]}))
    assert (await ledger.get("/rollouts/f"))["contract_hash"] is None
    first, other = await ledger.submit(
        ledger.rollout("a", index=1, contract=WARM), ledger.rollout("b", index=2, contract=CONTRACT)
    )
    assert (first["verdict"], other["verdict"], other["reason"]) == ("accepted", "rejected", "contract_mismatch")


async def test_one_candidates_answer_holds_one_contract_and_names_it(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.group("a", contract=WARM)
    await ledger.group("b")
    await ledger.group("c", contract=WARM)
    ok(await ledger.open())
    first = await ledger.candidates()
    assert (first["groups"], first["contract_hash"]) == (["a", "c"], hash_of(WARM))
    ok(await ledger.open("v", owner="t-2"))
    second = await ledger.candidates("v", owner="t-2")
    assert (second["groups"], second["contract_hash"]) == (["b"], hash_of(CONTRACT))
    ok(await ledger.open("w", owner="t-3"))
    assert (await ledger.candidates("w", owner="t-3"))["contract_hash"] is None


async def test_one_update_holds_one_contract(api: Api) -> None:
    """What it reserved first decides; the other contract moves nothing, and is not offered any more."""
    ledger = await ledger_of(api)
    await ledger.group("own")
    await ledger.group("warm", contract=WARM)
    ok(await ledger.open())
    assert await ledger.reserve("warm:0", "warm:1") == ["reserved"] * 2
    answer = ok(await ledger.try_reserve("own:0", "own:1"))
    assert [(v["verdict"], v["state"], v["revision"]) for v in answer["verdicts"]] == [
        ("contract_mismatch", "rewarded", 1)
    ] * 2
    assert answer["groups"] == [{"group_id": "own", "usable": 0, "refused_rewards": {"own:0": 0.0, "own:1": 1.0}}]
    assert await ledger.state("own:0") == ("rewarded", None, 1)
    assert (await ledger.get("/updates/u/lineage"))["refusals"] == []
    empty = (await ledger.candidates())["empty"]
    assert empty["reason"] == "other_contract"
    ok(await ledger.open("v"))
    assert await ledger.reserve("own:0", "own:1", update="v") == ["reserved"] * 2


async def test_within_one_reservation_the_first_contract_decides(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.group("own")
    await ledger.group("warm", contract=WARM)
    ok(await ledger.open())
    assert await ledger.reserve("warm:0", "own:0", "warm:1", "own:1") == [
        "reserved", "contract_mismatch", "reserved", "contract_mismatch",
    ]  # fmt: skip


async def test_a_call_that_bound_nothing_pins_no_contract(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.group("warm", contract=WARM)
    await ledger.group("own")
    ok(await ledger.open())
    assert await ledger.reserve("warm:0", "warm:1", shift=1.0, confirm_drift=True) == ["policy_drift"] * 2
    assert await ledger.reserve("own:0", "own:1") == ["reserved"] * 2


async def test_the_audit_of_a_reservation_has_the_contract(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.group("warm", contract=WARM)
    await ledger.group("own")
    ok(await ledger.open())
    ok(await ledger.open("v"))
    await ledger.reserve("warm:0", "warm:1")
    await ledger.reserve("own:0", "own:1", update="v")
    rows = await api.rows("SELECT rollout_id, contract_hash FROM rollout_audit WHERE event = 'reserve' ORDER BY 1")
    assert [(r.rollout_id, r.contract_hash) for r in rows] == [
        ("own:0", hash_of(CONTRACT)), ("own:1", hash_of(CONTRACT)), ("warm:0", hash_of(WARM)),
        ("warm:1", hash_of(WARM)),
    ]  # fmt: skip
