"""Every refusal has a stable code; this is the list of them, with the status and what to do next.

The document that carries one is RFC 9457's ``application/problem+json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True)
class ProblemCode:
    """One kind of refusal: its stable code, HTTP status, title, and the caller's next step."""

    code: str
    status: int
    title: str
    next_step: str


class ProblemDocument(BaseModel):
    """RFC 9457 problem document. `field` and `item` point at the fault where there is one; `request_id` is what the
    coordinator's log has of the request."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str
    next_step: str
    field: str | None = None
    item: str | None = None
    request_id: str | None = None


_ALL = [
    # who
    ProblemCode(
        "unauthenticated",
        401,
        "No valid token",
        "Send 'Authorization: Bearer <token>' with a token that is neither expired nor revoked.",
    ),
    ProblemCode(
        "forbidden",
        403,
        "This token may not do that",
        "Use a token of a role that the call lists, bound to this run (and, for a worker, to this worker id).",
    ),
    # what
    ProblemCode("not_found", 404, "No such address", "Look at /docs for the addresses there are."),
    ProblemCode(
        "method_not_allowed",
        405,
        "No such method at this address",
        "Look at /docs for the methods of this address.",
    ),
    ProblemCode("run_unknown", 404, "No such run", "Create the run first, or check its id."),
    ProblemCode("rollout_unknown", 404, "No such rollout", "Check the rollout id."),
    ProblemCode("update_unknown", 404, "No such update", "Open the update first, or check its id."),
    ProblemCode(
        "policy_version_unknown",
        404,
        "No such policy version",
        "Prepare the version first, or check its number.",
    ),
    ProblemCode("activation_unknown", 404, "No such activation", "Open the activation first, or check its id."),
    ProblemCode(
        "commit_unknown",
        404,
        "No such commit",
        "Name the commit_no that the checkpoint holds; /updates lists every update with its own.",
    ),
    ProblemCode("worker_unknown", 404, "No such worker", "Register the worker first, or check its id."),
    ProblemCode("token_unknown", 404, "No such token", "List the tokens, and check the id."),
    ProblemCode(
        "artifact_file_unknown",
        404,
        "The manifest has no such file",
        "Use a file name that the version's manifest lists.",
    ),
    ProblemCode("artifact_file_missing", 404, "The file has not been uploaded", "Upload it first."),
    # state
    ProblemCode(
        "run_conflict",
        409,
        "The run exists with other content",
        "Choose another run id, or send what it was created with.",
    ),
    ProblemCode(
        "update_owned",
        409,
        "Another owner has this update",
        "Choose an update id of your own; only the incarnation that opened an update may use it.",
    ),
    ProblemCode(
        "update_conflict",
        409,
        "The update was opened under another policy",
        "The policy of an update may be restated only before its first reservation; open another update.",
    ),
    ProblemCode(
        "update_fenced",
        409,
        "The update is not open",
        "It was committed, aborted or expired; look at it, discard the step, and open another.",
    ),
    ProblemCode(
        "lease_expired",
        409,
        "The update's lease has ended",
        "Discard the step and open another update; renew in time next time.",
    ),
    ProblemCode(
        "line_conflict",
        409,
        "The line of commits has moved on",
        "Your weights do not contain the last commit: load the newest checkpoint, and name its commit_no.",
    ),
    ProblemCode(
        "drift_suspect",
        409,
        "More than half of every worker's rollouts drifted",
        "Check the alignment of the current log-probs; send confirm_drift if they are right.",
    ),
    ProblemCode(
        "policy_conflict",
        409,
        "The version exists with other content",
        "A version is immutable: prepare the next number.",
    ),
    ProblemCode("policy_withdrawn", 409, "The policy version was withdrawn", "Use a version that is not withdrawn."),
    ProblemCode(
        "policy_state",
        409,
        "The version's state does not allow that",
        "What is abandoned or withdrawn stays so: publish the next number. Else keep the order: prepare, upload, "
        "commit, open, ack, activate.",
    ),
    ProblemCode(
        "policy_identity_conflict",
        409,
        "The version is known under another hash",
        "Name the artifact hash that the version was prepared with.",
    ),
    ProblemCode(
        "non_monotonic_version",
        409,
        "Version numbers only grow",
        "Prepare a version greater than every earlier one of the run.",
    ),
    ProblemCode(
        "update_not_committed",
        409,
        "The version names an update that is not committed",
        "Name only updates that are committed on the surviving line.",
    ),
    ProblemCode(
        "artifact_incomplete",
        409,
        "Files of the artifact are missing or changed",
        "Upload the files that are named, then commit again.",
    ),
    ProblemCode(
        "artifact_file_mismatch",
        409,
        "The file is not the one that the manifest names",
        "Send the very bytes whose size and sha256 the manifest has.",
    ),
    ProblemCode(
        "upload_offset",
        409,
        "The bytes begin beyond what has arrived",
        "Ask how much of the file is here, and go on from there.",
    ),
    ProblemCode(
        "upload_busy",
        409,
        "Another request is sending this file",
        "Ask in a second how much of the file is here, and go on from there.",
    ),
    ProblemCode("activation_open", 409, "Another activation is open", "Wait until it ends, or give it up."),
    ProblemCode(
        "activation_conflict",
        409,
        "The activation exists with other content",
        "Choose another activation id.",
    ),
    ProblemCode("activation_ended", 409, "The activation has ended", "Open a new activation for the version."),
    ProblemCode(
        "no_required_workers",
        409,
        "No worker would have to confirm this version",
        "Register a worker that is live and neither draining nor fenced, then open the activation again.",
    ),
    ProblemCode(
        "incarnation_superseded",
        409,
        "Another incarnation of this worker is registered",
        "This process was replaced: stop it, or register again as a new incarnation.",
    ),
    ProblemCode(
        "incarnation_unknown",
        409,
        "This incarnation is not registered",
        "Register the worker with this incarnation first.",
    ),
    ProblemCode(
        "token_conflict",
        409,
        "A token of that name exists",
        "Choose another name; a token that was revoked keeps its own.",
    ),
    ProblemCode(
        "policy_not_durable",
        409,
        "The version left no files that could be brought back",
        "Roll back to a version of kind base, lora or full.",
    ),
    ProblemCode(
        "rollback_conflict",
        409,
        "The rollback exists with other content",
        "Choose another rollback id, or send what it was made with.",
    ),
    ProblemCode(
        "rewind_conflict",
        409,
        "The rewind exists with other content",
        "Choose another rewind id, or send what it was made with.",
    ),
    ProblemCode(
        "commit_rewound",
        409,
        "An earlier rewind undid that commit",
        "Restore a checkpoint of a commit that survives, and name that one: its update is committed, not rewound.",
    ),
    ProblemCode(
        "beyond_retention",
        409,
        "The commit lies further back than the run keeps",
        "Rewind to one of the last rewind_commits commits, or begin another run from the checkpoint.",
    ),
    ProblemCode(
        "group_held",
        409,
        "An update holds or has consumed members of the group",
        "Rescore before the reservation, or after the update was aborted or rewound.",
    ),
    ProblemCode(
        "ruleset_conflict",
        409,
        "The update would mix rulesets",
        "The run has mix_rulesets off: name only groups of the ruleset that the update already holds.",
    ),
    ProblemCode("group_unknown", 404, "No such group", "Check the group id."),
    ProblemCode(
        "storage_full",
        429,
        "The run's storage limit is reached",
        "Wait as Retry-After says and send the same again; nothing of it was stored. Retention frees space.",
    ),
    ProblemCode(
        "rate_limited",
        429,
        "Too many requests",
        "Wait as Retry-After says and send the same again; send fewer and larger batches.",
    ),
    # size, shape, storage
    ProblemCode(
        "malformed_http",
        400,
        "This is no HTTP request",
        "Send HTTP/1.1 as RFC 9112 has it; a proxy or a client that writes requests by hand is at fault.",
    ),
    ProblemCode(
        "headers_too_large",
        431,
        "Address and headers are too large",
        "Send what is long in a body; a client or a proxy that adds headers without end is at fault.",
    ),
    ProblemCode("too_large", 413, "The request is too large", "Send fewer items in one call."),
    ProblemCode(
        "unsupported_media_type",
        415,
        "This content type is not understood here",
        "Send application/json or, where the call lists it, application/vnd.apache.arrow.stream.",
    ),
    ProblemCode(
        "range_not_satisfiable",
        416,
        "The file ends before that range begins",
        "Ask for bytes that the file has; the manifest says its size.",
    ),
    ProblemCode(
        "invalid_request",
        422,
        "The request has not the right shape",
        "Mend the field that is named; /docs shows every field.",
    ),
    ProblemCode(
        "invalid_arrow",
        422,
        "The Arrow stream could not be read",
        "Send one Arrow IPC stream with the columns that the call documents.",
    ),
    ProblemCode(
        "invalid_log_probs",
        422,
        "The current log-probs do not fit the rollout",
        "Send one finite log-prob for each action token, the array as long as token_ids.",
    ),
    ProblemCode(
        "partial_group",
        422,
        "A group was named in part",
        "Name every rewarded member of each group in one call.",
    ),
    ProblemCode(
        "invalid_file_name",
        422,
        "A file name would leave its folder",
        "Use relative names without '..', backslashes or control characters.",
    ),
    ProblemCode(
        "artifact_uri_not_allowed",
        422,
        "Artifacts may not lie there",
        "Use a plain URI below a prefix of the coordinator's COORDINATOR_ARTIFACT_URIS, or upload the files.",
    ),
    ProblemCode("no_space", 507, "The artifact store has no room for this", "Free space where the artifacts are kept."),
    ProblemCode(
        "internal_error",
        500,
        "The coordinator failed",
        "Send the request again; if it fails again, report it with the coordinator's log.",
    ),
    ProblemCode(
        "unavailable",
        503,
        "The database cannot be reached",
        "Send the request again in a moment; every call is safe to repeat.",
    ),
    ProblemCode(
        "not_ready",
        503,
        "The coordinator cannot do its work",
        "Mend what the detail names; until then send requests to another replica.",
    ),
    ProblemCode(
        "shutting_down",
        503,
        "The coordinator is about to end",
        "Send requests to another replica, or again in a moment.",
    ),
]

PROBLEMS: dict[str, ProblemCode] = {problem.code: problem for problem in _ALL}


def problem_document(code: str, detail: str, **extra: Any) -> dict[str, Any]:
    """The JSON body of a refusal. `extra` may hold `field`, `item` and what else helps; None is left out."""
    problem = PROBLEMS[code]
    return {
        "type": f"about:blank#{code}",
        "title": problem.title,
        "status": problem.status,
        "code": code,
        "detail": detail,
        "next_step": problem.next_step,
    } | {name: value for name, value in extra.items() if value is not None}
