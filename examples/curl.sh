#!/usr/bin/env bash
# curl alone, from nothing to a consumed rollout and a new version. Run it where `coordinator serve` was started, or name
# the coordinator in COORDINATOR_URL and an admin's token in COORDINATOR_TOKEN.
set -eu

URL=${COORDINATOR_URL:-$(cat .data/address)} TOKEN=${COORDINATOR_TOKEN:-$(cat .data/admin.token)} RUN=first-run
call() {  # method, path, body
  curl -sS -X "$1" "$URL/v1$2" -H "Authorization: Bearer $TOKEN" -H 'Content-Type: application/json' ${3:+-d "$3"}
  echo
}
sha256() { printf '%s' "$1" | sha256sum | cut -d ' ' -f 1; }
field() { grep -o "\"$1\":[^,}]*" | head -n 1 | cut -d : -f 2- | tr -d '"'; }

# An admin creates the run: how tokens are generated, and the model that it begins with, which becomes version 0.
BASE='{"name": "my-model", "revision": "1", "sha256": "'$(sha256 weights)'"}'
CONTRACT='{"tokenizer_hash": "'$(sha256 tokenizer)'", "chat_template_hash": "'$(sha256 template)'",
  "temperature": 1.0, "top_p": 1.0, "logprobs_mode": "raw", "dtype": "float32"}'
call POST /runs '{"run_id": "'$RUN'", "contract": '"$CONTRACT"', "vocab_size": 1000,
  "policy": {"base_model": '"$BASE"'}}'
HASH=$(call GET /runs/$RUN | field artifact_hash)

# A worker registers this life of its process, confirms that it serves version 0, and hands in one rollout.
call PUT /runs/$RUN/workers/gpu-0 '{"incarnation": "gpu-0-life-1", "engine": "by-hand", "engine_version": "1"}'
call POST /runs/$RUN/workers/gpu-0/acks \
  '{"incarnation": "gpu-0-life-1", "version": 0, "artifact_hash": "'$HASH'"}'
call POST /runs/$RUN/rollouts '{"rollouts": [{"rollout_id": "sum-1:0", "task_id": "sum-1", "task_source": "sums",
  "group_id": "sum-1:0", "sample_index": 0, "worker_id": "gpu-0", "incarnation": "gpu-0-life-1",
  "spans": [{"version": 0, "artifact_hash": "'$HASH'", "start": 0, "end": 5}], "span_source": "dispatch",
  "contract": '"$CONTRACT"', "token_ids": [11, 12, 13, 14, 15], "action_mask": [false, false, true, true, true],
  "behavior_log_probs": [null, null, -0.7, -0.1, -1.2]}]}'

# A reward service scores it.
call POST /runs/$RUN/rewards '{"rewards": [{"rollout_id": "sum-1:0", "status": "ok", "value": 1.0,
  "ruleset_id": "exact", "ruleset_hash": "'$(sha256 rules)'"}]}'

# A trainer opens an update on version 0, asks what it could train on, and binds it: at the revision that it saw, with
# the log-probs of its own weights before the step. It steps, then commits. Commit 0 is the one before the first.
call PUT /runs/$RUN/updates/step-1 '{"owner": "trainer-life-1", "policy_version": 0, "artifact_hash": "'$HASH'"}'
REVISION=$(call POST /runs/$RUN/updates/step-1/candidates '{"owner": "trainer-life-1", "groups": 1}' | field revision)
call POST /runs/$RUN/updates/step-1/reserve '{"owner": "trainer-life-1", "after_commit_no": 0, "rollouts": [
  {"rollout_id": "sum-1:0", "revision": '$REVISION', "current_log_probs": [null, null, -0.71, -0.11, -1.21]}]}'
call POST /runs/$RUN/updates/step-1/commit '{"owner": "trainer-life-1", "after_commit_no": 0}'

# Its new weights, one small file here, become version 1: named, uploaded, committed, and active once gpu-0 has them.
WEIGHTS='the weights after step 1'
call POST /runs/$RUN/policies '{"version": 1, "parent_version": 0, "updates": ["step-1"], "base_model": '"$BASE"',
  "files": [{"name": "adapter.bin", "size": '${#WEIGHTS}', "sha256": "'$(sha256 "$WEIGHTS")'"}]}'
call PUT /runs/$RUN/policies/1/files/adapter.bin "$WEIGHTS"
call POST /runs/$RUN/policies/1/commit
HASH=$(call GET /runs/$RUN/policies/1 | field artifact_hash)
call POST /runs/$RUN/policies/1/activations '{"activation_id": "activate-1"}'
call POST /runs/$RUN/workers/gpu-0/acks \
  '{"incarnation": "gpu-0-life-1", "version": 1, "artifact_hash": "'$HASH'"}'

call GET /runs/$RUN/rollouts/sum-1:0 | field state           # consumed
call GET /runs/$RUN/updates/step-1 | field commit_no         # 1
call GET /runs/$RUN/activations/activate-1 | field state     # succeeded
