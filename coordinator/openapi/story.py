"""One run from its creation to a commit, an activation and a rewind: every call of the API once or more, in order.

The examples of the OpenAPI document are these calls, with the answers that a coordinator gave to them
(`answers.json`). Played again on an empty database they get the same answers, but for times and secrets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.rules.manifest import artifact_hash
from coordinator.wire.tokens import Role

Json = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One call: the endpoint's name, what it is for, whose token it carries (none: no token), and what it sends."""

    operation: str
    title: str
    role: Role | None
    path: Mapping[str, str | int] = field(default_factory=dict)
    query: Mapping[str, str | int | float] = field(default_factory=dict)
    body: Json | None = None
    file: str | None = None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


RUN = "math-7b"
WORKER = "gpu-0"
LIFE = "gpu-0-life-1"
TRAINER = "trainer-0-life-1"
GROUP = "gsm8k-17"
FIRST, FAILED, SECOND = f"{GROUP}:0:0", f"{GROUP}:1:0", f"{GROUP}:1:1"
VIEWER_TOKEN = "3f9a1c5e7b20"

CONTRACT: Json = {
    "tokenizer_hash": _sha256("tokenizer.json"),
    "chat_template_hash": _sha256("chat_template.jinja"),
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "logprobs_mode": "processed",
    "dtype": "bfloat16",
}
BASE: Json = {"name": "Qwen/Qwen2.5-Math-7B", "revision": "b101308", "sha256": _sha256("model.safetensors")}
ADAPTER = '{"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "v_proj"]}'
FILES: list[Json] = [{"name": "adapter_config.json", "size": len(ADAPTER), "sha256": _sha256(ADAPTER)}]
BASE_HASH = artifact_hash("base", BASE, [])
DIGEST = {"layout": "vllm-lora/bfloat16/tp1", "registered": _sha256("registered"), "active": _sha256("active")}
ADAPTER_HASH = artifact_hash("lora", BASE, FILES)

# "What is 48 + 34?", to be answered by "82" or "72" and the end of the text: three tokens.
PROMPT = [3838, 374, 220, 19, 23, 488, 220, 18, 19, 30]
MASK = [False] * len(PROMPT) + [True] * 3
RULES = {"ruleset_id": "exact-match", "ruleset_hash": _sha256("exact_match.py")}
NEXT_RULES = {"ruleset_id": "math-verify", "ruleset_hash": _sha256("math_verify.py")}


def _rollout(rollout_id: str, index: int, attempt: int, answer: list[int], log_probs: list[float]) -> Json:
    tokens = PROMPT + answer
    return {
        "rollout_id": rollout_id,
        "task_id": GROUP,
        "task_source": "gsm8k",
        "group_id": GROUP,
        "sample_index": index,
        "attempt": attempt,
        "spans": [{"version": 0, "artifact_hash": BASE_HASH, "start": 0, "end": len(tokens)}],
        "span_source": "engine",
        "worker_id": WORKER,
        "incarnation": LIFE,
        "contract": CONTRACT,
        "generation": {
            "seed": 42 + index,
            "max_tokens": 512,
            "finish_reason": "stop",
            "engine": "vllm",
            "engine_version": "0.33.0",
        },
        "token_ids": tokens,
        "action_mask": MASK,
        "behavior_log_probs": [None] * len(PROMPT) + log_probs,
    }


def _reserve(revision: int) -> list[Json]:
    """Both members with the log-probs of the weights that are about to be trained."""
    return [
        {
            "rollout_id": rollout_id,
            "revision": revision,
            "current_log_probs": [None] * len(PROMPT) + log_probs,
            "use": use,
        }
        for rollout_id, log_probs, use in (
            (FIRST, [-0.28125, -0.125, -0.03125], "chosen"),
            (SECOND, [-1.5, -0.28125, -0.0625], "rejected"),
        )
    ]


_IN_RUN = {"run_id": RUN}
_OF_WORKER = {"run_id": RUN, "worker_id": WORKER}
_STEP_1 = {"run_id": RUN, "update_id": "step-1"}
_STEP_2 = {"run_id": RUN, "update_id": "step-2"}
_VERSION_1: dict[str, str | int] = {"run_id": RUN, "version": 1}
_FILE: dict[str, str | int] = {"run_id": RUN, "version": 1, "name": "adapter_config.json"}
_ALIVE = {"incarnation": LIFE}
_OWNER = {"owner": TRAINER}

STORY: tuple[Step, ...] = (
    # Somebody sets the run up.
    Step("healthz", "Is the process there?", None),
    Step("readyz", "Is its database there too?", None),
    Step(
        "create_token",
        "A token for the worker",
        "admin",
        body={"name": "gpu-0", "role": "worker", "run_id": RUN, "worker_id": WORKER},
    ),
    Step(
        "create_token", "A token for the trainer", "admin", body={"name": "trainer", "role": "trainer", "run_id": RUN}
    ),
    Step(
        "create_token",
        "A token for the reward service",
        "admin",
        body={"name": "verifier", "role": "reward", "run_id": RUN},
    ),
    Step(
        "create_token",
        "A token for a page that only reads, until the end of 2035",
        "admin",
        body={"name": "page", "role": "viewer", "expires_at": "2035-12-31T23:59:59Z"},
    ),
    Step("list_tokens", "Who may call", "admin"),
    Step(
        "create_run",
        "A run over groups of two, switched by hand",
        "admin",
        body={
            "run_id": RUN,
            "settings": {"group_size": 2, "max_attempts": 2, "groups_per_update": 1, "activation": "by_hand"},
            "contract": CONTRACT,
            "vocab_size": 152064,
            "policy": {"version": 0, "base_model": BASE},
        },
    ),
    Step("list_runs", "The runs there are", "viewer"),
    Step("get_run", "The run before anything happened", "viewer", _IN_RUN),
    # A worker comes, generates a group, and fails at one attempt.
    Step(
        "register_worker",
        "The worker starts",
        "worker",
        _OF_WORKER,
        body=_ALIVE | {"engine": "vllm", "engine_version": "0.33.0"},
    ),
    Step(
        "ack_policy",
        "It serves the first version",
        "worker",
        _OF_WORKER,
        body=_ALIVE | {"version": 0, "artifact_hash": BASE_HASH},
    ),
    Step(
        "note_stage",
        "It begins to load the first version",
        "worker",
        _OF_WORKER,
        body=_ALIVE | {"version": 0, "stage": "loading"},
    ),
    Step("heartbeat", "It lives", "worker", _OF_WORKER, body=_ALIVE),
    Step("list_workers", "The workers of the run", "viewer", _IN_RUN),
    Step("ask_tickets", "May this group be generated now?", "worker", _OF_WORKER, body=_ALIVE | {"group_ids": [GROUP]}),
    Step(
        "report_generation_failures",
        "The first attempt at the second sample ran out of memory",
        "worker",
        _IN_RUN,
        body={
            "failures": [
                {
                    "rollout_id": FAILED,
                    "task_id": GROUP,
                    "task_source": "gsm8k",
                    "group_id": GROUP,
                    "sample_index": 1,
                    "attempt": 0,
                    "worker_id": WORKER,
                    "incarnation": LIFE,
                    "kind": "out_of_memory",
                    "message": "CUDA out of memory while decoding",
                }
            ]
        },
    ),
    Step(
        "submit_rollouts",
        "Both samples of the group",
        "worker",
        _IN_RUN,
        body={
            "rollouts": [
                _rollout(FIRST, 0, 0, [23, 17, 151645], [-0.25, -0.125, -0.03125]),
                _rollout(SECOND, 1, 1, [22, 17, 151645], [-1.5, -0.25, -0.0625]),
            ]
        },
    ),
    # The reward service scores them, and scores them again under better rules.
    Step(
        "submit_rewards",
        "One answer is right, one is wrong",
        "reward",
        _IN_RUN,
        body={
            "rewards": [
                {"rollout_id": FIRST, "status": "ok", "value": 1.0, **RULES},
                {"rollout_id": SECOND, "status": "ok", "value": 0.0, **RULES},
            ]
        },
    ),
    Step(
        "rescore_group",
        "The same under a newer ruleset",
        "reward",
        _IN_RUN,
        body={
            "group_id": GROUP,
            **NEXT_RULES,
            "rewards": [
                {"rollout_id": FIRST, "components": {"correct": 1.0, "format": 0.5}},
                {"rollout_id": SECOND, "value": 0.5},
            ],
        },
    ),
    Step("list_rollouts", "What is rewarded", "viewer", _IN_RUN, {"state": "rewarded", "limit": 100}),
    Step("get_rollout", "One of them", "viewer", {"run_id": RUN, "rollout_id": FIRST}),
    Step("get_evidence", "Its tokens", "viewer", {"run_id": RUN, "rollout_id": FIRST}),
    Step("read_evidence", "The tokens of both", "viewer", _IN_RUN, body={"rollout_ids": [FIRST, SECOND]}),
    Step("count_rollouts", "How many are where", "viewer", _IN_RUN),
    Step("get_diagnosis", "What training waits for", "viewer", _IN_RUN),
    # The trainer takes one step with them.
    Step(
        "open_update",
        "The trainer's first step, on the base model",
        "trainer",
        _STEP_1,
        body=_OWNER | {"policy_version": 0, "artifact_hash": BASE_HASH},
    ),
    Step(
        "get_candidates",
        "One whole group, waiting up to 30 s for it",
        "trainer",
        _STEP_1,
        body=_OWNER | {"groups": 1, "wait_seconds": 30},
    ),
    Step(
        "reserve_rollouts",
        "Both members, with the log-probs of the weights before the step",
        "trainer",
        _STEP_1,
        body=_OWNER | {"after_commit_no": 0, "rollouts": _reserve(2)},
    ),
    Step("renew_update", "The step takes a while", "trainer", _STEP_1, body=_OWNER),
    Step("commit_update", "The step is done", "trainer", _STEP_1, body=_OWNER | {"after_commit_no": 0}),
    Step("get_update", "The update afterwards", "viewer", _STEP_1),
    Step("list_updates", "The last update of the run", "viewer", _IN_RUN, {"newest_first": True, "limit": 1}),
    Step(
        "get_statistics",
        "How the run moved in the last day",
        "viewer",
        _IN_RUN,
        {"window_seconds": 86400, "buckets": 1},
    ),
    Step("get_uses", "Which updates used rollouts of the base model", "viewer", _IN_RUN, {"version": 0}),
    Step("get_history", "Everything that happened to one rollout", "viewer", {"run_id": RUN, "rollout_id": FIRST}),
    Step("get_differences", "How far each of its tokens had moved", "viewer", {"run_id": RUN, "rollout_id": FIRST}),
    # The new weights become version 1.
    Step(
        "prepare_policy",
        "The adapter that the step made",
        "trainer",
        _IN_RUN,
        body={
            "version": 1,
            "parent_version": 0,
            "updates": ["step-1"],
            "kind": "lora",
            "base_model": BASE,
            "files": FILES,
        },
    ),
    Step("get_upload", "How much of its only file is here", "trainer", _FILE),
    Step("upload_file", "The file from its first byte on", "trainer", _FILE, {"offset": 0}, file=ADAPTER),
    Step("commit_policy", "All of it is there", "trainer", _VERSION_1),
    Step("open_activation", "Every live worker must load it", "trainer", _VERSION_1, body={"activation_id": "to-1"}),
    Step("watch", "What the worker hears", "worker", _IN_RUN, {"after": 0, "wait_seconds": 30}),
    Step("download_file", "The worker fetches the file", "worker", _FILE),
    Step(
        "ack_policy",
        "It serves version 1",
        "worker",
        _OF_WORKER,
        body=_ALIVE | {"version": 1, "artifact_hash": ADAPTER_HASH, "digest": DIGEST, "caches_reset": ["prefix"]},
    ),
    Step("activate_policy", "The switch", "trainer", _VERSION_1),
    Step("get_activation", "How the activation went", "viewer", {"run_id": RUN, "activation_id": "to-1"}),
    Step("get_timeline", "What took how long", "viewer", {"run_id": RUN, "activation_id": "to-1"}),
    Step("list_activations", "The activations of the run", "viewer", _IN_RUN),
    Step("get_policy", "The version that is active now", "viewer", _VERSION_1),
    Step("list_policies", "The versions of the run", "viewer", _IN_RUN),
    Step(
        "stream_events",
        "What a page that follows policies and activations is told",
        "viewer",
        _IN_RUN,
        {"after": 6, "events": "policy.,activation.", "wait_seconds": 0},
    ),
    Step("get_lineage", "What the step was made from, and what it led to", "viewer", _STEP_1),
    # Version 2 comes to nothing.
    Step(
        "prepare_policy",
        "A version that will fail",
        "trainer",
        _IN_RUN,
        body={
            "version": 2,
            "parent_version": 1,
            "kind": "lora",
            "base_model": BASE,
            "files": [{"name": "adapter_config.json", "size": 17, "sha256": _sha256("another adapter")}],
        },
    ),
    Step(
        "open_activation",
        "The worker by name, before the files are there",
        "trainer",
        {"run_id": RUN, "version": 2},
        body={"activation_id": "to-2", "required_workers": [WORKER]},
    ),
    Step(
        "report_failure",
        "The worker cannot download it",
        "worker",
        _OF_WORKER,
        body=_ALIVE | {"version": 2, "stage": "download", "message": "adapter_config.json: 404 artifact_file_missing"},
    ),
    Step(
        "give_up_activation",
        "The trainer gives it up",
        "trainer",
        {"run_id": RUN, "activation_id": "to-2"},
        body={"reason": "the files were lost before they were uploaded"},
    ),
    Step("get_failures", "The failures of the run", "viewer", _IN_RUN, {"limit": 500}),
    # The trainer's disk is lost with step 1: it restores the checkpoint from before it.
    Step(
        "rewind_line",
        "Back to before the first commit",
        "trainer",
        {"run_id": RUN, "rewind_id": "lost-checkpoint"},
        body={"to_commit_no": 0, "consumed": "release", "reason": "the checkpoint of step-1 was lost"},
    ),
    Step("list_rewinds", "The rewinds of the run", "viewer", _IN_RUN),
    Step(
        "open_update",
        "The next step, on the version that restores the base model",
        "trainer",
        _STEP_2,
        body=_OWNER | {"policy_version": 3, "artifact_hash": BASE_HASH},
    ),
    Step(
        "reserve_rollouts",
        "The same group, which the rewind released",
        "trainer",
        _STEP_2,
        body=_OWNER | {"after_commit_no": 0, "rollouts": _reserve(5)},
    ),
    Step(
        "abort_update",
        "The loss was not finite: what it holds must be looked at",
        "trainer",
        _STEP_2,
        body=_OWNER | {"reason": "loss_not_finite", "quarantine": True},
    ),
    Step("list_quarantine", "What is in quarantine, and why", "viewer", _IN_RUN),
    Step(
        "release_rollouts",
        "It was looked at, and is fine",
        "admin",
        _IN_RUN,
        body={"update_id": "step-2", "reason": "update_aborted"},
    ),
    # An operator at night.
    Step(
        "ack_policy",
        "It serves the version that restores the base model",
        "worker",
        _OF_WORKER,
        body=_ALIVE | {"version": 3, "artifact_hash": BASE_HASH, "caches_reset": ["prefix"]},
    ),
    Step(
        "prepare_policy",
        "Weights that were pushed to the engines",
        "trainer",
        _IN_RUN,
        body={
            "version": 4,
            "parent_version": 3,
            "kind": "stream",
            "base_model": BASE,
            "artifact_hash": _sha256("tensors"),
        },
    ),
    Step("commit_policy", "They leave no files to be checked", "trainer", {"run_id": RUN, "version": 4}),
    Step(
        "withdraw_policy",
        "They turn out to be not finite",
        "admin",
        {"run_id": RUN, "version": 4},
        body={"reason": "weights that are not finite"},
    ),
    Step(
        "roll_back",
        "Back to the base model, to be confirmed by the workers",
        "admin",
        {"run_id": RUN, "rollback_id": "at-night"},
        body={"to_version": 0, "reason": "rewards fell to zero since version 1", "activation_id": "to-the-base"},
    ),
    Step("list_rollbacks", "The rollbacks of the run", "viewer", _IN_RUN),
    Step(
        "get_audit",
        "Everything that happened to one rollout, rewind included",
        "viewer",
        _IN_RUN,
        {"rollout_id": SECOND, "limit": 1000},
    ),
    # The end.
    Step("fence_worker", "An operator takes the worker out", "admin", _OF_WORKER, body={"reason": "its fan is loud"}),
    Step("drain_worker", "It takes no more work", "worker", _OF_WORKER, body=_ALIVE),
    Step("deregister_worker", "It ends", "worker", _OF_WORKER, body=_ALIVE),
    Step("get_journal", "Everything that happened to the run", "viewer", _IN_RUN, {"after": 0, "limit": 500}),
    Step("revoke_token", "The page needs its token no longer", "admin", {"token_id": VIEWER_TOKEN}),
)
