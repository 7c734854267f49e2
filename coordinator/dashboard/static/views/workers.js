// The workers of a run: whether each lives, what it serves, how its rollouts drift, and why it is out if it is.
import { count, real } from "../format.js";
import { html } from "../lib.js";
import { useResource } from "../resource.js";
import { to } from "../router.js";
import { Age, Empty, Loaded, Panel, State, Table, Version } from "../ui.js";

export const EVERY = 5000; // heartbeats are no events

export const NoWorkers = ({ run }) => html`<${Empty}>No worker is registered. Start one beside the engine: <code>worker-agent run --run ${run} …</code><//>`;

/** What an operator looks at first: lost, fenced and suspect before those that are well. */
const urgency = (worker) => (worker.state === "deregistered" ? 3 : worker.fenced || worker.state === "lost" ? 0 : worker.suspect_reason ? 1 : 2);

export const byUrgency = (workers) => [...workers].sort((a, b) => urgency(a) - urgency(b) || (a.worker_id < b.worker_id ? -1 : 1));

export function WorkersView({ run, query }) {
  const workers = useResource(["runs", run, "workers"], {}, { every: EVERY, on: ["worker.", "activation.", "policy."] });
  return html`<h1>Workers</h1>
    <${Loaded} resource=${workers}>${({ workers: all }) => {
      if (all.length === 0) return html`<${NoWorkers} run=${run} />`;
      const shown = byUrgency(query.worker ? all.filter((worker) => worker.worker_id === query.worker) : all);
      return html`<${Panel} title=${query.worker ? `Worker ${query.worker}` : `${all.length} registered`} id="workers" aside=${query.worker && html`<a href=${to("runs", run, "workers")}>All workers</a>`}>
        <${Table} label="Workers" columns=${[["Worker"], ["State"], ["Heartbeat"], ["Serves", "n"], ["Drift at lag 0", "n"], ["Fence"], ["Suspect"], ["Engine"], ["Registered"], ["Rollouts"]]}
          rows=${shown.map((worker) => html`<tr key=${worker.worker_id}>
            <th scope="row"><span class="id" title=${`incarnation ${worker.incarnation}`}>${worker.worker_id}</span></th>
            <td><${State} of=${worker.state} /></td>
            <td class=${worker.state === "lost" ? "bad" : ""}><${Age} at=${worker.heartbeat_at} /></td>
            <td class="n"><${Version} run=${run} of=${worker.version} /></td>
            <td class="n" title="mean |d log-prob| of its rollouts that were measured at lag 0">${worker.drift === null ? "none yet" : html`${real(worker.drift)} <small>of ${count(worker.drift_rollouts)}</small>`}</td>
            <td class="detail">${worker.fenced ? html`<${State} of="fenced" /> ${worker.fenced_reason}` : "–"}</td>
            <td class="detail">${worker.suspect_reason ? html`<${State} of="suspect" /> ${worker.suspect_reason}` : "–"}</td>
            <td>${worker.engine} ${worker.engine_version}</td>
            <td><${Age} at=${worker.registered_at} /></td>
            <td><a href=${to("runs", run, "rollouts", { worker_id: worker.worker_id })}>its rollouts</a></td>
          </tr>`)} />
      <//>`;
    }}<//>`;
}
