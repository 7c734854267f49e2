"""Every value of every body, replaced by what no caller should send: a clear refusal or a harmless yes, never a 5xx."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from fastapi.dependencies.utils import get_dependant
from fastapi.routing import APIRoute

from coordinator.wire.columns import ARROW_MEDIA_TYPE, encode_rollouts, rollout_columns
from coordinator.wire.rollouts import Rollout
from tests.api.ledger import BASE, CONTRACT, H, Json, Ledger, ok, refused

HOSTILE = {
    "half a surrogate pair": '"\\ud800"',
    "a NUL": '"\\u0000"',
    "NaN": "NaN",
    "minus infinity": "-Infinity",
    "beyond float64": "1e400",
    "near the end of float64": "1.7e308",
    "5000 digits": "9" * 5000,
    "beyond int64": str(2**63),
    "beyond int32": str(2**31),
    "negative": "-1",
    "a bool": "true",
    "null": "null",
    "nothing": '""',
    "an object": "{}",
    "nested": "[" * 3000 + "]" * 3000,
    "long": '"' + "x" * 20_000 + '"',
}
MARK = "@@here@@"
ARROW = {"content-type": ARROW_MEDIA_TYPE}
DIGEST = {"layout": "l", "registered": "f" * 64}
ALIVE = {"incarnation": "w-1"}
FAILURE = {
    "rollout_id": "failed", "task_id": "t", "task_source": "s", "group_id": "f", "sample_index": 0, "attempt": 0,
    "worker_id": "w", "incarnation": "w-1", "kind": "timeout", "message": "m",
}  # fmt: skip


def bodies(ledger: Ledger) -> dict[tuple[str, str], Json]:
    """A good body for every endpoint that takes one, with as many of its fields as there are."""
    span = {"version": 0, "artifact_hash": H, "start": 0, "end": 6}
    generation = {
        "seed": 1, "max_tokens": 3, "stop": ["x"], "finish_reason": "stop", "engine": "e", "engine_version": "1",
    }  # fmt: skip
    reward = {"rollout_id": "g:0", "status": "ok", "ruleset_id": "rules", "ruleset_hash": H, "message": "m"}
    item = {"rollout_id": "g:0", "revision": 1, "current_log_probs": [-0.5] * 6, "use": "chosen"}
    run = {
        "run_id": "new", "settings": {"max_lag": 1, "max_drift": 0.1, "group_size": 2, "min_usable": 1,
        "groups_per_update": 2, "required_caches": ["prefix"], "update_lease_seconds": 1, "stale_to": "offline"},
        "contract": CONTRACT | {"top_k": 1, "min_p": 0.1}, "vocab_size": 100,
        "policy": {"version": 0, "base_model": BASE},
    }  # fmt: skip
    return {
        ("POST", "/v1/runs"): run,
        ("POST", "/v1/tokens"): {
            "name": "n", "role": "worker", "run_id": "run", "worker_id": "w", "expires_at": "2100-01-01T00:00:00Z",
        },
        ("PUT", "/v1/runs/{run_id}/workers/{worker_id}"): ALIVE | {"engine": "e", "engine_version": "1"},
        ("POST", "/v1/runs/{run_id}/workers/{worker_id}/heartbeat"): ALIVE | {"asleep_seconds": 1.5},
        ("POST", "/v1/runs/{run_id}/workers/{worker_id}/acks"): ALIVE
        | {"version": 0, "artifact_hash": ledger.hashes[0], "digest": DIGEST, "caches_reset": ["prefix"]},
        ("POST", "/v1/runs/{run_id}/workers/{worker_id}/stage"): ALIVE | {"version": 0, "stage": "loading"},
        ("POST", "/v1/runs/{run_id}/workers/{worker_id}/failures"): ALIVE
        | {"version": 0, "stage": "load", "message": "m"},
        ("POST", "/v1/runs/{run_id}/workers/{worker_id}/fence"): {"reason": "r"},
        ("POST", "/v1/runs/{run_id}/workers/{worker_id}/tickets"): ALIVE | {"group_ids": ["x"]},
        ("POST", "/v1/runs/{run_id}/policies"): {
            "version": 7, "parent_version": 0, "base_model": BASE, "updates": ["u"], "kind": "full",
            "digests": {"l": H}, "rollback_version": 0,
            "files": [{"name": "w", "size": 1, "sha256": H}],
        },
        ("POST", "/v1/runs/{run_id}/policies/{version}/activations"): {
            "activation_id": "a", "required_workers": ["w"], "supersede": True,
        },
        ("POST", "/v1/runs/{run_id}/activations/{activation_id}/give-up"): {"reason": "r"},
        ("POST", "/v1/runs/{run_id}/rollouts"): {
            "rollouts": [ledger.rollout("new", "h", spans=[span], generation=generation)]
        },
        ("POST", "/v1/runs/{run_id}/rollouts/failures"): {"failures": [FAILURE]},
        ("POST", "/v1/runs/{run_id}/rollouts/release"): {"rollout_ids": ["g:0"]},
        ("POST", "/v1/runs/{run_id}/rollouts/evidence"): {"rollout_ids": ["g:0"]},
        ("POST", "/v1/runs/{run_id}/rewards/rescore"): {
            "group_id": "g", "ruleset_id": "rules", "ruleset_hash": H,
            "rewards": [{"rollout_id": "g:0", "value": 1.0}, {"rollout_id": "g:1", "components": {"a": 1.0}}],
        },
        ("PUT", "/v1/runs/{run_id}/rollbacks/{rollback_id}"): {
            "to_version": 0, "version": 9, "reason": "r", "activation_id": "a",
        },
        ("POST", "/v1/runs/{run_id}/policies/{version}/withdraw"): {"reason": "r", "restoring_version": 9},
        ("PUT", "/v1/runs/{run_id}/rewinds/{rewind_id}"): {
            "to_commit_no": 0, "consumed": "release", "reason": "r", "restoring_version": 9,
        },
        ("POST", "/v1/runs/{run_id}/rewards"): {
            "rewards": [reward | {"value": 1.0}, reward | {"components": {"a": 1.0, "b": 1.7e308}}]
        },
        ("PUT", "/v1/runs/{run_id}/updates/{update_id}"): {
            "owner": "t-1", "policy_version": 0, "artifact_hash": ledger.hashes[0],
        },
        ("POST", "/v1/runs/{run_id}/updates/{update_id}/candidates"): {
            "owner": "t-1", "groups": 1, "wait_seconds": 0.01,
        },
        ("POST", "/v1/runs/{run_id}/updates/{update_id}/reserve"): {
            "owner": "t-1", "after_commit_no": 0, "confirm_drift": False, "rollouts": [item],
        },
        ("POST", "/v1/runs/{run_id}/updates/{update_id}/renew"): {"owner": "t-1"},
        ("POST", "/v1/runs/{run_id}/updates/{update_id}/commit"): {
            "owner": "t-1", "after_commit_no": 0, "discards": [{"rollout_id": "g:0", "reason": "r"}],
        },
        ("POST", "/v1/runs/{run_id}/updates/{update_id}/abort"): {"owner": "t-1", "reason": "r", "quarantine": False},
        ("POST", "/v1/runs/{run_id}/workers/{worker_id}/drain"): ALIVE,
        ("POST", "/v1/runs/{run_id}/workers/{worker_id}/deregister"): ALIVE,
    }  # fmt: skip


def spoiled(body: Any) -> Iterator[Any]:
    """Copies of a body, in each another value replaced by the mark; the last has one more field of that name."""

    def places(node: Any, way: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if way:
            yield way
        inner = node.items() if isinstance(node, dict) else enumerate(node[:4]) if isinstance(node, list) else ()
        for key, value in inner:
            yield from places(value, (*way, key))

    for way in places(body, ()):
        spoilt = copy.deepcopy(body)
        node = spoilt
        for key in way[:-1]:
            node = node[key]
        node[way[-1]] = MARK
        yield spoilt
    yield body | {MARK: 1}


def takes_a_body(route: APIRoute) -> bool:
    dependant = get_dependant(path=route.path, call=route.endpoint)
    return bool(dependant.body_params) or "application/json" in (route.openapi_extra or {}).get("requestBody", {}).get(
        "content", {}
    )


async def test_the_bodies_below_are_those_of_every_endpoint(ledger: Ledger) -> None:
    routes = [r for r in ledger.api.app.routes if isinstance(r, APIRoute) and takes_a_body(r)]
    assert {(method, r.path) for r in routes for method in r.methods} == set(bodies(ledger))


async def test_no_value_of_any_body_is_a_fault_of_the_server(ledger: Ledger) -> None:
    await ledger.group("g")
    ok(await ledger.prepare(1, 0))
    ok(await ledger.activation(1))
    for (method, template), good in bodies(ledger).items():
        path = template.format(
            run_id="run", worker_id="w", version=1, activation_id="act-1", update_id="u", rewind_id="r", rollback_id="r"
        )
        ok(await ledger.open())
        for spoilt in spoiled(good):
            document = json.dumps(spoilt)
            for what, raw in HOSTILE.items():
                if f'"{MARK}": 1' in document and not raw.startswith('"'):
                    continue
                response = await ledger.api.call(
                    method,
                    path.removeprefix("/v1"),
                    content=document.replace(f'"{MARK}"', raw).encode(),
                    headers={"content-type": "application/json"},
                )
                assert response.status_code < 500, (path, what, document[:400], response.text)
                if response.status_code >= 400:
                    refused(response, response.status_code, response.json()["code"])


async def test_json_inside_arrow_costs_only_its_item(ledger: Ledger) -> None:
    cases = [(c, what) for c in ("contract", "generation") for what in HOSTILE if what != "null"]
    for n, (column, what) in enumerate(cases):
        good = [Rollout.model_validate(ledger.rollout(f"{r}{n}", f"g{n}", i)) for i, r in enumerate(("bad", "good"))]
        table = pa.ipc.open_stream(encode_rollouts(rollout_columns(good))).read_all()
        key = "top_k" if column == "contract" else "finish_reason"
        first, second = table.column(column).to_pylist()
        wrong = json.dumps(json.loads(first) | {key: MARK}).replace(f'"{MARK}"', HOSTILE[what])
        table = table.set_column(table.column_names.index(column), column, pa.array([wrong, second]))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        response = await ledger.call("POST", "/rollouts", content=sink.getvalue().to_pybytes(), headers=ARROW)
        bad, fine = (v["verdict"] for v in ok(response)["verdicts"])
        assert fine == "accepted", (column, what)
        assert bad == ("accepted" if (column, what) == ("generation", "nothing") else "rejected"), (column, what)


async def test_a_sum_of_components_beyond_float64_costs_only_its_item(ledger: Ledger) -> None:
    await ledger.submit(ledger.rollout("r"))
    for components in ({"a": 1e308, "b": 1e308}, {"a": 1e308, "b": 1e308, "c": -1e308}):
        verdict = await ledger.reward("r", None, components=components)
        assert (verdict["verdict"], verdict["detail"]) == (
            "rejected", "the sum of the components is too large for a float64",
        )  # fmt: skip
    assert await ledger.state("r") == ("generated", None, 0)


async def test_an_arrow_stream_cut_anywhere_is_refused_whole(ledger: Ledger) -> None:
    stream = encode_rollouts(rollout_columns([Rollout.model_validate(ledger.rollout("r"))]))
    for length in (*range(0, len(stream), 24), len(stream) - 8, len(stream) - 1):
        response = await ledger.call("POST", "/rollouts", content=stream[:length], headers=ARROW)
        assert response.status_code == 422, length
        refused(response, 422, response.json()["code"])
    assert await ledger.api.rows("SELECT rollout_id FROM rollouts") == []
