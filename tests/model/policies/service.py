"""The service as the machine calls it; its calls have the names, the arguments and the answers of `Fleet`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import text

from coordinator.policies import fleet, queries, reading
from coordinator.rules.manifest import artifact_hash
from tests.api.ledger import BASE, BEHAVIOR, CONTRACT, Json
from tests.model.ledger import Answer
from tests.model.policies.fleet import Digest
from tests.model.service import LONG, Caller

# Set back by far more than `LONG`.
SILENCE = text("""
    UPDATE workers SET heartbeat_at = clock_timestamp() - interval '9 days'
    WHERE worker_id = :worker_id AND run_no = (SELECT run_no FROM runs WHERE run_id = :run_id)
""")
END_SLEEP = text("""
    UPDATE workers SET asleep_until = clock_timestamp() - interval '9 days'
    WHERE worker_id = :worker_id AND run_no = (SELECT run_no FROM runs WHERE run_id = :run_id)
""")
PASS_DEADLINE = text("""
    UPDATE activations SET deadline_at = clock_timestamp()
    WHERE state = 'open' AND run_no = (SELECT run_no FROM runs WHERE run_id = :run_id)
""")
TOLD = text("""
    SELECT event, subject FROM journal JOIN runs USING (run_no)
    WHERE run_id = :run_id AND (event LIKE 'policy.%' OR event LIKE 'activation.%') ORDER BY journal.event_no
""")


def sha256(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def word(reason: str | None) -> str | None:
    """The word that a reason begins with; what follows is for people."""
    return None if reason is None else reason.split(":")[0]


class Service(Caller):
    """As `Fleet` is called."""

    def create(self, settings: Json) -> None:
        """Another run, without workers."""
        self.begin(settings)
        self.contents: dict[str, bytes] = {}

    def now(self) -> Json:
        """Everything that the fleet in memory holds too, as the reading calls tell it."""
        activations = self.call("GET", "/activations")["activations"]
        watch = self.do(self.api.database.transaction(reading.watch, self.run_id))
        return {
            "versions": {p["version"]: [p["state"], p["lag_clock"]] for p in self.call("GET", "/policies")["policies"]},
            "activations": {
                a["activation_id"]: [
                    a["version"],
                    a["state"],
                    # What was said to one that ended is in the journal: here stands what its workers say by now.
                    [[r["worker_id"], r["ack"] if a["state"] == "open" else None] for r in a["required"]],
                    {d["worker_id"]: word(d["reason"]) for d in a["dropped"]},
                    word(a["reason"]) if a["state"] == "failed" else None,
                ]
                for a in activations
            },
            "workers": {
                w["worker_id"]: [w["incarnation"], w["state"], w["fenced"]]
                for w in self.call("GET", "/workers")["workers"]
            },
            "rollouts": {
                r["rollout_id"]: [r["state"], r["reason"], r["revision"]]
                for r in self.call("GET", "/rollouts")["rollouts"]
            },
            "pointer": {
                "active": watch.active.version,
                "candidate": watch.candidate and watch.candidate.activation_id,
            },
        }

    def told(self) -> tuple[Counter[tuple[str, str]], list[int]]:
        """What the journal says of versions and activations, and the switches in their order."""
        rows = [(row.event, row.subject) for row in self.read(TOLD)]
        switches = [int(subject) for event, subject in rows if event == "policy.activated"]
        return Counter(row for row in rows if row[0] != "policy.activated"), switches

    # policy versions

    def named(self, kind: str, version: int, variant: int) -> str:
        """The hash of an artifact, which has these bytes in this run only."""
        content = f"{self.run_id}: weights {version}.{variant}"
        found = sha256(content) if kind == "stream" else artifact_hash(kind, BASE, [self._of(content.encode())])
        self.contents[found] = content.encode()
        return found

    def _of(self, content: bytes) -> Json:
        return {"name": "w.bin", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def prepare(
        self, number: int, parent: int, kind: str, artifact_hash: str, digests: dict[str, str]
    ) -> Answer:  # fmt: skip
        body = {"version": number, "parent_version": parent, "base_model": BASE, "kind": kind, "digests": digests}
        if kind == "stream":
            body["artifact_hash"] = artifact_hash
        else:
            body["files"] = [self._of(self.contents[artifact_hash])]
        view = self.call("POST", "/policies", body)
        assert view["artifact_hash"] == artifact_hash
        self.hashes[number] = artifact_hash
        return view["state"], view["lag_clock"]

    def upload(self, number: int) -> Answer:
        content = self.contents.get(self.hashes.get(number, ""), b"nothing")
        assert self.call("PUT", f"/policies/{number}/files/w.bin", content=content)["stored"]
        return ("stored",)

    def commit(self, number: int) -> Answer:
        return (self.call("POST", f"/policies/{number}/commit")["state"],)

    # activations

    def open_activation(self, name: str, number: int, asked: tuple[str, ...] | None, supersede: bool) -> Answer:
        body = {"activation_id": name, "required_workers": asked, "supersede": supersede}
        view = self.call("POST", f"/policies/{number}/activations", body)
        return view["state"], tuple(r["worker_id"] for r in view["required"])

    def _verdict(self, v: Json) -> Answer:
        names = ("activated", "reason", "waits_for_hand", "missing_workers", "mismatched_workers")
        return *(v[name] for name in names), v["active"]["version"]

    def activate(self, number: int) -> Answer:
        return self._verdict(self.call("POST", f"/policies/{number}/activate"))

    def give_up(self, name: str) -> Answer:
        return (self.call("POST", f"/activations/{name}/give-up", {"reason": "no"})["state"],)

    # workers

    def _worker(self, method: str, path: str, body: Json) -> Answer:
        view = self.call(method, f"/workers/{path}", body)
        return view["state"], view["fenced"]

    def register(self, name: str, incarnation: str) -> Answer:
        return self._worker("PUT", name, {"incarnation": incarnation, "engine": "hand", "engine_version": "1"})

    def beat(self, name: str, incarnation: str, asleep: bool) -> Answer:
        body = {"incarnation": incarnation, "asleep_seconds": LONG if asleep else None}
        self.call("POST", f"/workers/{name}/heartbeat", body)
        return ()

    def drain(self, name: str, incarnation: str) -> Answer:
        return self._worker("POST", f"{name}/drain", {"incarnation": incarnation})

    def deregister(self, name: str, incarnation: str) -> Answer:
        return self._worker("POST", f"{name}/deregister", {"incarnation": incarnation})

    def fence(self, name: str) -> Answer:
        return self._worker("POST", f"{name}/fence", {"reason": "its disk is dying"})

    def fail_load(self, name: str, incarnation: str, number: int) -> Answer:
        body = {"incarnation": incarnation, "version": number, "stage": "load", "message": "out of memory"}
        return self._worker("POST", f"{name}/failures", body)

    def ack(
        self, name: str, incarnation: str, number: int, artifact_hash: str, digest: Digest | None, caches: Sequence[str]
    ) -> Answer:
        body: Json = {"incarnation": incarnation, "version": number, "artifact_hash": artifact_hash}
        body |= {"digest": None if digest is None else vars(digest), "caches_reset": caches}
        v = self.call("POST", f"/workers/{name}/acks", body)
        return v["matching"], v["reason"], None if v["activation"] is None else self._verdict(v["activation"])

    # the clock

    def silence(self, name: str) -> None:
        self.execute(SILENCE, worker_id=name)

    def sleep_ends(self, name: str) -> None:
        self.execute(END_SLEEP, worker_id=name)

    def deadline_passes(self) -> None:
        self.execute(PASS_DEADLINE)

    def tend(self) -> None:
        """What the sweeper does, to this run only: those of former examples have activations too."""
        if self.run_id in [row.run_id for row in self.read(queries.TO_TEND)]:
            self.do(self.api.database.transaction(fleet.tend, self.run_id))

    # rollouts

    def submit(self, rollout_id: str, name: str, incarnation: str, number: int, artifact_hash: str) -> Answer:
        rollout = {
            "rollout_id": rollout_id,
            "task_id": "task",
            "task_source": "hand",
            "group_id": rollout_id,
            "sample_index": 0,
            "attempt": 0,
            "worker_id": name,
            "incarnation": incarnation,
            "spans": [{"version": number, "artifact_hash": artifact_hash, "start": 0, "end": 2}],
            "span_source": "dispatch",
            "contract": CONTRACT,
            "token_ids": [1, 2],
            "action_mask": [False, True],
            "behavior_log_probs": [None, BEHAVIOR],
        }
        (v,) = self.call("POST", "/rollouts", {"rollouts": [rollout]})["verdicts"]
        return v["verdict"], v["state"], v["revision"], v["reason"] if v["verdict"] == "accepted" else None

    # withdrawal and rollback

    def _noted(self, restoring: Any) -> int | None:
        if restoring is None:
            return None
        self.hashes[restoring["version"]] = restoring["artifact_hash"]
        number: int = restoring["version"]
        return number

    def withdraw(self, number: int) -> Answer:
        a = self.call("POST", f"/policies/{number}/withdraw", {"reason": "not finite"})
        restoring = self._noted(a["restoring"])
        return a["withdrawn_versions"], a["released"], a["quarantined"], restoring, a["no_restorable_version"]

    def roll_back(self, name: str, to: int, opening: str | None) -> Answer:
        body = {"to_version": to, "reason": "rewards fell to zero", "activation_id": opening}
        a = self.call("PUT", f"/rollbacks/{name}", body)
        restoring = self._noted(a["restoring"])
        return a["withdrawn_versions"], a["released"], a["quarantined"], restoring, a["activation_id"]
