// A reward service in ten lines: what is generated gets a reward, also after this process was killed and came back.

import { connect, getEvidence, listRollouts, submitRewards } from "./index.js";

const client = connect({ url: process.env["COORDINATOR_URL"]!, token: process.env["COORDINATOR_TOKEN"]! });
const path = { run_id: process.env["RUN_ID"]! };
const ruleset = { ruleset_id: "last-token", ruleset_hash: process.env["RULESET_SHA256"]! };

for (;;) {
  const { rollouts } = await listRollouts({ client, path, query: { state: "generated" } });
  for (const { rollout_id } of rollouts) {
    const { token_ids } = await getEvidence({ client, path: { ...path, rollout_id } });
    const value = token_ids.at(-1)! / 10; // your score
    await submitRewards({ client, path, body: { rewards: [{ rollout_id, status: "ok", value, ...ruleset }] } });
  }
  await new Promise((resolve) => setTimeout(resolve, 1000));
}
