// One run from its creation to a new active version, with the part of each role played under a token of that role.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import {
  ackPolicy, activatePolicy, commitPolicy, commitUpdate, connect, createRun, createToken, downloadFile, events,
  getCandidates, getEvidence, getLineage, getRollout, getRun, getUpload, listRollouts, openActivation, openUpdate,
  preparePolicy, Refused, registerWorker, reserveRollouts, submitRewards, submitRollouts, Unreachable, uploadFile,
  watch, type Client, type CreateToken, type ProblemCode, type Rollout,
} from "../src/index.js";
import { relay } from "./relay.js";

const url = process.env["COORDINATOR_URL"]!;
const RUN = "typescript";
const path = { run_id: RUN };
const sha256 = (text: string) => createHash("sha256").update(text).digest("hex");

const admin = connect({ url, token: process.env["COORDINATOR_TOKEN"]! });

async function as(role: CreateToken["role"], worker_id?: string): Promise<Client> {
  const bound = worker_id === undefined ? {} : { worker_id };
  const { token } = await createToken({ client: admin, body: { name: `${RUN}-${role}`, role, run_id: RUN, ...bound } });
  return connect({ url, token });
}

/** The refusal's code, told apart at compile time. */
async function code(call: Promise<unknown>): Promise<ProblemCode> {
  try {
    await call;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    switch (error.code) {
      case "run_unknown":
      case "unauthenticated":
      case "forbidden":
      case "invalid_request":
      case "line_conflict":
        assert.ok(error.problem.next_step);
        return error.code;
      // @ts-expect-error: there is no such code
      case "no_such_code":
        return error.code;
      default:
        return assert.fail(`not expected: ${error.message}`);
    }
  }
  return assert.fail("it was not refused");
}

// --- the run, and who may do what

const contract = {
  tokenizer_hash: sha256("tokenizer"), chat_template_hash: sha256("template"), temperature: 1.0, top_p: 1.0,
  logprobs_mode: "raw" as const, dtype: "float32" as const,
};
const base_model = { name: "tiny", revision: "1", sha256: sha256("weights") };
const setup = {
  run_id: RUN, settings: { group_size: 2, activation: "by_hand" as const }, contract, vocab_size: 100,
  policy: { base_model },
};
const run = await createRun({ client: admin, body: setup });
assert.deepEqual(await createRun({ client: admin, body: setup }), run, "the same again is a success");
const [worker, reward, trainer, viewer] = await Promise.all([as("worker", "w"), as("reward"), as("trainer"), as("viewer")]);

assert.equal(await code(getRun({ client: admin, path: { run_id: "nobody-s" } })), "run_unknown");
assert.equal(await code(createRun({ client: viewer, body: setup })), "forbidden");
assert.equal(await code(getRun({ client: connect({ url, token: "rct_0_0" }), path })), "unauthenticated");
assert.equal(await code(createRun({ client: admin, body: { ...setup, vocab_size: 2.5 } })), "invalid_request");

// --- the worker

const life = { incarnation: "w-life-1" };
const at = { ...path, worker_id: "w" };
await registerWorker({ client: worker, path: at, body: { ...life, engine: "by hand", engine_version: "1" } });
const acked = await ackPolicy({ client: worker, path: at, body: { ...life, ...run.active } });
assert.ok(acked.matching);

// Log-probs are stored as float32; JSON has no NaN, which JSON.stringify makes null: right where a token is masked.
const LOG_PROB = -0.1;
function rollout(index: number, changes: Partial<Rollout> = {}): Rollout {
  return {
    rollout_id: `sum:${index}`, task_id: "sum", task_source: "by-hand", group_id: "sum", sample_index: index,
    spans: [{ ...run.active, start: 0, end: 4 }], span_source: "dispatch", worker_id: "w", ...life, contract,
    generation: { seed: Number.MAX_SAFE_INTEGER }, token_ids: [1, 2, 3, 4 + index],
    action_mask: [false, false, true, true], behavior_log_probs: [NaN, null, LOG_PROB, LOG_PROB], ...changes,
  };
}
const sent = [rollout(0), rollout(1), rollout(2, { behavior_log_probs: [null, null, NaN, LOG_PROB] })];
const arrived = await submitRollouts({ client: worker, path, body: { rollouts: sent } });
assert.deepEqual(arrived.verdicts.map((v) => v.verdict), ["accepted", "accepted", "rejected"]);
assert.match(arrived.verdicts[2]!.detail!, /2/, "an action log-prob that is NaN is refused, and its place named");
const again = await submitRollouts({ client: worker, path, body: { rollouts: sent.slice(0, 2) } });
assert.deepEqual(again.verdicts.map((v) => v.verdict), ["duplicate", "duplicate"]);

const evidence = await getEvidence({ client: viewer, path: { ...path, rollout_id: "sum:0" } });
assert.deepEqual(evidence.behavior_log_probs, [null, null, Math.fround(LOG_PROB), Math.fround(LOG_PROB)]);
const view = await getRollout({ client: viewer, path: { ...path, rollout_id: "sum:0" } });
assert.equal(view.generation.seed, Number.MAX_SAFE_INTEGER);

// --- the trainer waits for the reward service

const owner = "trainer-life-1";
const step = { ...path, update_id: "step-1" };
await openUpdate({ client: trainer, path: step, body: { owner } });
const waiting = getCandidates({ client: trainer, path: step, body: { owner, groups: 1, wait_seconds: 30 } });

const ruleset = { ruleset_id: "last-token", ruleset_hash: sha256("rules") };
const score = (index: number, value: number) => ({ rollout_id: `sum:${index}`, status: "ok" as const, value, ...ruleset });
const generated = await listRollouts({ client: reward, path, query: { state: "generated" } });
assert.deepEqual(generated.rollouts.map((r) => r.rollout_id), ["sum:0", "sum:1"]);
const scored = await submitRewards({ client: reward, path, body: { rewards: [score(0, 0.1 + 0.2), score(1, NaN)] } });
assert.deepEqual(scored.verdicts.map((v) => v.verdict), ["stored", "rejected"], "a reward that is NaN is none");
await submitRewards({ client: reward, path, body: { rewards: [score(1, 0)] } });

const candidates = await waiting;
assert.deepEqual(candidates.groups, ["sum"]);
assert.equal(candidates.rollouts[0]!.reward, 0.1 + 0.2, "rewards are float64");
const reservation = {
  owner, after_commit_no: 0,
  rollouts: candidates.rollouts.map(({ rollout_id, revision, behavior_log_probs }) => ({
    rollout_id, revision, current_log_probs: behavior_log_probs.map((p) => (p === null ? null : p - 0.05)),
  })),
};
const stale = reserveRollouts({ client: trainer, path: step, body: { ...reservation, after_commit_no: 7 } });
assert.equal(await code(stale), "line_conflict");
const reserved = await reserveRollouts({ client: trainer, path: step, body: reservation });
assert.deepEqual(reserved.verdicts.map((v) => v.verdict), ["reserved", "reserved"]);
assert.ok(Math.abs(reserved.verdicts[0]!.drift! - 0.05) < 1e-6);

const commit = { client: trainer, path: step, body: { owner, after_commit_no: 0 } };
assert.equal((await commitUpdate(commit)).commit_no, 1);
assert.equal((await commitUpdate(commit)).commit_no, 1, "a commit that is sent again is the same commit");

// --- the new version, from the trainer to the worker, who hears of it by a long poll

const weights = "the weights after step 1";
const files = [{ name: "adapters/lora.bin", size: weights.length, sha256: sha256(weights) }];
const prepared = await preparePolicy({
  client: trainer, path, body: { version: 1, parent_version: 0, updates: ["step-1"], base_model, files },
});
const file = { ...path, version: 1, name: files[0]!.name };
const upload = await uploadFile({ client: trainer, path: file, body: new Blob([weights]) });
assert.ok(upload.stored && (await getUpload({ client: trainer, path: file })).stored);
assert.equal((await commitPolicy({ client: trainer, path: { ...path, version: 1 } })).state, "committed");

const seen = await watch({ client: worker, path });
assert.equal(seen.candidate, null);
const hears = watch({ client: worker, path, query: { after: seen.event_no, wait_seconds: 30 } });
await openActivation({ client: trainer, path: { ...path, version: 1 }, body: { activation_id: "to-1" } });
const { candidate } = await hears;
assert.equal(candidate!.artifact_hash, prepared.artifact_hash);
const downloaded = await downloadFile({ client: worker, path: file });
assert.equal(sha256(await downloaded.text()), files[0]!.sha256);
const { artifact_hash, version } = candidate!;
const confirmed = await ackPolicy({ client: worker, path: at, body: { ...life, version, artifact_hash } });
assert.ok(confirmed.matching && confirmed.activation?.waits_for_hand);
assert.ok((await activatePolicy({ client: trainer, path: { ...path, version: 1 } })).activated);
assert.equal((await getRun({ client: viewer, path })).active.version, 1);

const lineage = await getLineage({ client: viewer, path: step });
assert.deepEqual(lineage.members.map((m) => [m.rollout_id, m.outcome]), [["sum:0", "consumed"], ["sum:1", "consumed"]]);
assert.deepEqual(lineage.made_versions, [1]);

// --- the journal as a stream: through a proxy that is away at first and cuts streams off, without a hole

const proxy = await relay(url);
const { token } = await createToken({ client: admin, body: { name: "page", role: "viewer" } });
const page = connect({ url: proxy.url, token, retrySeconds: 20 });
proxy.away = 2;
const last = (await getRun({ client: page, path })).event_no;
proxy.cuts = 3;
const told: number[] = [];
for await (const { id } of events(page, RUN, { after: 0 })) {
  told.push(id);
  if (id === last) break;
}
assert.equal(proxy.cuts, 0);
assert.deepEqual(told, Array.from({ length: last }, (_, i) => i + 1));
for await (const { data } of events(page, RUN, { after: last - 1 })) {
  assert.ok("event" in data && data.event === "policy.activated");
  break;
}
assert.equal(await code(events(page, "nobody-s").next()), "run_unknown");
proxy.close();
await assert.rejects(getRun({ client: connect({ url: proxy.url, token, retrySeconds: 0 }), path }), Unreachable);

console.log(JSON.stringify({ events: told.length, consumed: lineage.members.length, active: version }));
process.exit(0);
