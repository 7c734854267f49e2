// One rollout: where it stands, its history, how it was judged, and its tokens.
import { count, real, words } from "../format.js";
import { html } from "../lib.js";
import { useResource } from "../resource.js";
import { to } from "../router.js";
import { Age, Empty, Facts, Hash, Loaded, Panel, State, Table, Trouble, UpdateLink, Version, WorkerLink } from "../ui.js";
import { Tokens } from "./tokens.js";

const ON = ["update.", "line.", "policy.withdrawn"];

const History = ({ run, transitions }) =>
  html`<${Table} label="History" columns=${[["Rev.", "n"], ["Event"], ["From"], ["To"], ["When"], ["By"], ["Update"], ["Reason"], ["Lag", "n"], ["Drift", "n"]]}
    rows=${transitions.map((step) => html`<tr key=${step.revision}>
      <td class="n">${step.revision}</td>
      <th scope="row">${words(step.event)}</th>
      <td>${step.from_state ? words(step.from_state) : "–"}</td>
      <td><${State} of=${step.to_state} /></td>
      <td><${Age} at=${step.at} /></td>
      <td>${step.actor}</td>
      <td><${UpdateLink} run=${run} id=${step.update_id} /></td>
      <td>${step.reason ? words(step.reason) : "–"}</td>
      <td class="n">${step.lag === null ? "–" : html`${step.lag} <small>of ${step.max_lag}</small>`}</td>
      <td class="n">${step.drift === null ? "–" : html`${real(step.drift)} <small>of ${real(step.max_drift)}</small>`}</td>
    </tr>`)} />`;

/** How the last update that measured it found it, over the whole rollout. */
function Judged({ run, rollout, transitions, measured }) {
  const last = transitions.filter((step) => step.drift !== null && step.update_id).at(-1);
  const lineage = useResource(last ? ["runs", run, "updates", last.update_id, "lineage"] : null);
  if (!last && measured.length) {
    const { update_id: update, drift } = measured.at(-1);
    return html`<${Empty}><${UpdateLink} run=${run} id=${update} /> measured it, with a drift of ${real(drift)}, and could not have it: its group was refused.<//>`;
  }
  if (!last) return html`<${Empty}>No update has measured it yet: the drift is taken at its reservation, against the trainer's weights of that moment.<//>`;
  const member = lineage.data?.members.filter((each) => each.rollout_id === rollout.rollout_id).at(-1);
  return html`<${Facts} pairs=${[
      ["Measured by", html`<${UpdateLink} run=${run} id=${last.update_id} />`],
      ["Verdict", last.event === "reserve" ? "reserved" : words(last.reason ?? last.event)],
      ["Lag", `${last.lag} of ${last.max_lag}`],
      ["Drift, mean |d|", html`<span class=${last.drift > last.max_drift ? "bad" : ""}>${real(last.drift)} of ${real(last.max_drift)}${last.drift > last.max_drift ? " ▲ over the limit" : ""}</span>`],
      member && ["Greatest |d|", real(member.drift_max)],
      member && ["KL, k3 estimate", real(member.drift_k3)],
      member && ["Ratios outside [0.5, 2]", `${real(100 * member.drift_outside_share)} %`],
      member && ["Effective sample size", real(member.drift_sample_size)],
    ]} />
    <p class="empty">d is the log-prob under the trainer's weights of that moment minus the one that the token was made with. ${measured.length > 0 ? "That of each token is below." : "That of each token is not kept: it was measured by an earlier release, or retention has taken it."}</p>`;
}

const Spans = ({ run, spans, source }) =>
  html`<${Table} label="Spans" columns=${[["Version"], ["From token", "n"], ["Before token", "n"], ["Tokens", "n"], ["Artifact"]]}
    rows=${spans.map((span) => html`<tr key=${span.start}>
      <th scope="row"><${Version} run=${run} of=${span.version} /></th>
      <td class="n">${span.start}</td><td class="n">${span.end}</td><td class="n">${count(span.end - span.start)}</td>
      <td><${Hash} of=${span.artifact_hash} /></td>
    </tr>`)} />
  <p class="empty">Told by: ${source === "engine" ? "the engine, token by token" : source === "segmented" ? "the agent, which cut the generation where it changed the weights" : "the version that served when the request was sent"}.</p>`;

export function RolloutView({ run, id, query }) {
  const rollout = useResource(["runs", run, "rollouts", id], {}, { every: 15000, on: ON });
  const history = useResource(["runs", run, "rollouts", id, "history"], {}, { every: 15000, on: ON });
  const evidence = useResource(["runs", run, "rollouts", id, "evidence"]);
  const changes = history.data?.transitions.length;
  const differences = useResource(evidence.data && changes ? ["runs", run, "rollouts", id, "differences"] : null, {}, { after: changes });
  const measured = differences.data?.measured ?? [];
  return html`<h1>Rollout <span class="id">${id}</span></h1>
    <${Loaded} resource=${rollout}>${(found) => html`
      <${Panel} title="Where it stands" id="standing">
        <${Facts} pairs=${[
          ["State", html`<${State} of=${found.state} />`],
          found.reason && ["Reason", words(found.reason)],
          ["Revision", found.revision],
          ["Reward", found.reward_status && found.reward_status !== "ok" ? html`<${State} of="reward_failed" /> ${found.reward_status}` : html`${real(found.reward)} ${found.ruleset_id && html`<small>${found.ruleset_id}</small>`}`],
          ["Task", html`<span class="id">${found.task_id}</span> <small>${found.task_source}</small>`],
          ["Group", html`<a class="id" href=${to("runs", run, "rollouts", { group_id: found.group_id })}>${found.group_id}</a> <small>sample ${found.sample_index}, attempt ${found.attempt}</small>`],
          ["Worker", html`<${WorkerLink} run=${run} id=${found.worker_id} /> <small class="id">${found.incarnation}</small>`],
          ["Update", html`<${UpdateLink} run=${run} id=${found.update_id} />`],
          ["Tokens", html`${count(found.tokens)} <small>${count(found.action_tokens)} of them actions</small>`],
          ["Finished", `${found.generation.finish_reason ?? "–"} ${found.generation.engine ?? ""} ${found.generation.engine_version ?? ""}`],
          ["Arrived", html`<${Age} at=${found.arrived_at} />`],
          ["Content", html`<${Hash} of=${found.content_hash} />`],
          found.flags.length > 0 && ["Flags", found.flags.map(words).join(", ")],
        ]} />
      <//>
      <div class="two">
        <${Panel} title="Lag and drift" id="judged"><${Loaded} resource=${history}>${({ transitions }) => html`<${Judged} run=${run} rollout=${found} transitions=${transitions} measured=${measured} />`}<//><//>
        <${Panel} title="Spans" id="spans">${found.spans.length ? html`<${Spans} run=${run} spans=${found.spans} source=${found.span_source} />` : html`<${Empty}>It gave no tokens.<//>`}<//>
      </div>
      <${Panel} title="History" id="history"><${Loaded} resource=${history}>${({ transitions }) => html`<${History} run=${run} transitions=${transitions} />`}<//><//>
      <${Panel} title="Tokens" id="tokens">
        ${found.tokens === 0 || evidence.problem?.code === "rollout_unknown"
          ? html`<${Empty}>No tokens are stored: ${found.tokens === 0 ? "the generation failed" : "retention has taken them"}.<//>`
          : html`<${Loaded} resource=${evidence}>${(tokens) => html`<${Tokens} run=${run} id=${id} spans=${found.spans} evidence=${tokens} measured=${measured} query=${query} />`}<//><${Trouble} resource=${differences} />`}
      <//>`}
    <//>`;
}
