"""How far each token moved, as every update that measured a rollout found it: in float16, one for each token."""

from __future__ import annotations

from typing import Any

import numpy as np

from coordinator.rollouts import retention
from tests.api.ledger import BEHAVIOR, Api, Json, Ledger, ok, refused


async def differences(ledger: Ledger, rollout_id: str) -> list[Json]:
    answer = await ledger.get(f"/rollouts/{rollout_id}/differences")
    assert answer["rollout_id"] == rollout_id
    measured: list[Json] = answer["measured"]
    return measured


async def reserve(ledger: Ledger, currents: dict[str, list[float]], update: str = "u", revision: int = 1) -> list[str]:
    """Reserves these with the log-probs of their three action tokens; the masked ones are nonsense."""
    body: dict[str, Any] = {
        "owner": "t-1",
        "after_commit_no": 0,
        "rollouts": [
            {"rollout_id": r, "revision": revision, "current_log_probs": [None, 77.0, -1e300, *current]}
            for r, current in currents.items()
        ],
    }
    answer = ok(await ledger.call("POST", f"/updates/{update}/reserve", body))
    return [verdict["verdict"] for verdict in answer["verdicts"]]


async def test_each_action_token_of_whatever_was_measured_has_its_difference(api: Api) -> None:
    ledger = await Ledger.create(api, min_usable=1)
    await ledger.worker()
    near, far = await ledger.group("g")
    ok(await ledger.open())
    assert await differences(ledger, near) == []
    currents = {near: [-0.5123456, -0.4, -0.5], far: [-9.123456, -0.25, -1e300]}
    verdicts = ["reserved", "policy_drift"]
    assert await reserve(ledger, currents) == verdicts
    first = {rollout_id: await differences(ledger, rollout_id) for rollout_id in currents}
    for (rollout_id, current), verdict in zip(currents.items(), verdicts, strict=True):
        [found] = first[rollout_id]
        exact = np.array(current) - BEHAVIOR
        stored = np.clip(exact, -65504, 65504).astype(np.float16).tolist()
        assert found["differences"] == [None, None, None, *stored]
        assert (found["update_id"], found["revision"], found["verdict"]) == ("u", 1, verdict)
        assert found["drift"] == np.abs(exact).mean()
    # A retry is answered the same and stores nothing again, whatever log-probs it brings.
    assert await reserve(ledger, {near: [-0.5] * 3, far: [-0.5] * 3}) == ["idempotent_retry", "policy_drift"]
    assert {rollout_id: await differences(ledger, rollout_id) for rollout_id in currents} == first
    stored_bytes = await api.rows("SELECT octet_length(differences) AS n FROM token_differences")
    assert [row.n for row in stored_bytes] == [6, 6]


async def test_every_update_that_measured_it_is_told_and_so_are_those_that_fell(api: Api) -> None:
    ledger = await Ledger.create(api, max_drift=0.2)
    await ledger.worker()
    near, far = await ledger.group("g")
    ok(await ledger.open("u1"))
    # Both are needed: the near one falls with the far one.
    assert await reserve(ledger, {near: [-0.5] * 3, far: [-2.0] * 3}, "u1") == ["group_refused", "policy_drift"]
    assert [m["differences"][3:] for m in await differences(ledger, near)] == [[0.0] * 3]
    body = {"update_id": "u1", "reason": "policy_drift"}
    assert {v["verdict"] for v in ok(await ledger.call("POST", "/rollouts/release", body))["verdicts"]} == {"released"}
    # Released, the same update may measure them again, and so may a later one.
    assert await reserve(ledger, {near: [-0.5] * 3, far: [-3.0] * 3}, "u1", 3) == ["group_refused", "policy_drift"]
    ok(await ledger.call("POST", "/rollouts/release", body))
    ok(await ledger.open("u2"))
    assert await reserve(ledger, {near: [-0.625] * 3, far: [-0.625] * 3}, "u2", 5) == ["reserved"] * 2
    found = [(m["update_id"], m["revision"], m["verdict"], m["differences"][5]) for m in await differences(ledger, far)]
    assert found == [
        ("u1", 1, "policy_drift", -1.5),
        ("u1", 3, "policy_drift", -2.5),
        ("u2", 5, "reserved", -0.125),
    ]


async def test_a_call_that_moves_nothing_keeps_nothing(api: Api) -> None:
    ledger = await Ledger.create(api)
    await ledger.worker()
    ids = await ledger.group("g")
    ok(await ledger.open())
    assert await reserve(ledger, dict.fromkeys(ids, [-0.5] * 3), revision=7) == ["revision_conflict"] * 2
    refused(await ledger.try_reserve(ids[0]), 422, "partial_group")
    assert await api.rows("SELECT 1 FROM token_differences") == []


async def test_where_no_drift_is_measured_there_is_none(api: Api) -> None:
    ledger = await Ledger.create(api, drift_gate="off")
    await ledger.worker()
    ids = await ledger.group("g")
    ok(await ledger.open())
    asked = {"owner": "t-1", "groups": 1, "reserve": True, "after_commit_no": 0}
    assert len(ok(await ledger.call("POST", "/updates/u/candidates", asked))["reserved"]) == 2
    assert await differences(ledger, ids[0]) == []
    # Unasked, log-probs may come all the same, and are measured.
    more = await ledger.group("h")
    assert await ledger.reserve(*more, shift=0.5) == ["reserved"] * 2
    assert [m["differences"][3:] for m in await differences(ledger, more[0])] == [[0.5] * 3]


async def test_they_go_with_the_tokens(api: Api) -> None:
    ledger = await Ledger.create(api, evidence_retention_seconds=0.001, rewind_commits=0)
    await ledger.worker()
    gone, live = await ledger.group("gone"), await ledger.group("live")
    ok(await ledger.open())
    assert await ledger.reserve(*gone) == ["reserved"] * 2
    ok(await ledger.commit())
    ok(await ledger.open("v"))
    assert await ledger.reserve(*live, update="v", after=1) == ["reserved"] * 2
    assert await retention.sweep(api.database) == {"run": 2}
    refused(await ledger.call("GET", f"/rollouts/{gone[0]}/differences"), 404, "rollout_unknown")
    assert len(await differences(ledger, live[0])) == 1
    left = await api.rows("SELECT rollout_id FROM token_differences ORDER BY rollout_id")
    assert [row.rollout_id for row in left] == live


async def test_they_go_with_the_row(api: Api) -> None:
    ledger = await Ledger.create(api, rollout_retention_seconds=0.001, rewind_commits=0)
    await ledger.worker()
    ids = await ledger.group("g")
    ok(await ledger.open())
    assert await ledger.reserve(*ids) == ["reserved"] * 2
    ok(await ledger.commit())
    assert await retention.sweep(api.database) == {"run": 2}
    assert await api.rows("SELECT 1 FROM token_differences") == []
    refused(await ledger.call("GET", f"/rollouts/{ids[0]}/differences"), 404, "rollout_unknown")
