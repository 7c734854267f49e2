"""Who is suspect: a worker by what it sends, by what it drifts, and a trainer whose every worker drifts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.ledger import Api, Ledger, ok, refused


async def suspect(ledger: Ledger, worker: str = "w") -> str | None:
    found = {w["worker_id"]: w["suspect_reason"] for w in (await ledger.get("/workers"))["workers"]}
    reason: str | None = found[worker]
    return reason


async def rejections(ledger: Ledger) -> list[tuple[str, str, str, int]]:
    rows = await ledger.api.rows("SELECT worker_id, incarnation, reason, n FROM rejections ORDER BY 1, 2, 3")
    return [tuple(row) for row in rows]


async def test_rejections_are_counted_by_worker_and_reason(ledger: Ledger) -> None:
    await ledger.worker("v")
    await ledger.api.token("gpu", "worker", "run", "w")
    r = ledger.rollout
    await ledger.submit(
        r("a", index=9), r("b", index=9), r("c", action_mask=[False] * 6), r("good"),
        r("d", index=9, worker_id="v", incarnation="v-1"), r("e", index=9, worker_id="stranger", incarnation="x"),
        {"rollout_id": "f"},
    )  # fmt: skip
    body = {"rollouts": [r("g", worker_id="v"), {"rollout_id": "h"}]}
    ok(await ledger.call("POST", "/rollouts", body, who="gpu"))
    assert await rejections(ledger) == [
        ("admin:admin", "", "missing_field", 1),
        ("stranger", "", "sample_index_out_of_range", 1),
        ("v", "v-1", "sample_index_out_of_range", 1),
        ("w", "w-1", "missing_field", 1),
        ("w", "w-1", "no_action_token", 1),
        ("w", "w-1", "sample_index_out_of_range", 2),
        ("w", "w-1", "wrong_worker", 1),
    ]


async def test_a_worker_is_suspect_from_its_tenth_rejection_on(ledger: Ledger) -> None:
    """Of any reasons together; the last one is told. It refuses nothing."""
    await ledger.submit(*(ledger.rollout(f"a{n}", index=9) for n in range(8)))
    await ledger.submit(ledger.rollout("b", action_mask=[False] * 6))
    assert await suspect(ledger) is None
    await ledger.submit(ledger.rollout("c", token_ids=[1, 2, 3, 4, 100, 6]))
    reason = await suspect(ledger)
    assert reason is not None
    assert reason.startswith("10 rollouts rejected, last: token_ids[4] is 100")
    assert (await ledger.get("/diagnosis"))["producers"]["suspect"] == ["w"]
    await ledger.group("g")
    ok(await ledger.open())
    assert await ledger.reserve("g:0", "g:1") == ["reserved"] * 2


async def test_duplicates_and_conflicts_are_no_rejections(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("r"))
    for _ in range(6):
        await ledger.submit(ledger.rollout("r"), ledger.rollout("r", task_id="other"))
    assert (await rejections(ledger), await suspect(ledger)) == ([], None)


async def test_a_new_incarnation_begins_clean(ledger: Ledger) -> None:
    await ledger.submit(*(ledger.rollout(f"a{n}", index=9) for n in range(10)))
    assert await suspect(ledger) is not None
    await ledger.worker("w", "w-2")
    assert await suspect(ledger) is None
    await ledger.submit(*(ledger.rollout(f"b{n}", index=9) for n in range(9)))
    assert await suspect(ledger) is None
    assert [row[1:] for row in await rejections(ledger)] == [
        ("w-1", "sample_index_out_of_range", 10), ("w-2", "sample_index_out_of_range", 9),
    ]  # fmt: skip


async def ledger_of(api: Api, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, **({"group_size": 1} | settings))
    await ledger.worker()
    return ledger


async def score(ledger: Ledger, shifts: dict[str, float], update: str = "u", **more: Any) -> Any:
    """Reserves rollouts, each with its log-probs moved by its own shift."""
    rollouts = [
        {"rollout_id": r, "revision": 1, "current_log_probs": [None] * 3 + [-0.5 - shift] * 3}
        for r, shift in shifts.items()
    ]
    body = {"owner": "t-1", "after_commit_no": 0, "rollouts": rollouts} | more
    return await ledger.call("POST", f"/updates/{update}/reserve", body)


def verdicts(answer: Any) -> list[str]:
    return [v["verdict"] for v in ok(answer)["verdicts"]]


async def singles(ledger: Ledger, *names: str, **changes: Any) -> None:
    await ledger.submit(*(ledger.rollout(n, n, **changes) for n in names))
    for name in names:
        assert (await ledger.reward(name))["verdict"] == "stored"


async def test_mean_drift_above_a_tenth_over_eight_fresh_rollouts_marks_the_worker_and_refuses_nothing(
    api: Api,
) -> None:
    ledger = await ledger_of(api)
    names = [f"r{n}" for n in range(9)]
    await singles(ledger, *names)
    ok(await ledger.open())
    assert verdicts(await score(ledger, dict.fromkeys(names[:7], 0.15))) == ["reserved"] * 7
    assert await suspect(ledger) is None
    assert verdicts(await score(ledger, {names[7]: 0.15})) == ["reserved"]
    assert await suspect(ledger) == "mean drift 0.1500 over 8 fresh rollouts"
    assert verdicts(await score(ledger, {names[8]: 0.15})) == ["reserved"]
    [worker] = (await ledger.get("/workers"))["workers"]
    assert (worker["state"], worker["fenced"]) == ("live", False)
    await ledger.worker("w", "w-2")
    assert await suspect(ledger) is None


async def test_a_healthy_gap_between_engine_and_trainer_marks_nobody(api: Api) -> None:
    ledger = await ledger_of(api)
    names = [f"r{n}" for n in range(10)]
    await singles(ledger, *names)
    ok(await ledger.open())
    shifts = dict.fromkeys(names, 0.04) | {names[0]: 0.19}
    assert verdicts(await score(ledger, shifts)) == ["reserved"] * 10
    assert await suspect(ledger) is None


async def test_only_drift_at_lag_0_speaks_of_the_worker(api: Api) -> None:
    """What is a version behind drifts because the policy moved."""
    ledger = await ledger_of(api)
    names = [f"r{n}" for n in range(10)]
    await singles(ledger, *names)
    await ledger.activate(1, 0)
    ok(await ledger.open(version=1))
    assert verdicts(await score(ledger, dict.fromkeys(names, 0.19))) == ["reserved"] * 10
    assert await suspect(ledger) is None


async def test_what_was_refused_for_its_drift_counts_and_a_retry_does_not_count_again(api: Api) -> None:
    ledger = await ledger_of(api)
    await ledger.worker("v")
    names = [f"r{n}" for n in range(8)]
    await singles(ledger, *names)
    ok(await ledger.open())
    shifts = dict.fromkeys(names[:4], 0.5) | dict.fromkeys(names[4:], 0.0)
    for _ in range(3):
        await score(ledger, shifts, confirm_drift=True)
    [row] = await api.rows("SELECT worker_id, incarnation, n, total FROM worker_drift")
    assert (row.worker_id, row.incarnation, row.n, round(row.total, 6)) == ("w", "w-1", 8, 2.0)
    assert await suspect(ledger) == "mean drift 0.2500 over 8 fresh rollouts"


async def two_workers(api: Api) -> Ledger:
    """Four rollouts of each of two workers."""
    ledger = await ledger_of(api)
    await ledger.worker("v")
    await singles(ledger, *(f"w{n}" for n in range(4)))
    await singles(ledger, *(f"v{n}" for n in range(4)), worker_id="v", incarnation="v-1")
    ok(await ledger.open())
    return ledger


def shifts_of(w: int, v: int) -> dict[str, float]:
    """So many of each worker's rollouts drift."""
    return {f"{name}{n}": float(n < over) for name, over in (("w", w), ("v", v)) for n in range(4)}


@pytest.mark.parametrize(("w", "v"), [(4, 4), (3, 3), (3, 4)])
async def test_when_most_of_every_worker_drifts_the_trainer_is_suspect(api: Api, w: int, v: int) -> None:
    ledger = await two_workers(api)
    before = await api.rows("SELECT * FROM rollouts ORDER BY rollout_id")
    problem = refused(await score(ledger, shifts_of(w, v)), 409, "drift_suspect")
    assert f"{w + v} of 8" in problem["detail"]
    assert await api.rows("SELECT * FROM rollouts ORDER BY rollout_id") == before
    assert await api.rows("SELECT 1 FROM worker_drift LIMIT 1") == []
    assert await api.rows("SELECT 1 FROM update_members LIMIT 1") == []
    confirmed = verdicts(await score(ledger, shifts_of(w, v), confirm_drift=True))
    assert (confirmed.count("policy_drift"), confirmed.count("reserved")) == (w + v, 8 - w - v)


@pytest.mark.parametrize(("w", "v"), [(4, 0), (4, 2), (2, 2), (0, 3)])
async def test_a_single_sick_worker_makes_no_suspect_of_the_trainer(api: Api, w: int, v: int) -> None:
    """Its rollouts are quarantined, the other's are taken. Exactly half is not more than half."""
    ledger = await two_workers(api)
    answer = await score(ledger, shifts_of(w, v))
    expected = ["policy_drift" if shift else "reserved" for shift in shifts_of(w, v).values()]
    assert verdicts(answer) == expected


async def test_a_retry_is_judged_as_the_first_call_was(api: Api) -> None:
    """The sick worker's eight are replayed and the other's are bound already: that is no suspect trainer."""
    ledger = await ledger_of(api)
    await ledger.worker("v")
    sick, well = [f"w{n}" for n in range(8)], [f"v{n}" for n in range(8)]
    await singles(ledger, *sick)
    await singles(ledger, *well, worker_id="v", incarnation="v-1")
    ok(await ledger.open())
    shifts = dict.fromkeys(sick, 1.0) | dict.fromkeys(well, 0.0)
    assert verdicts(await score(ledger, shifts)) == ["policy_drift"] * 8 + ["reserved"] * 8
    assert verdicts(await score(ledger, shifts)) == ["policy_drift"] * 8 + ["idempotent_retry"] * 8


async def test_fewer_than_eight_that_reach_the_check_make_no_suspect(api: Api) -> None:
    """Seven that drift are quarantined, though an eighth was named: it did not reach the drift check."""
    ledger = await two_workers(api)
    await ledger.reserve("v3")
    others = {name: 1.0 for name in shifts_of(4, 4) if name != "v3"} | {"v3": 0.0}
    assert verdicts(await score(ledger, others)) == ["policy_drift"] * 7 + ["idempotent_retry"]


@pytest.mark.parametrize("gate", ["observe", "off"])
async def test_a_gate_that_does_not_enforce_suspects_no_trainer(api: Api, gate: str) -> None:
    ledger = await ledger_of(api, drift_gate=gate)
    names = [f"r{n}" for n in range(8)]
    await singles(ledger, *names)
    ok(await ledger.open())
    assert verdicts(await score(ledger, dict.fromkeys(names, 1.0))) == ["reserved"] * 8
    members = (await ledger.get("/updates/u/lineage"))["members"]
    assert {m["would_refuse"] for m in members} == {"policy_drift"}
