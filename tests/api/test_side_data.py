"""Side data with its digest, and rollouts of several training rows: checked, hashed, and given back as they came."""

from __future__ import annotations

import base64
import hashlib

import pytest

from coordinator.wire.columns import (
    ARROW_MEDIA_TYPE,
    decode_candidates,
    decode_evidence,
    encode_rollouts,
    rollout_columns,
)
from coordinator.wire.rollouts import Rollout
from tests.api.ledger import BEHAVIOR, H, Json, Ledger, ok

BLOB = b"\x00routed\xff" * 3
ARROW = {"content-type": ARROW_MEDIA_TYPE}
TEXT = base64.b64encode(BLOB).decode()
DIGEST = hashlib.sha256(BLOB).hexdigest()
SIDE: Json = {"side_data": TEXT, "side_data_digest": DIGEST}
ROWS: Json = {"row_starts": [0, 3], "action_mask": [False, True, True, False, True, True],
              "behavior_log_probs": [None, BEHAVIOR, BEHAVIOR, None, BEHAVIOR, BEHAVIOR]}  # fmt: skip


async def submit_arrow(ledger: Ledger, *bodies: Json) -> list[Json]:
    stream = encode_rollouts(rollout_columns([Rollout.model_validate(body) for body in bodies]))
    verdicts: list[Json] = ok(await ledger.call("POST", "/rollouts", content=stream, headers=ARROW))["verdicts"]
    return verdicts


@pytest.mark.parametrize("more", [SIDE, ROWS, SIDE | ROWS, {"row_starts": [0]}])
async def test_json_and_arrow_have_one_content_hash(ledger: Ledger, more: Json) -> None:
    body = ledger.rollout("r", **more)
    assert (await ledger.submit(body))[0]["verdict"] == "accepted"
    assert (await submit_arrow(ledger, body))[0]["verdict"] == "duplicate"
    stored = (await ledger.get("/rollouts/r"))["content_hash"]
    [verdict] = await submit_arrow(await fresh(ledger), body)
    assert verdict["verdict"] == "accepted"
    [row] = await ledger.api.rows(
        "SELECT encode(content_hash, 'hex') AS hash FROM rollouts JOIN runs USING (run_no) WHERE run_id = 'fresh'"
    )
    assert row.hash == stored


async def fresh(ledger: Ledger) -> Ledger:
    other = await Ledger.create(ledger.api, "fresh")
    await other.worker()
    return other


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"side_data_digest": H}, "side_data_mismatch"),
        ({"side_data": base64.b64encode(BLOB + b"\0").decode()}, "side_data_mismatch"),
        ({"side_data": base64.b64encode(b"").decode()}, "side_data_mismatch"),
        ({"side_data": None}, "side_data_mismatch"),
        ({"side_data_digest": None}, "side_data_mismatch"),
        ({"side_data": "not base64!"}, "invalid_field"),
        ({"side_data_digest": DIGEST.upper()}, "invalid_field"),
    ],
)
async def test_side_data_and_its_digest_belong_together(ledger: Ledger, changes: Json, reason: str) -> None:
    verdict, other = await ledger.submit(ledger.rollout("r", **(SIDE | changes)), ledger.rollout("s", index=1))
    assert (verdict["verdict"], verdict["reason"]) == ("rejected", reason)
    assert "side_data" in verdict["detail"]
    assert other["verdict"] == "accepted"


async def test_arrow_says_the_same_of_a_wrong_digest(ledger: Ledger) -> None:
    verdict, other = await submit_arrow(
        ledger, ledger.rollout("r", **(SIDE | {"side_data_digest": H})), ledger.rollout("s", index=1)
    )
    assert (verdict["reason"], other["verdict"]) == ("side_data_mismatch", "accepted")


@pytest.mark.parametrize(
    "changes",
    [{}, {"side_data": base64.b64encode(b"x").decode(), "side_data_digest": hashlib.sha256(b"x").hexdigest()}],
)
async def test_side_data_is_part_of_the_content(ledger: Ledger, changes: Json) -> None:
    """Without it, or with another, the same id is a conflict."""
    await ledger.submit(ledger.rollout("r", **SIDE))
    assert (await ledger.submit(ledger.rollout("r") | changes))[0]["verdict"] == "conflict"
    assert (await ledger.get("/rollouts/r"))["side_data_digest"] == DIGEST


async def test_side_data_comes_back_with_candidates_and_with_evidence(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("a", **SIDE), ledger.rollout("b", index=1))
    await ledger.reward("a")
    await ledger.reward("b")
    ok(await ledger.open())
    a, b = (await ledger.candidates())["rollouts"]
    assert (a["side_data"], b["side_data"], a["row_starts"]) == (TEXT, None, [0])
    accept = {"accept": ARROW_MEDIA_TYPE}
    body = {"owner": "t-1", "groups": 1}
    columns = decode_candidates((await ledger.call("POST", "/updates/u/candidates", body, headers=accept)).content)
    assert columns.side_data == [BLOB, None]
    alone = await ledger.get("/rollouts/a/evidence")
    assert (alone["side_data"], alone["side_data_digest"]) == (TEXT, DIGEST)
    named = {"rollout_ids": ["b", "a"]}
    many = ok(await ledger.call("POST", "/rollouts/evidence", named))["rollouts"]
    assert [(r["rollout_id"], r["side_data"], r["side_data_digest"]) for r in many] == [
        ("b", None, None), ("a", TEXT, DIGEST),
    ]  # fmt: skip
    in_arrow = decode_evidence((await ledger.call("POST", "/rollouts/evidence", named, headers=accept)).content)
    assert (in_arrow.side_data, in_arrow.side_data_digest) == ([None, BLOB], [None, DIGEST])
    assert (await ledger.get("/counts"))["evidence_bytes"] == 2 * 6 * 9 + len(BLOB)


async def test_empty_side_data_is_side_data(ledger: Ledger) -> None:
    nothing = {"side_data": "", "side_data_digest": hashlib.sha256(b"").hexdigest()}
    assert (await ledger.submit(ledger.rollout("r", **nothing)))[0]["verdict"] == "accepted"
    assert (await ledger.get("/rollouts/r/evidence"))["side_data"] == ""


@pytest.mark.parametrize(
    ("starts", "reason", "named"),
    [
        ([1], "rows_malformed", "row_starts[0] is 1"),
        ([1, 3], "rows_malformed", "row_starts[0] is 1"),
        ([0, 0], "rows_malformed", "row_starts[1] is 0"),
        ([0, 3, 3], "rows_malformed", "row_starts[2] is 3"),
        ([0, 3, 2], "rows_malformed", "row_starts[2] is 2"),
        ([0, 6], "rows_malformed", "less than 6"),
        ([0, 2], "action_at_start", "action_mask[2]"),
        ([], "invalid_field", "row_starts"),
        ([0, -1], "invalid_field", "row_starts"),
        ([0, 3.5], "invalid_field", "row_starts"),
    ],
)
async def test_rows_begin_at_0_ascend_and_never_begin_with_an_action(
    ledger: Ledger, starts: list[int], reason: str, named: str
) -> None:
    body = ledger.rollout("r", **ROWS) | {"row_starts": starts}
    [verdict] = await ledger.submit(body)
    assert (verdict["verdict"], verdict["reason"]) == ("rejected", reason)
    assert named in verdict["detail"]


async def test_rows_are_part_of_the_content_and_one_row_is_what_is_left_out(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("r", **ROWS))
    assert (await ledger.get("/rollouts/r"))["row_starts"] == [0, 3]
    one_row = ledger.rollout("r", **ROWS)
    del one_row["row_starts"]
    assert (await ledger.submit(one_row))[0]["verdict"] == "conflict"
    plain = ledger.rollout("s", index=1)
    assert [(await ledger.submit(b))[0]["verdict"] for b in (plain, plain | {"row_starts": [0]})] == [
        "accepted", "duplicate",
    ]  # fmt: skip


async def test_rows_come_back_with_candidates_and_with_evidence(ledger: Ledger) -> None:
    await ledger.group("g", **ROWS)
    ok(await ledger.open())
    assert [r["row_starts"] for r in (await ledger.candidates())["rollouts"]] == [[0, 3]] * 2
    accept = {"accept": ARROW_MEDIA_TYPE}
    body = {"owner": "t-1", "groups": 1}
    columns = decode_candidates((await ledger.call("POST", "/updates/u/candidates", body, headers=accept)).content)
    assert columns.row_starts == [[0, 3]] * 2
    assert (await ledger.get("/rollouts/g:0/evidence"))["row_starts"] == [0, 3]
    many = ok(await ledger.call("POST", "/rollouts/evidence", {"rollout_ids": ["g:1"]}))
    assert many["rollouts"][0]["row_starts"] == [0, 3]


async def test_lag_is_the_oldest_over_all_rows(ledger: Ledger) -> None:
    """The last row alone would be fresh; the first one is what counts."""
    tight = await Ledger.create(ledger.api, "tight", max_lag=1)
    await tight.worker()
    await tight.activate(1, 0)
    spans = [
        {"version": 0, "artifact_hash": tight.hashes[0], "start": 0, "end": 3},
        {"version": 1, "artifact_hash": tight.hashes[1], "start": 3, "end": 6},
    ]
    await tight.group("g", spans=spans, **ROWS)
    ok(await tight.open(version=1))
    assert [(r["lag"], r["policy_version"]) for r in (await tight.candidates())["rollouts"]] == [(1, 0)] * 2
    await tight.activate(2, 1)
    late = await tight.submit(tight.rollout("late", "h", spans=spans, **ROWS))
    assert (late[0]["state"], late[0]["reason"]) == ("offline", "stale_policy")


async def test_drift_is_the_mean_over_the_action_tokens_of_all_rows(ledger: Ledger) -> None:
    """0.3 on the two actions of the first row and 0 on those of the second: 0.15, not 0.3 and not 0.1."""
    ids = await ledger.group("g", **ROWS)
    ok(await ledger.open())
    current = [9.0, BEHAVIOR + 0.3, BEHAVIOR - 0.3, 9.0, BEHAVIOR, BEHAVIOR]
    body = {
        "owner": "t-1",
        "after_commit_no": 0,
        "rollouts": [{"rollout_id": r, "revision": 1, "current_log_probs": current} for r in ids],
    }
    verdicts = ok(await ledger.call("POST", "/updates/u/reserve", body))["verdicts"]
    assert [(v["verdict"], round(v["drift"], 7)) for v in verdicts] == [("reserved", 0.15)] * 2
