"""Spoilt Arrow bodies over HTTP: a refusal or verdicts, never a failure of the server, which goes on working."""

from __future__ import annotations

import random

import httpx
from pydantic import TypeAdapter

from coordinator.wire.columns import ARROW_MEDIA_TYPE, encode_reserve, encode_rollouts, reserve_columns, rollout_columns
from coordinator.wire.rollouts import ArrivalAnswer, Rollout
from coordinator.wire.updates import ReserveAnswer, ReserveRequest
from tests.api.ledger import BEHAVIOR, Ledger, ok, refused
from tests.wire.streams import mutated, odd_streams

ARROW = {"content-type": ARROW_MEDIA_TYPE}
ANSWERS: TypeAdapter[ArrivalAnswer | ReserveAnswer] = TypeAdapter(ArrivalAnswer | ReserveAnswer)


def judged(response: httpx.Response, stream: bytes) -> bool:
    """Whether the answer holds verdicts. AssertionError where it is neither that nor a clear refusal."""
    if response.status_code == 200:
        assert ANSWERS.validate_json(response.content).verdicts, stream.hex()
        return True
    assert 400 <= response.status_code < 500, f"{response.text}\nof the stream {stream.hex()}"
    refused(response, response.status_code, response.json()["code"])
    return False


async def test_no_stream_is_a_fault_of_the_server(ledger: Ledger) -> None:
    ids = await ledger.group("g")
    ok(await ledger.open())
    new = [Rollout.model_validate(ledger.rollout(f"n{i}", "n", i)) for i in range(2)]
    log_probs = [None, None, None, *[BEHAVIOR] * 3]
    items = [{"rollout_id": r, "revision": 1, "current_log_probs": log_probs} for r in ids]
    request = ReserveRequest.model_validate({"owner": "t-1", "after_commit_no": 0, "rollouts": items})
    good = {
        "/rollouts": encode_rollouts(rollout_columns(new)),
        "/updates/u/reserve": encode_reserve(reserve_columns(request)),
    }
    chance = random.Random(11)
    verdicts = dict.fromkeys(good, 0)
    for path, stream in good.items():
        odd = [s for _, s in odd_streams(stream)]
        for body in (*odd, *(mutated(stream, chance.choice(odd), chance) for _ in range(700))):
            verdicts[path] += judged(await ledger.call("POST", path, content=body, headers=ARROW), body)
    assert min(verdicts.values()) > 30
    for path, stream in good.items():
        assert judged(await ledger.call("POST", path, content=stream, headers=ARROW), stream)
    assert await ledger.state("n0") == ("generated", None, 0)
    assert (await ledger.state(ids[0]))[0] == "reserved"
    assert ok(await ledger.api.http.get("/healthz")) == {"status": "ok"}
