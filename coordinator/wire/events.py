"""Every event that the journal of a run may hold: what it is about, and what its detail says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EventKind:
    """One kind of event. `detail` names the fields that every such event has, `sometimes` those that some have."""

    meaning: str
    subject: str
    detail: tuple[str, ...] = ()
    sometimes: tuple[str, ...] = ()


_VERSION, _ACTIVATION, _WORKER, _UPDATE = "the version's number", "the activation", "the worker", "the update"

EVENTS: dict[str, EventKind] = {
    "run.created": EventKind("The run begins with its first version active", "the run", ("version", "artifact_hash")),
    "worker.registered": EventKind(
        "A life of a worker begins; the acks of the one before are void",
        _WORKER,
        ("incarnation", "engine", "engine_version"),
    ),
    "worker.stage": EventKind(
        "It is downloading, verifying or loading a version",
        _WORKER,
        ("incarnation", "version", "stage", "activation_id"),
    ),
    "worker.acked": EventKind(
        "It says what it serves; only a matching ack counts",
        _WORKER,
        (
            "incarnation",
            "version",
            "artifact_hash",
            "matching",
            "detail",
            "digest",
            "caches_reset",
            "activation_id",
        ),
    ),
    "worker.failed": EventKind("It could not take a version over", _WORKER, ("version", "stage", "message")),
    "worker.fenced": EventKind("It is out until it acks a version that it loaded whole", _WORKER, ("reason",)),
    "worker.unfenced": EventKind("It did so", _WORKER, ("reason",)),
    "worker.draining": EventKind("It takes no part in activations to come", _WORKER),
    "worker.deregistered": EventKind("This life of it has ended", _WORKER),
    "policy.prepared": EventKind(
        "A version has a manifest", _VERSION, ("artifact_hash", "parent_version", "updates"), ("restores",)
    ),
    "policy.committed": EventKind("All of its files are there and right", _VERSION, ("artifact_hash",)),
    "policy.files_removed": EventKind("Retention took its files away", _VERSION, ("artifact_hash",)),
    "policy.activated": EventKind(
        "The switch: it is active from now on", _VERSION, ("activation_id", "artifact_hash", "retired")
    ),
    "policy.withdrawn": EventKind("It is out of use, with what was made with it", _VERSION, ("reason",)),
    "policy.withdrawal": EventKind(
        "What a withdrawal of it came to",
        _VERSION,
        (
            "withdrawn",
            "fenced",
            "released",
            "quarantined",
            "restoring_version",
            "no_restorable_version",
            "reason",
        ),
    ),
    "policy.rolled_back": EventKind(
        "It brings the artifact of an earlier version back",
        _VERSION,
        ("rollback_id", "to_version", "fenced", "withdrawn", "released", "quarantined", "reason"),
    ),
    "activation.waiting": EventKind(
        "It opens when the activation that is open has ended", _ACTIVATION, ("version", "behind")
    ),
    "activation.opened": EventKind(
        "The workers that must confirm a version are frozen",
        _ACTIVATION,
        ("version", "artifact_hash", "required_workers"),
    ),
    "activation.dropped": EventKind("A worker is required no longer", _ACTIVATION, ("worker_id", "reason")),
    "activation.failed": EventKind("It ended without the switch", _ACTIVATION, ("version", "reason")),
    "activation.given_up": EventKind("It was given up, and its version abandoned", _ACTIVATION, ("version", "reason")),
    "activation.superseded": EventKind(
        "A newer version took its place, and its own is abandoned", _ACTIVATION, ("version", "reason")
    ),
    "update.opened": EventKind(
        "A training step begins", _UPDATE, ("owner", "policy_version", "artifact_hash", "lease_until")
    ),
    "update.restated": EventKind("It is on other weights than it said", _UPDATE, ("policy_version", "artifact_hash")),
    "update.renewed": EventKind("Its lease is longer", _UPDATE, ("lease_until",)),
    "update.committed": EventKind(
        "What it held is consumed",
        _UPDATE,
        ("commit_no", "after_commit_no", "consumed", "discarded", "lease_until"),
    ),
    "update.aborted": EventKind("Its owner gave it up", _UPDATE, ("reason", "released", "quarantined")),
    "update.expired": EventKind("Its lease ended", _UPDATE, ("reason", "released", "quarantined")),
    "update.fenced": EventKind(
        "A rewind, rollback or withdrawal ended it", _UPDATE, ("reason", "released", "quarantined")
    ),
    "line.rewound": EventKind(
        "The line went back to an earlier commit",
        "the rewind",
        (
            "rewind_id",
            "to_commit_no",
            "consumed",
            "rewound",
            "fenced",
            "withdrawn",
            "released",
            "quarantined",
            "reason",
        ),
    ),
}
