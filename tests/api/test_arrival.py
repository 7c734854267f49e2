"""What a rollout must carry, and what becomes of one that arrives whole but may not be used."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.api.ledger import CONTRACT, H, Json, Ledger, ok

SPAN = {"version": 0, "artifact_hash": H, "start": 0, "end": 6}


@pytest.mark.parametrize(
    ("changes", "reason", "named"),
    [
        ({"rollout_id": None}, "invalid_field", "rollout_id"),
        ({"rollout_id": "a/b"}, "invalid_field", "rollout_id"),
        ({"task_id": ""}, "invalid_field", "task_id"),
        ({"sample_index": -1}, "invalid_field", "sample_index"),
        ({"sample_index": True}, "invalid_field", "sample_index"),
        ({"sample_index": 2}, "sample_index_out_of_range", "group of 2"),
        ({"attempt": 1}, "attempt_out_of_range", "attempt 1"),
        ({"colour": "red"}, "invalid_field", "colour"),
        ({"span_source": "guess"}, "invalid_field", "span_source"),
        ({"worker_id": "a/b"}, "invalid_field", "worker_id"),
        ({"incarnation": ""}, "invalid_field", "incarnation"),
        ({"contract": {k: v for k, v in CONTRACT.items() if k != "dtype"}}, "missing_field", "contract.dtype"),
        ({"contract": CONTRACT | {"colour": "red"}}, "invalid_field", "contract.colour"),
        ({"generation": {"colour": "red"}}, "invalid_field", "generation.colour"),
        ({"spans": []}, "invalid_field", "spans"),
        ({"spans": None}, "invalid_field", "spans"),
        ({"spans": [{k: v for k, v in SPAN.items() if k != "artifact_hash"}]}, "missing_field", "artifact_hash"),
        ({"spans": [SPAN | {"version": "0"}]}, "invalid_field", "spans.0.version"),
        ({"spans": [SPAN | {"end": 5}]}, "spans_malformed", "token at 5"),
        ({"spans": [SPAN | {"end": 7}]}, "spans_malformed", "over 6 tokens"),
        ({"spans": [SPAN | {"end": 4}, SPAN | {"start": 3}]}, "spans_malformed", "inside the span before"),
        ({"spans": [SPAN, SPAN | {"start": 6, "end": 6}]}, "spans_malformed", "[6, 6)"),
        ({"contract": CONTRACT | {"top_p": 0.9}}, "contract_mismatch", "contract.top_p"),
        ({"contract": CONTRACT | {"tokenizer_hash": "0" * 64}}, "contract_mismatch", "tokenizer_hash"),
        ({"contract": CONTRACT | {"logprobs_mode": "processed"}}, "contract_mismatch", "logprobs_mode"),
        ({"token_ids": [1, 2, 3, 4, 5]}, "lengths_differ", "5 entries"),
        ({"action_mask": [False] * 6}, "no_action_token", "no action token"),
        ({"action_mask": [True] + [False] * 5}, "action_at_start", "action_mask[0]"),
        ({"action_mask": [0, 0, 0, 1, 1, 1]}, "invalid_field", "action_mask"),
        ({"behavior_log_probs": [None] * 3 + [-1.0, None, -1.0]}, "log_prob_not_finite", "behavior_log_probs[4]"),
        ({"behavior_log_probs": [None] * 3 + [-1.0, -1.0, 1e39]}, "log_prob_not_finite", "behavior_log_probs[5]"),
        ({"behavior_log_probs": [None] * 3 + [-1.0, 0.01, -1.0]}, "log_prob_above_zero", "behavior_log_probs[4]"),
        ({"token_ids": [1, 2, 3, 4, 100, 6]}, "token_id_out_of_range", "token_ids[4]"),
        ({"token_ids": [1, 2, 3, 4, -1, 6]}, "token_id_out_of_range", "token_ids[4]"),
        ({"token_ids": [1, 2, 3, 4, 2**40, 6]}, "invalid_field", "token_ids.4"),
    ],
)
async def test_a_rollout_that_is_not_whole_is_rejected_and_leaves_no_row(
    ledger: Ledger, changes: Json, reason: str, named: str
) -> None:
    verdict, other = await ledger.submit(ledger.rollout("bad", "h") | changes, ledger.rollout("good"))
    assert (verdict["verdict"], verdict["reason"]) == ("rejected", reason), verdict
    assert named in verdict["detail"]
    assert other["verdict"] == "accepted"
    assert [r.rollout_id for r in await ledger.api.rows("SELECT rollout_id FROM rollouts")] == ["good"]
    assert [r.group_id for r in await ledger.api.rows("SELECT group_id FROM groups")] == ["g"]


IDENTITY = (
    "rollout_id", "task_id", "task_source", "group_id", "sample_index", "spans", "span_source", "worker_id",
    "incarnation", "contract", "token_ids", "action_mask", "behavior_log_probs",
)  # fmt: skip


@pytest.mark.parametrize("field", IDENTITY)
async def test_every_part_of_the_identity_is_needed(ledger: Ledger, field: str) -> None:
    body = ledger.rollout("r")
    del body[field]
    verdict = (await ledger.submit(body))[0]
    assert (verdict["verdict"], verdict["reason"]) == ("rejected", "missing_field")
    assert field in verdict["detail"]


async def test_masked_log_probs_may_be_anything(ledger: Ledger) -> None:
    first = ledger.rollout("r", behavior_log_probs=[7.0, None, -1.0, -0.5, -0.5, -0.5])
    again = ledger.rollout("r", behavior_log_probs=[None, None, None, -0.5, -0.5, -0.5])
    assert [(await ledger.submit(body))[0]["verdict"] for body in (first, again)] == ["accepted", "duplicate"]


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 3, 4, 5, 7]},
        {"behavior_log_probs": [None] * 3 + [-0.5, -0.5, -0.6]},
        {"task_id": "other"},
        {"group_id": "h"},
        {"generation": {"seed": 1}},
    ],
)
async def test_the_same_id_with_other_content_is_a_conflict_that_changes_nothing(ledger: Ledger, changes: Json) -> None:
    await ledger.submit(ledger.rollout("r"))
    before = await ledger.api.rows("SELECT * FROM rollouts")
    assert (await ledger.submit(ledger.rollout("r") | changes))[0]["verdict"] == "conflict"
    assert await ledger.api.rows("SELECT * FROM rollouts") == before
    assert len(await ledger.api.rows("SELECT * FROM groups")) == 1


async def test_group_sample_and_attempt_are_unique(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("r"))
    assert (await ledger.submit(ledger.rollout("s")))[0]["verdict"] == "conflict"


async def test_within_one_batch_the_first_wins(ledger: Ledger) -> None:
    r = ledger.rollout
    verdicts = await ledger.submit(r("b"), r("b"), r("b", task_id="x"), r("a"), r("c", index=1))
    assert [v["verdict"] for v in verdicts] == ["accepted", "duplicate", "conflict", "conflict", "accepted"]


async def test_a_little_rounding_above_zero_is_allowed(ledger: Ledger) -> None:
    """Engines round: up to 1e-4 is taken as it is."""
    for n, (value, verdict) in enumerate(((0.0, "accepted"), (1e-4, "accepted"), (2e-4, "rejected"))):
        body = ledger.rollout(f"r{n}", f"g{n}", behavior_log_probs=[None] * 3 + [-0.5, value, -0.5])
        assert (await ledger.submit(body))[0]["verdict"] == verdict
    kept = (await ledger.get("/rollouts/r1/evidence"))["behavior_log_probs"][4]
    assert abs(kept - 1e-4) < 1e-9


async def test_spans_come_from_an_engine_from_segments_or_from_the_dispatch(ledger: Ledger) -> None:
    """In any order, with gaps where no action token lies; each is kept as it came."""
    for source in ("engine", "segmented", "dispatch"):
        spans = [
            SPAN | {"artifact_hash": ledger.hashes[0], "start": start, "end": end} for start, end in ((5, 6), (3, 5))
        ]
        body = ledger.rollout(source, source, span_source=source, spans=spans)
        assert [(v["verdict"], v["state"]) for v in await ledger.submit(body)] == [("accepted", "generated")]
        view = await ledger.get(f"/rollouts/{source}")
        assert [(s["start"], s["end"]) for s in view["spans"]] == [(3, 5), (5, 6)]
        [row] = await ledger.api.rows("SELECT span_source FROM rollout_evidence WHERE rollout_id = :r", r=source)
        assert row.span_source == source


async def test_without_a_group_size_every_rollout_is_its_own_group(ledger: Ledger) -> None:
    run = await Ledger.create(ledger.api, "single", group_size=None)
    await run.worker()
    said = "the run has no group_size: this rollout is a group of its own, not a member of same"
    rollouts = [*(run.rollout(r, "same", i) for i, r in enumerate("ab")), run.rollout("c", "c")]
    for verdict in ("accepted", "duplicate"):
        told = await run.submit(*rollouts)
        assert [(v["verdict"], v["detail"]) for v in told] == [(verdict, said), (verdict, said), (verdict, None)]
    await run.reward("a")
    ok(await run.open())
    found = await run.candidates()
    assert (found["groups"], [r["rollout_id"] for r in found["rollouts"]]) == (["a"], ["a"])
    assert await run.reserve("a") == ["reserved"]


async def test_what_was_recorded_beside_the_contract_can_be_read(ledger: Ledger) -> None:
    generation = {"seed": 7, "max_tokens": 64, "stop": ["\n"], "finish_reason": "stop", "engine": "vllm",
                  "engine_version": "0.28.0"}  # fmt: skip
    await ledger.submit(ledger.rollout("r", generation=generation, span_source="segmented"), ledger.rollout("s", "h"))
    for rollout_id, source, recorded in (("r", "segmented", generation), ("s", "dispatch", {})):
        view = await ledger.get(f"/rollouts/{rollout_id}")
        assert (view["span_source"], {k: v for k, v in view["generation"].items() if v is not None}) == (
            source,
            recorded,
        )


async def test_a_tail_of_exact_zeros_is_flagged(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("r", behavior_log_probs=[None] * 3 + [-0.5, -0.5, 0.0]))
    assert (await ledger.get("/rollouts/r"))["flags"] == ["zero_tail"]


async def place(ledger: Ledger, rollout_id: str, **changes: Any) -> tuple[str, str | None, int]:
    group = f"group-{rollout_id}"
    verdict = (await ledger.submit(ledger.rollout(rollout_id, group, **changes)))[0]
    assert verdict["verdict"] == "accepted", verdict
    assert await ledger.state(rollout_id) == (verdict["state"], verdict["reason"], verdict["revision"])
    return verdict["state"], verdict["reason"], verdict["revision"]


async def test_identity_gates(ledger: Ledger) -> None:
    assert await place(ledger, "unknown", version=9) == ("quarantined", "policy_unknown", 1)
    wrong = [SPAN | {"artifact_hash": "0" * 64}]
    assert await place(ledger, "hash", spans=wrong) == ("quarantined", "policy_identity_conflict", 1)
    assert await place(ledger, "dead", incarnation="w-0") == ("quarantined", "worker_not_acked", 1)
    assert await place(ledger, "ours") == ("generated", None, 0)
    both = [SPAN | {"version": 9, "end": 4}, wrong[0] | {"start": 4}]
    assert await place(ledger, "order", spans=both) == ("quarantined", "policy_unknown", 1)
    history = (await ledger.get("/rollouts/unknown/history"))["transitions"]
    assert [(t["event"], t["to_state"], t["reason"]) for t in history] == [
        ("arrive", "generated", None), ("quarantine", "quarantined", "policy_unknown"),
    ]  # fmt: skip


async def test_acks_of_a_dead_incarnation_vouch_for_what_it_had_generated(ledger: Ledger) -> None:
    await ledger.worker("w", "w-2", ack=False)
    assert await place(ledger, "old", incarnation="w-1") == ("generated", None, 0)
    assert await place(ledger, "new", incarnation="w-2") == ("quarantined", "worker_not_acked", 1)


async def test_lag_is_judged_on_arrival_by_the_oldest_action_token(ledger: Ledger) -> None:
    tight = await Ledger.create(ledger.api, "tight", max_lag=1)
    await tight.worker()
    await tight.activate(1, 0)
    assert await place(tight, "one") == ("generated", None, 0)
    await tight.activate(2, 1)
    assert await place(tight, "two") == ("offline", "stale_policy", 1)
    mixed = [
        {"version": 0, "artifact_hash": tight.hashes[0], "start": 0, "end": 4},
        {"version": 2, "artifact_hash": tight.hashes[2], "start": 4, "end": 6},
    ]
    assert await place(tight, "mixed", spans=mixed) == ("offline", "stale_policy", 1)
    prompt = [mixed[0] | {"end": 3}, mixed[1] | {"start": 3}]
    assert await place(tight, "prompt-only", spans=prompt) == ("generated", None, 0)


@pytest.mark.parametrize(
    ("settings", "placed"), [({"stale_to": "quarantined"}, "quarantined"), ({"lag_gate": "observe"}, "generated")]
)
async def test_where_a_stale_rollout_goes_is_the_run_s_choice(ledger: Ledger, settings: Json, placed: str) -> None:
    run = await Ledger.create(ledger.api, "chosen", max_lag=0, **settings)
    await run.worker()
    await run.activate(1, 0)
    assert (await place(run, "old"))[0] == placed


async def test_a_version_ahead_is_future_unless_it_is_the_open_candidate(ledger: Ledger) -> None:
    await ledger.publish(1, 0)
    await ledger.ack("w", 1)
    assert await place(ledger, "early", version=1) == ("quarantined", "future_policy", 1)
    await ledger.worker("v")
    ok(await ledger.activation(1))
    await ledger.ack("w", 1)
    assert await place(ledger, "candidate", version=1) == ("generated", None, 0)
    ok(await ledger.call("POST", "/activations/act-1/give-up", {"reason": "test"}))
    assert await ledger.state("candidate") == ("quarantined", "candidate_not_activated", 1)
    assert await place(ledger, "late", version=1) == ("quarantined", "candidate_not_activated", 1)


async def test_an_infinite_number_in_the_body_costs_only_its_item(ledger: Ledger) -> None:
    import json

    bad = ledger.rollout("bad", "h", behavior_log_probs=[None] * 3 + [-math.inf, -1.0, -1.0])
    body = json.dumps({"rollouts": [bad, ledger.rollout("good")]})
    response = await ledger.call("POST", "/rollouts", content=body, headers={"content-type": "application/json"})
    assert [v["verdict"] for v in ok(response)["verdicts"]] == ["rejected", "accepted"]
