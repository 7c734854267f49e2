"""Limits: a call that is too large is refused whole, and a full storage holds arrivals back and nothing else."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import httpx
import pyarrow as pa
import pytest

from coordinator.rollouts import arrival, retention
from coordinator.wire.columns import ARROW_MEDIA_TYPE, ROLLOUT_SCHEMA
from tests.api.ledger import Api, H, Json, Ledger, ok, refused

BYTES = 6 * 9
"""Of one rollout of six tokens: an int32, a byte and a float32 each."""
ARROW = {"content-type": ARROW_MEDIA_TYPE}


async def stored(ledger: Ledger) -> int:
    [row] = await ledger.api.rows("SELECT count(*) AS n FROM rollouts")
    return int(row.n)


@pytest.mark.parametrize("way", ["json", "arrow"])
async def test_too_many_items(ledger: Ledger, way: str) -> None:
    """One more than the limit is refused whole; as many as it allows are answered one by one."""

    async def send(n: int) -> httpx.Response:
        if way == "json":
            return await ledger.call("POST", "/rollouts", {"rollouts": [{}] * n})
        columns = [pa.array([[] if pa.types.is_list(f.type) else None] * n, f.type) for f in ROLLOUT_SCHEMA]
        return await ledger.call("POST", "/rollouts", content=stream(columns), headers=ARROW)

    problem = refused(await send(4097), 413, "too_large")
    assert "4096" in problem["detail"]
    assert [v["verdict"] for v in ok(await send(4096))["verdicts"]] == ["rejected"] * 4096


def stream(columns: list[Any], compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, ROLLOUT_SCHEMA, options=options) as writer:
        writer.write_table(pa.table(columns, schema=ROLLOUT_SCHEMA))
    content: bytes = sink.getvalue().to_pybytes()
    return content


async def test_too_many_tokens(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "LARGEST_BATCH_TOKENS", 11)
    body = {"rollouts": [ledger.rollout("a"), ledger.rollout("b", index=1)]}
    problem = refused(await ledger.call("POST", "/rollouts", body), 413, "too_large")
    assert "at most 11 tokens, not 12" in problem["detail"]
    assert await stored(ledger) == 0
    monkeypatch.setattr(arrival, "LARGEST_BATCH_TOKENS", 12)
    assert [v["verdict"] for v in ok(await ledger.call("POST", "/rollouts", body))["verdicts"]] == ["accepted"] * 2


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/rollouts", "application/json"),
        ("/rollouts", ARROW_MEDIA_TYPE),
        ("/rewards", "application/json"),
        ("/rewards/rescore", "application/json"),
        ("/rollouts/failures", "application/json"),
        ("/updates/u/reserve", ARROW_MEDIA_TYPE),
    ],
)
async def test_too_many_bytes(ledger: Ledger, path: str, content_type: str) -> None:
    """The app of these tests takes 1 MiB."""
    body = b" " * (2**20 + 1)
    headers = {"content-type": content_type}
    refused(await ledger.call("POST", path, content=body, headers=headers), 413, "too_large")

    async def chunks() -> Any:  # without a Content-Length that could be believed
        for _ in range(65):
            yield b" " * 2**14

    refused(await ledger.call("POST", path, content=chunks(), headers=headers), 413, "too_large")


async def ledger_of(api: Api, limit: int, **settings: Any) -> Ledger:
    ledger = await Ledger.create(api, storage_limit_bytes=limit, **settings)
    await ledger.worker()
    return ledger


async def test_a_full_storage_refuses_the_whole_arrival_and_says_when_to_come_again(api: Api) -> None:
    ledger = await ledger_of(api, 3 * BYTES)
    await ledger.submit(*(ledger.rollout(f"g:{i}", "g", i) for i in range(2)))
    more = {"rollouts": [ledger.rollout(f"h:{i}", "h", i) for i in range(2)]}
    response = await ledger.call("POST", "/rollouts", more)
    problem = refused(response, 429, "storage_full")
    assert f"stores {2 * BYTES} of {3 * BYTES} bytes" in problem["detail"]
    assert int(response.headers["retry-after"]) > 0
    assert await stored(ledger) == 2
    assert [r.group_id for r in await api.rows("SELECT group_id FROM groups")] == ["g"]
    # What still fits, up to the last byte, is taken.
    [fits] = await ledger.submit(ledger.rollout("h:0", "h"))
    assert fits["verdict"] == "accepted"
    assert (await ledger.get("/counts"))["evidence_bytes"] == 3 * BYTES
    assert (await ledger.call("POST", "/rollouts", {"rollouts": [ledger.rollout("i:0", "i")]})).status_code == 429


async def test_side_data_takes_room_too(api: Api) -> None:
    ledger = await ledger_of(api, 2 * BYTES)
    blob = b"x" * (BYTES + 1)
    side: Json = {"side_data": base64.b64encode(blob).decode(), "side_data_digest": hashlib.sha256(blob).hexdigest()}
    body = {"rollouts": [ledger.rollout("r", **side)]}
    refused(await ledger.call("POST", "/rollouts", body), 429, "storage_full")


async def test_what_is_here_already_needs_no_room(api: Api) -> None:
    """A worker that did not hear the answer sends again, and must not wait for room that nothing of it takes."""
    ledger = await ledger_of(api, 2 * BYTES)
    batch = [ledger.rollout(f"g:{i}", "g", i) for i in range(2)]
    await ledger.submit(*batch)
    assert [v["verdict"] for v in await ledger.submit(*batch)] == ["duplicate"] * 2
    assert [v["verdict"] for v in await ledger.submit(batch[0] | {"task_id": "other"}, batch[1])] == [
        "conflict", "duplicate",
    ]  # fmt: skip
    new = {"rollouts": [*batch, ledger.rollout("h:0", "h")]}
    refused(await ledger.call("POST", "/rollouts", new), 429, "storage_full")


async def test_rejected_items_need_no_room(api: Api) -> None:
    ledger = await ledger_of(api, BYTES)
    verdicts = await ledger.submit(*(ledger.rollout(f"r{n}", index=9) for n in range(5)), ledger.rollout("good"))
    assert [v["verdict"] for v in verdicts] == ["rejected"] * 5 + ["accepted"]


async def test_a_full_storage_refuses_nothing_but_arrivals(api: Api) -> None:
    """Rewards, failures and the whole way to a commit go on, and free the storage in the end."""
    ledger = await ledger_of(api, 2 * BYTES, evidence_retention_seconds=0.001, rewind_commits=0, min_usable=1)
    await ledger.submit(*(ledger.rollout(f"g:{i}", "g", i) for i in range(2)))
    late = {"rollouts": [ledger.rollout(f"h:{i}", "h", i) for i in range(2)]}
    refused(await ledger.call("POST", "/rollouts", late), 429, "storage_full")
    for i in range(2):
        assert (await ledger.reward(f"g:{i}"))["verdict"] == "stored"
    new = {"group_id": "g", "ruleset_id": "new", "ruleset_hash": H,
           "rewards": [{"rollout_id": f"g:{i}", "value": 2.0} for i in range(2)]}  # fmt: skip
    ok(await ledger.call("POST", "/rewards/rescore", new))
    failure = {
        "rollout_id": "f", "task_id": "t", "task_source": "s", "group_id": "i", "sample_index": 0, "worker_id": "w",
        "incarnation": "w-1", "message": "m",
    }  # fmt: skip
    [failed] = ok(await ledger.call("POST", "/rollouts/failures", {"failures": [failure]}))["verdicts"]
    assert failed["verdict"] == "accepted"
    ok(await ledger.open())
    assert await ledger.reserve(("g:0", 2), ("g:1", 2)) == ["reserved"] * 2
    refused(await ledger.call("POST", "/rollouts", late), 429, "storage_full")
    ok(await ledger.commit())
    assert await retention.sweep(api.database) == {"run": 2}
    assert [v["verdict"] for v in ok(await ledger.call("POST", "/rollouts", late))["verdicts"]] == ["accepted"] * 2
