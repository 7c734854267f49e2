"""The service as the machine calls it: the real app over a real Postgres, in this process and on one event loop.

Its calls have the names, the arguments and the answers of `tests.model.ledger.Ledger`. No sweeper runs beside it, so
that nothing happens between two calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import tempfile
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from sqlalchemy import text

from coordinator import clocks
from coordinator.app import create_app
from coordinator.operations.verify import Breach, snapshot, verify
from coordinator.rollouts import retention
from coordinator.rules.manifest import artifact_hash
from coordinator.storage.database import connect
from tests.api.ledger import BASE, CONTRACT, Api, H, Json
from tests.model.ledger import ACTIONS, BEHAVIOR, Answer, Item, Refused, Reward, Wanted

T = TypeVar("T")
C = TypeVar("C", bound="Caller")

WORKERS = ("w", "slow")
LONG = 24 * 3600
"""What ends by its clock here ends because the machine says so."""
CLOCKS = {
    "update_lease_seconds": LONG,
    "hold_seconds": LONG,
    "group_deadline_seconds": LONG,
    "lost_after_seconds": LONG,
    "activation_deadline_seconds": LONG,
}
RULESETS = {"R": H, "S": hashlib.sha256(b"another").hexdigest()}
"""Of one name: the hash makes the difference."""

SEEN = text("""
    SELECT json_build_object(
        'rollouts', (SELECT json_object_agg(rollout_id, json_build_array(
            state, reason, revision, update_id, reward_status, reward)) FROM rollouts WHERE run_no = r.run_no),
        'tombstones', (SELECT json_object_agg(rollout_id, json_build_array(state, revision))
                       FROM tombstones WHERE run_no = r.run_no),
        'groups', (SELECT json_object_agg(group_id, state) FROM groups WHERE run_no = r.run_no),
        'updates', (SELECT json_object_agg(update_id, json_build_array(
            CASE WHEN state = 'open' AND lease_until <= clock_timestamp() THEN 'expired' ELSE state END,
            policy_version, after_commit_no, commit_no)) FROM updates WHERE run_no = r.run_no),
        'versions', (SELECT json_object_agg(version, json_build_array(state, lag_clock))
                     FROM policy_versions WHERE run_no = r.run_no),
        'counts', (SELECT json_object_agg(name, n) FROM (
            SELECT name, sum(n) AS n FROM (
                SELECT name, n FROM counts WHERE run_no = r.run_no
                UNION ALL SELECT name, delta FROM count_deltas WHERE run_no = r.run_no) AS c
            GROUP BY name HAVING sum(n) <> 0) AS c),
        'line', json_build_array(r.active_version, r.commits, r.last_commit_no)
    ) FROM runs r WHERE r.run_id = :run_id
""")
AUDIT = text("""
    SELECT a.rollout_id, a.event, a.from_state, a.to_state, a.reason, a.update_id, a.judged_version
    FROM rollout_audit a JOIN runs r USING (run_no) WHERE r.run_id = :run_id ORDER BY a.rollout_id, a.revision
""")
LAPSE = text("""
    UPDATE updates SET lease_until = clock_timestamp() - interval '1 second'
    WHERE update_id = :update_id AND run_no = (SELECT run_no FROM runs WHERE run_id = :run_id)
""")
PASS_DEADLINE = text("""
    UPDATE groups SET deadline_at = clock_timestamp()
    WHERE group_id = :key AND run_no = (SELECT run_no FROM runs WHERE run_id = :run_id)
""")
END_HOLD = text("""
    UPDATE groups SET held_until = clock_timestamp()
    WHERE group_id = :key AND run_no = (SELECT run_no FROM runs WHERE run_id = :run_id)
""")
# Retention goes through every run of the database; those of former examples have seen theirs.
KEEP_FOR_EVER = text("""
    UPDATE runs SET settings = settings - 'evidence_retention_seconds' - 'rollout_retention_seconds'
    WHERE run_id = :run_id
""")


class Caller:
    """One run at a time, in one database."""

    def __init__(self, runner: asyncio.Runner, api: Api) -> None:
        self._runner = runner
        self.api = api
        self.run_id = ""
        self.hashes: dict[int, str] = {}
        self._numbers = itertools.count()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> Json:
        """The body of a good answer; a refusal is the model's."""
        response = self.do(self.api.call(method, f"/runs/{self.run_id}{path}", body, **more))
        answer: Json = response.json()
        if response.status_code in (200, 201):
            return answer
        assert 400 <= response.status_code < 500, response.text
        raise Refused(answer["code"])

    def begin(self, settings: Json) -> None:
        """Another run, without workers."""
        self.run_id, self.hashes = f"run-{next(self._numbers)}", {0: artifact_hash("base", BASE, [])}
        body = {"run_id": self.run_id, "settings": settings | CLOCKS, "contract": CONTRACT, "vocab_size": 100}
        response = self.do(self.api.call("POST", "/runs", body | {"policy": {"version": 0, "base_model": BASE}}))
        assert response.status_code == 201, response.text

    def execute(self, statement: Any, **parameters: Any) -> None:
        async def work() -> None:
            async with self.api.database.engine.begin() as connection:
                await connection.execute(statement, {"run_id": self.run_id} | parameters)

        self.do(work())

    def read(self, statement: Any) -> list[Any]:
        async def work() -> list[Any]:
            async with self.api.database.engine.connect() as connection:
                return list((await connection.execute(statement, {"run_id": self.run_id})).all())

        return self.do(work())

    def breaches(self) -> list[str]:
        """What `coordinator verify` says of this run."""

        async def work() -> list[str]:
            async with snapshot(self.api.database) as connection:
                return [str(found) async for found in verify(connection, self.run_id) if isinstance(found, Breach)]

        return self.do(work())


class Service(Caller):
    """As `Ledger` is called."""

    def create(self, settings: Json) -> None:
        """Another run, and its workers, who confirmed its first version."""
        self.begin(settings)
        self._last_activation = 0
        for worker in WORKERS:
            self.call("PUT", f"/workers/{worker}", {"incarnation": "1", "engine": "hand", "engine_version": "1"})
            self._ack(worker, 0)

    # what stands there

    def seen(self) -> Json:
        """Everything that the model holds too."""
        [(found,)] = self.read(SEEN)
        return {name: value if value is not None else {} for name, value in found.items()}

    def audit(self) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.read(AUDIT)]

    def views(self) -> Json:
        """The same as the reading calls tell it."""
        rollouts = self.call("GET", "/rollouts")["rollouts"]
        updates = self.call("GET", "/updates")["updates"]
        return {
            "rollouts": {r["rollout_id"]: [r["state"], r["reason"], r["revision"], r["update_id"]] for r in rollouts},
            "updates": {u["update_id"]: self._view(u) for u in updates},
            "counts": {state: n for state, n in self.call("GET", "/counts")["rollouts"].items() if n},
            "versions": {p["version"]: p["state"] for p in self.call("GET", "/policies")["policies"]},
            "line": self.call("GET", "")["last_commit_no"],
        }

    # rollouts

    def hash_of(self, version: int) -> str:
        """Of a version that is there, or will be when it is published."""
        return self.hashes.get(version) or artifact_hash("lora", BASE, [self._file(version)])

    def _body(self, item: Item) -> Json:
        tokens = [1 + item.variant, 2, 3, 4, 5, 6]
        body: Json = {
            "rollout_id": item.rollout_id,
            "task_id": "task",
            "task_source": "hand",
            "group_id": item.group_id,
            "sample_index": item.index,
            "attempt": item.attempt,
            "worker_id": item.worker,
            "incarnation": "1",
        }
        if not item.spans:
            return body | {"message": "out of memory"}
        bounds = [0, 4, 6] if all(s.acts for s in item.spans) else [0, 3, 6]
        bounds = [0, 6] if len(item.spans) == 1 else bounds
        spans = [
            {"version": span.version, "artifact_hash": span.artifact_hash, "start": start, "end": end}
            for span, start, end in zip(item.spans, bounds, bounds[1:], strict=False)
        ]
        contract = CONTRACT if item.contract == 0 else CONTRACT | {"temperature": 0.5}
        behavior: list[float | None] = [None] * 3 + [BEHAVIOR] * ACTIONS
        if item.fault == "log_prob_not_finite":
            behavior[4] = None
        return body | {
            "spans": spans,
            "span_source": "dispatch",
            "contract": contract,
            "token_ids": tokens,
            "action_mask": [False] * 3 + [True] * ACTIONS,
            "behavior_log_probs": behavior,
        }

    def submit(self, items: Sequence[Item]) -> Answer:
        answer = self.call("POST", "/rollouts", {"rollouts": [self._body(item) for item in items]})
        return self._arrivals(answer)

    def fail_generation(self, items: Sequence[Item]) -> Answer:
        return self._arrivals(
            self.call("POST", "/rollouts/failures", {"failures": [self._body(item) for item in items]})
        )

    def _arrivals(self, answer: Json) -> Answer:
        return tuple(
            (
                v["verdict"],
                v["state"],
                v["revision"],
                v["reason"] if v["verdict"] in ("accepted", "rejected") else None,
            )
            for v in answer["verdicts"]
        )

    def submit_rewards(self, rewards: Sequence[Reward]) -> Answer:
        body = [
            {
                "rollout_id": r.rollout_id,
                "status": r.status,
                "value": r.value,
                "ruleset_id": "rules",
                "ruleset_hash": RULESETS[r.ruleset],
            }
            for r in rewards
        ]
        verdicts = self.call("POST", "/rewards", {"rewards": body})["verdicts"]
        return tuple((v["verdict"], v["state"], v["revision"]) for v in verdicts)

    def rescore(self, key: str, ruleset: str, values: dict[str, float]) -> Answer:
        rewards = [{"rollout_id": rollout_id, "value": value} for rollout_id, value in values.items()]
        body = {"group_id": key, "ruleset_id": "rules", "ruleset_hash": RULESETS[ruleset], "rewards": rewards}
        verdicts = self.call("POST", "/rewards/rescore", body)["verdicts"]
        return tuple((v["verdict"], v["state"], v["revision"]) for v in verdicts)

    def release(
        self, rollout_ids: Sequence[str] | None = None, update: str | None = None, reason: str | None = None
    ) -> Answer:
        body = {"rollout_ids": rollout_ids} if rollout_ids is not None else {"update_id": update, "reason": reason}
        verdicts = self.call("POST", "/rollouts/release", body)["verdicts"]
        return tuple((v["rollout_id"], v["verdict"], v["state"], v["revision"], v["reason"]) for v in verdicts)

    # policy versions

    def _content(self, version: int) -> bytes:
        return f"weights {version}".encode()

    def _file(self, version: int) -> Json:
        content = self._content(version)
        return {"name": "w.bin", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def publish(self, version: int, parent: int, updates: Sequence[str], artifact_hash: str) -> None:
        body = {"version": version, "parent_version": parent, "base_model": BASE, "files": [self._file(version)]}
        prepared = self.call("POST", "/policies", body | {"updates": list(updates)})
        assert prepared["artifact_hash"] == artifact_hash
        self.hashes[version] = artifact_hash
        self.call("PUT", f"/policies/{version}/files/w.bin", content=self._content(version))
        self.call("POST", f"/policies/{version}/commit")

    def _ack(self, worker: str, version: int) -> None:
        body = {"incarnation": "1", "version": version, "artifact_hash": self.hashes[version]}
        assert self.call("POST", f"/workers/{worker}/acks", body)["matching"]

    def open_activation(self, version: int, workers: Iterable[str]) -> None:
        self._last_activation += 1
        self.call("POST", f"/policies/{version}/activations", {"activation_id": f"a{self._last_activation}"})
        self._candidate = version
        for worker in workers:
            self._ack(worker, version)

    def switch(self, workers: Iterable[str]) -> None:
        for worker in workers:
            self._ack(worker, self._candidate)

    def give_up(self) -> None:
        self.call("POST", f"/activations/a{self._last_activation}/give-up", {"reason": "no"})

    # updates

    def _view(self, view: Json) -> Answer:
        return tuple(view[n] for n in ("state", "policy_version", "after_commit_no", "commit_no", "reserved"))

    def open_update(self, update_id: str, owner: str, version: int) -> Answer:
        body = {"owner": owner, "policy_version": version, "artifact_hash": self.hash_of(version)}
        return self._view(self.call("PUT", f"/updates/{update_id}", body))

    def renew(self, update_id: str, owner: str) -> Answer:
        return self._view(self.call("POST", f"/updates/{update_id}/renew", {"owner": owner}))

    def candidates(self, update_id: str, owner: str, count: int) -> Answer:
        answer = self.call("POST", f"/updates/{update_id}/candidates", {"owner": owner, "groups": count})
        assert (answer["empty"] is None) == bool(answer["groups"])
        rows = tuple((r["rollout_id"], r["revision"], r["lag"], r["reward"]) for r in answer["rollouts"])
        return tuple(answer["groups"]), rows

    def take(self, update_id: str, owner: str, count: int, after: int) -> Answer:
        body = {"owner": owner, "groups": count, "reserve": True, "after_commit_no": after}
        answer = self.call("POST", f"/updates/{update_id}/candidates", body)
        return tuple(sorted(answer["groups"])), tuple(sorted(self._verdict(v) for v in answer["reserved"] or ()))

    def _verdict(self, v: Json) -> Answer:
        return v["rollout_id"], v["verdict"], v["state"], v["revision"], v["lag"]

    def reserve(
        self, update_id: str, owner: str, after: int, wanted: Sequence[Wanted], confirm: bool = False
    ) -> Answer:
        rollouts = [
            {
                "rollout_id": w.rollout_id,
                "revision": w.revision,
                "current_log_probs": [None] * 3 + [BEHAVIOR + w.shift] * ACTIONS,
            }
            for w in wanted
        ]
        body = {"owner": owner, "after_commit_no": after, "confirm_drift": confirm, "rollouts": rollouts}
        answer = self.call("POST", f"/updates/{update_id}/reserve", body)
        groups = tuple((g["group_id"], g["usable"], g["refused_rewards"]) for g in answer["groups"])
        return tuple(self._verdict(v) for v in answer["verdicts"]), groups

    def commit(self, update_id: str, owner: str, after: int, discards: Sequence[str] = ()) -> Answer:
        named = [{"rollout_id": rollout_id, "reason": "no advantage"} for rollout_id in discards]
        body = {"owner": owner, "after_commit_no": after, "discards": named}
        return self._view(self.call("POST", f"/updates/{update_id}/commit", body))

    def abort(self, update_id: str, owner: str, quarantine: bool) -> Answer:
        body = {"owner": owner, "reason": "no", "quarantine": quarantine}
        return self._view(self.call("POST", f"/updates/{update_id}/abort", body))

    def expire(self) -> None:
        self.do(clocks.sweep(self.api.database, self.api.app.state.changes))

    def rewind(self, rewind_id: str, to: int, consumed: str) -> Answer:
        body = {"to_commit_no": to, "consumed": consumed, "reason": "the checkpoint was restored"}
        answer = self.call("PUT", f"/rewinds/{rewind_id}", body)
        restoring = answer["restoring"]
        if restoring is not None:
            assert restoring["state"] != "prepared"
            self.hashes[restoring["version"]] = restoring["artifact_hash"]
        assert not answer["no_restorable_version"]
        return (
            tuple(answer["rewound_updates"]),
            tuple(answer["fenced_updates"]),
            tuple(answer["withdrawn_versions"]),
            answer["released"],
            answer["quarantined"],
            None if restoring is None else restoring["version"],
        )

    def retain(self) -> int:
        return self.do(retention.sweep(self.api.database)).get(self.run_id, 0)


@contextmanager
def serving(url: str, kind: type[C]) -> Iterator[C]:
    """The app over the database at `url`, called in this way."""
    with tempfile.TemporaryDirectory() as artifacts, asyncio.Runner() as runner:
        database = connect(url, pool_size=4)
        app = create_app(database, Path(artifacts), max_body_bytes=2**20)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
        api = Api(app, database, http, {})
        try:
            runner.run(api.token("admin", "admin"))
            yield kind(runner, api)
        finally:
            runner.run(http.aclose())
            runner.run(database.close())
