// Rollouts by id, those that meet every filter. The filters are in the address.
import { count, real, words } from "../format.js";
import { html } from "../lib.js";
import { useResource } from "../resource.js";
import { go, to } from "../router.js";
import { Age, Empty, Loaded, Panel, RolloutLink, State, Table, UpdateLink, Version, WorkerLink } from "../ui.js";

export const STATES = ["generated", "rewarded", "reserved", "consumed", "generation_failed", "reward_failed", "quarantined", "offline"];
const FIELDS = [["group_id", "Group"], ["version", "Version"], ["worker_id", "Worker"], ["reason", "Reason"]];
const SHOWN = 100;

function Filters({ run, query }) {
  function submit(event) {
    event.preventDefault();
    const given = Object.fromEntries([...new FormData(event.target)].map(([name, value]) => [name, value.trim()]));
    if (given.rollout_id) go(to("runs", run, "rollouts", given.rollout_id));
    else go(to("runs", run, "rollouts", given));
  }
  return html`<form class="filters" role="search" aria-label="Rollouts" onSubmit=${submit}>
    <label>Open by id <input name="rollout_id" spellcheck=${false} /></label>
    <label>State <select name="state" onChange=${(event) => event.target.form.requestSubmit()}>
      <option value="" selected=${!query.state}>any</option>
      ${STATES.map((state) => html`<option value=${state} selected=${query.state === state}>${words(state)}</option>`)}
    </select></label>
    ${FIELDS.map(([name, label]) => html`<label>${label} <input name=${name} value=${query[name] ?? ""} spellcheck=${false} inputmode=${name === "version" ? "numeric" : "text"} size="10" /></label>`)}
    <button>Show</button>
  </form>`;
}

export function RolloutsView({ run, query }) {
  const rollouts = useResource(["runs", run, "rollouts"], { ...query, limit: SHOWN }); // a filter may have to look at the whole run: read when asked for
  const { after, ...filters } = query;
  return html`<h1>Rollouts</h1>
    <${Filters} key=${JSON.stringify(filters)} run=${run} query=${filters} />
    <${Loaded} resource=${rollouts}>${({ rollouts: all, next_after: next }) =>
      all.length === 0
        ? html`<${Empty}>${after || Object.keys(filters).length ? "No rollout meets these filters." : html`No rollout has arrived yet. Workers hand them in with <code>run.submit(…)</code>; <a href=${to("runs", run)}>the diagnosis</a> says what they wait for.`}<//>`
        : html`<${Panel} title="By id" id="rollouts" aside=${html`Read <${Age} at=${new Date(rollouts.at).toISOString()} /> <button type="button" onClick=${rollouts.readAgain}>Read again</button> ${after && html`<a href=${to("runs", run, "rollouts", filters)}>First</a> `}${next && html`<a href=${to("runs", run, "rollouts", { ...filters, after: next })}>Next ${SHOWN}</a>`}`}>
            <${Table} label="Rollouts" columns=${[["Rollout"], ["State"], ["Reason"], ["Made by"], ["Reward", "n"], ["Tokens", "n"], ["Group", "wide"], ["Update"], ["Worker", "wide"], ["Arrived"]]}
              rows=${all.map((rollout) => html`<tr key=${rollout.rollout_id}>
                <th scope="row"><${RolloutLink} run=${run} id=${rollout.rollout_id} /></th>
                <td><${State} of=${rollout.state} /></td>
                <td>${rollout.reason ? words(rollout.reason) : "–"}</td>
                <td>${[...new Set(rollout.spans.map((span) => span.version))].map((version) => html`<${Version} run=${run} of=${version} /> `)}</td>
                <td class="n">${rollout.reward_status && rollout.reward_status !== "ok" ? rollout.reward_status : real(rollout.reward)}</td>
                <td class="n" title=${`${rollout.action_tokens} of them actions`}>${count(rollout.tokens)}</td>
                <td class="wide"><a class="id" href=${to("runs", run, "rollouts", { group_id: rollout.group_id })}>${rollout.group_id}</a></td>
                <td><${UpdateLink} run=${run} id=${rollout.update_id} /></td>
                <td class="wide"><${WorkerLink} run=${run} id=${rollout.worker_id} /></td>
                <td><${Age} at=${rollout.arrived_at} /></td>
              </tr>`)} />
          <//>`}
    <//>`;
}
