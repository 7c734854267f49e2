// Recorded failures by stage; attempts add up and never overwrite.
import { words } from "../format.js";
import { html } from "../lib.js";
import { useResource } from "../resource.js";
import { go, to } from "../router.js";
import { Age, Empty, Loaded, Panel, RolloutLink, Table, UpdateLink, Version, WorkerLink } from "../ui.js";

const STAGES = ["generation", "reward", "update", "artifact", "distribution", "activation"];
const SHOWN = 100;

export function FailuresView({ run, query }) {
  const after = Number(query.after ?? 0);
  const failures = useResource(["runs", run, "failures"], { stage: query.stage, after, limit: SHOWN, newest_first: true }, { every: 15000, on: ["worker.failed", "activation.", "update."] });
  const choose = (event) => go(to("runs", run, "failures", { stage: event.target.value }));
  return html`<h1>Failures</h1>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>Stage <select onChange=${choose}>
        <option value="" selected=${!query.stage}>all</option>
        ${STAGES.map((stage) => html`<option value=${stage} selected=${query.stage === stage}>${stage}</option>`)}
      </select></label>
    </form>
    <${Loaded} resource=${failures}>${({ failures: all, next_after }) =>
      all.length === 0
        ? html`<${Empty}>${after ? "There are no more." : query.stage ? `No failure of the stage ${query.stage} is recorded.` : "No failure is recorded."}<//>`
        : html`<${Panel} title="Newest first" id="failures" aside=${html`${after > 0 && html`<a href=${to("runs", run, "failures", { stage: query.stage })}>Newest</a> `}${all.length === SHOWN && html`<a href=${to("runs", run, "failures", { stage: query.stage, after: next_after })}>Older</a>`}`}>
            <${Table} label="Failures" columns=${[["When"], ["Stage"], ["Kind"], ["Message"], ["Rollout"], ["Update"], ["Version", "n"], ["Worker"], ["Reported by"]]}
              rows=${all.map((failure) => html`<tr key=${failure.failure_no}>
                <td><${Age} at=${failure.at} /></td>
                <td>${failure.stage}</td>
                <th scope="row">${words(failure.kind)}</th>
                <td class="detail">${failure.message}</td>
                <td>${failure.rollout_id ? html`<${RolloutLink} run=${run} id=${failure.rollout_id} />` : "–"}</td>
                <td><${UpdateLink} run=${run} id=${failure.update_id} /></td>
                <td class="n"><${Version} run=${run} of=${failure.version} /></td>
                <td>${failure.worker_id ? html`<${WorkerLink} run=${run} id=${failure.worker_id} />` : "–"}</td>
                <td>${failure.actor}</td>
              </tr>`)} />
          <//>`}
    <//>`;
}
