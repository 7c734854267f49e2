// One training step: whole groups in, log-probs of the weights that are about to be trained, one commit.

import { commitUpdate, connect, getCandidates, getRun, openUpdate, reserveRollouts } from "./index.js";

const client = connect({ url: process.env["COORDINATOR_URL"]!, token: process.env["COORDINATOR_TOKEN"]! });
const run_id = process.env["RUN_ID"]!;
const owner = `trainer-${process.pid}-${Date.now()}`; // this life of the process

const { last_commit_no: after_commit_no } = await getRun({ client, path: { run_id } });
const path = { run_id, update_id: `step-${after_commit_no + 1}` };
await openUpdate({ client, path, body: { owner } });
const { rollouts } = await getCandidates({ client, path, body: { owner, groups: 1, wait_seconds: 60 } });
const asked = rollouts.map(({ rollout_id, revision, behavior_log_probs }) => {
  const current_log_probs = behavior_log_probs; // your weights' own, of the same tokens
  return { rollout_id, revision, current_log_probs };
});
const { verdicts } = await reserveRollouts({ client, path, body: { owner, after_commit_no, rollouts: asked } });
const admitted = rollouts.filter((_, i) => verdicts[i]!.verdict === "reserved");
// Your optimizer step on `admitted`; when it takes longer than a third of the lease, renewUpdate meanwhile.
const { commit_no } = await commitUpdate({ client, path, body: { owner, after_commit_no } });
console.log(`commit ${commit_no}: ${admitted.length} rollouts consumed`);
process.exit(0);
