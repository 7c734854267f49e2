// Activations: all of them, and one with each worker's stage as it comes.
import { duration } from "../format.js";
import { html } from "../lib.js";
import { useResource } from "../resource.js";
import { to } from "../router.js";
import { Age, Empty, Facts, Loaded, Panel, State, Table, Until, Version, WorkerLink } from "../ui.js";

const STEPS = ["downloading", "verifying", "loading", "acked"];
const TROUBLE = ["mismatched", "failed", "fenced", "dropped"];
const ON = ["worker.", "activation.", "policy."];

export function ActivationsView({ run }) {
  const activations = useResource(["runs", run, "activations"], {}, { every: 60000, on: ["activation.", "policy.activated", "worker.acked"] });
  return html`<h1>Activations</h1>
    <${Loaded} resource=${activations}>${({ activations: all }) =>
      all.length === 0
        ? html`<${Empty}>No version was to be activated yet. A trainer publishes one and calls <code>run.activate(version)</code>.<//>`
        : html`<${Panel} title=${`${all.length} activations`} id="activations">
            <${Table} label="Activations" columns=${[["Activation"], ["Version", "n"], ["State"], ["Confirmed", "n"], ["Dropped", "n"], ["Asked"], ["Took", "n"], ["Reason"]]}
              rows=${[...all].reverse().map((activation) => html`<tr key=${activation.activation_id}>
                <th scope="row"><a class="id" href=${to("runs", run, "activations", activation.activation_id)}>${activation.activation_id}</a></th>
                <td class="n"><${Version} run=${run} of=${activation.version} /></td>
                <td><${State} of=${activation.state} /></td>
                <td class="n">${activation.required.filter((worker) => worker.ack === "matching").length} of ${activation.required.length}</td>
                <td class="n">${activation.dropped.length}</td>
                <td><${Age} at=${activation.asked_at} /></td>
                <td class="n">${activation.opened_at === null ? "waits" : activation.ended_at ? duration((Date.parse(activation.ended_at) - Date.parse(activation.opened_at)) / 1000) : html`<${Age} at=${activation.opened_at} ago=${false} />`}</td>
                <td class="detail">${activation.reason ?? "–"}</td>
              </tr>`)} />
          <//>`}
    <//>`;
}

/** How far a worker has come: its last step decides, and the steps up to it are done. */
function Ladder({ steps, ack }) {
  const last = steps.filter((step) => step.step !== "registered").at(-1);
  const word = ack === "matching" ? "acked" : last?.step ?? "waiting";
  const wrong = TROUBLE.includes(word);
  const reached = wrong ? Math.max(-1, ...steps.map((step) => STEPS.indexOf(step.step))) : STEPS.indexOf(word);
  return html`<span class="ladder ${wrong ? "wrong" : ""}">
    <span class="rungs" aria-hidden="true">${STEPS.map((step, number) => html`<i class=${number < reached || word === "acked" ? "done" : number === reached ? "now" : ""} title=${step}></i>`)}</span>
    <${State} of=${word} tone=${wrong ? "bad" : word === "acked" ? "good" : word === "waiting" ? "plain" : "warn"} />
  </span>`;
}

/** Each required worker's stage, live. */
export function Stages({ run, id }) {
  const activation = useResource(["runs", run, "activations", id], {}, { every: 10000, on: ON });
  const timeline = useResource(["runs", run, "activations", id, "timeline"], {}, { every: 10000, on: ON });
  return html`<${Loaded} resource=${activation}>${({ required, dropped }) => {
    const steps = Object.fromEntries((timeline.data?.workers ?? []).map((worker) => [worker.worker_id, worker.steps]));
    if (required.length + dropped.length === 0) return html`<${Empty}>It waits for the open activation to end; the workers that must confirm it are frozen then.<//>`;
    return html`<${Table} label="Workers of the activation" columns=${[["Worker"], ["Stage"], ["Since"], ["Detail"]]}
      rows=${[
        ...required.map((worker) => {
          const told = steps[worker.worker_id] ?? [], last = told.at(-1);
          // A worker is fenced because of what it reported just before.
          const why = last?.step === "fenced" ? (told.at(-2)?.step === "failed" ? told.at(-2) : last) : last;
          return html`<tr key=${worker.worker_id}>
            <th scope="row"><${WorkerLink} run=${run} id=${worker.worker_id} /></th>
            <td><${Ladder} steps=${told} ack=${worker.ack} /></td>
            <td>${last ? html`<${Age} at=${last.at} />` : "–"}</td>
            <td class="detail">${worker.detail ?? why?.detail ?? "–"}</td>
          </tr>`;
        }),
        ...dropped.map((worker) => html`<tr key=${worker.worker_id}>
          <th scope="row"><${WorkerLink} run=${run} id=${worker.worker_id} /></th>
          <td><${State} of="dropped" /></td><td><${Age} at=${worker.dropped_at} /></td><td class="detail">${worker.reason}</td>
        </tr>`),
      ]} />`;
  }}<//>`;
}

function Steps({ run, id }) {
  const timeline = useResource(["runs", run, "activations", id, "timeline"], {}, { on: ON });
  return html`<${Loaded} resource=${timeline}>${({ steps, workers }) => {
    const all = [...steps.map((step) => [step, null]), ...workers.flatMap((worker) => worker.steps.map((step) => [step, worker.worker_id]))];
    all.sort(([a], [b]) => a.event_no - b.event_no);
    return html`<${Table} label="Timeline" columns=${[["Seconds", "n"], ["Step"], ["Worker"], ["When"], ["Detail"]]}
      rows=${all.map(([step, worker]) => html`<tr key=${step.event_no}>
        <td class="n">${step.seconds.toFixed(3)}</td><th scope="row">${step.step}</th>
        <td>${worker ? html`<${WorkerLink} run=${run} id=${worker} />` : "–"}</td><td><${Age} at=${step.at} /></td><td class="detail">${step.detail ?? "–"}</td>
      </tr>`)} />`;
  }}<//>`;
}

export function ActivationView({ run, id }) {
  const activation = useResource(["runs", run, "activations", id], {}, { every: 10000, on: ON });
  return html`<h1>Activation <span class="id">${id}</span></h1>
    <${Loaded} resource=${activation}>${(found) => html`
      <${Panel} title="Where it stands" id="standing">
        <${Facts} pairs=${[
          ["State", html`<${State} of=${found.state} />`],
          ["Version", html`<${Version} run=${run} of=${found.version} />`],
          ["Confirmed", `${found.required.filter((worker) => worker.ack === "matching").length} of ${found.required.length}`],
          ["Asked", html`<${Age} at=${found.asked_at} />`],
          found.opened_at && ["Opened", html`<${Age} at=${found.opened_at} />`],
          found.ended_at ? ["Ended", html`<${Age} at=${found.ended_at} />`] : found.deadline_at && ["Deadline", html`<${Until} at=${found.deadline_at} />`],
          found.reason && ["Reason", found.reason],
        ]} />
      <//>
      <${Panel} title="Workers" id="stages"><${Stages} run=${run} id=${id} /><//>
      <${Panel} title="Timeline" id="timeline"><${Steps} run=${run} id=${id} /><//>`}
    <//>`;
}
