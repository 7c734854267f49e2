// Updates with their leases, and the lineage of one: rollouts, the versions that made them, and what it led to.
import { count, real, words } from "../format.js";
import { html } from "../lib.js";
import { useResource } from "../resource.js";
import { to } from "../router.js";
import { Age, Empty, Facts, Hash, Loaded, Panel, RolloutLink, State, Table, Until, UpdateLink, Version, WorkerLink } from "../ui.js";

const SHOWN = 100;

/** The lease of an update: when it ends, or what became of the update. */
export const Lease = ({ update }) =>
  update.state === "open" ? html`<${Until} at=${update.lease_until} over="ran out" />` : html`ended <${Age} at=${update.ended_at} />`;

export function UpdatesView({ run }) {
  const updates = useResource(["runs", run, "updates"], { newest_first: true, limit: SHOWN }, { every: 15000, on: ["update.", "line."] });
  return html`<h1>Updates</h1>
    <${Loaded} resource=${updates}>${({ updates: all }) =>
      all.length === 0
        ? html`<${Empty}>No update was opened yet. A trainer opens one with <code>run.update()</code> of the client, or <code>PUT /v1/runs/${run}/updates/ID</code>.<//>`
        : html`<${Panel} title=${all.length === SHOWN ? `The newest ${SHOWN}` : `${all.length} opened`} id="updates">
            <${Table} label="Updates" columns=${[["Update"], ["State"], ["Commit", "n"], ["On"], ["Holds", "n"], ["Lease"], ["Opened"], ["Owner"], ["Reason"]]}
              rows=${all.map((update) => html`<tr key=${update.update_id}>
                <th scope="row"><${UpdateLink} run=${run} id=${update.update_id} /></th>
                <td><${State} of=${update.state} /></td>
                <td class="n">${update.commit_no ?? "–"}</td>
                <td><${Version} run=${run} of=${update.policy_version} /></td>
                <td class="n">${count(update.reserved)}</td>
                <td><${Lease} update=${update} /></td>
                <td><${Age} at=${update.opened_at} /></td>
                <td class="id">${update.owner}</td>
                <td class="detail">${update.reason ?? "–"}</td>
              </tr>`)} />
          <//>`}
    <//>`;
}

const Members = ({ run, members }) =>
  html`<${Table} label="Rollouts of the update" columns=${[["Rollout"], ["Outcome"], ["Made by"], ["Lag", "n"], ["Drift", "n"], ["Max", "n"], ["k3", "n"], ["Outside [0.5, 2]", "n"], ["Sample size", "n"], ["Reward", "n"], ["Ruleset"], ["Use"], ["Worker"]]}
    rows=${members.map((member) => html`<tr key=${`${member.rollout_id} ${member.revision}`}>
      <th scope="row"><${RolloutLink} run=${run} id=${member.rollout_id} /></th>
      <td><${State} of=${member.outcome} /> ${member.would_refuse && html`<small title="a gate on observe would have refused it">would refuse: ${words(member.would_refuse)}</small>`}</td>
      <td>${member.policies.map((policy) => html`<${Version} run=${run} of=${policy.version} /> `)}</td>
      <td class="n">${member.lag}</td>
      <td class="n" title="mean |d log-prob| over action tokens">${real(member.drift)}</td>
      <td class="n">${real(member.drift_max)}</td>
      <td class="n">${real(member.drift_k3)}</td>
      <td class="n">${member.drift_outside_share === null ? "–" : `${real(100 * member.drift_outside_share)} %`}</td>
      <td class="n">${real(member.drift_sample_size)}</td>
      <td class="n">${real(member.reward)}</td>
      <td>${member.ruleset_id ?? "–"}</td>
      <td>${member.use ?? "–"}</td>
      <td>${member.worker_id ? html`<${WorkerLink} run=${run} id=${member.worker_id} />` : "–"}</td>
    </tr>`)} />`;

const Refusals = ({ run, refusals }) =>
  html`<${Table} label="Refused rollouts" columns=${[["Rollout"], ["Reason"], ["Lag", "n"], ["Drift", "n"]]}
    rows=${refusals.map((refusal) => html`<tr key=${refusal.rollout_id}>
      <th scope="row"><${RolloutLink} run=${run} id=${refusal.rollout_id} /></th>
      <td>${words(refusal.verdict)}</td><td class="n">${refusal.lag ?? "–"}</td><td class="n">${real(refusal.drift)}</td>
    </tr>`)} />`;

const SHOWN_MEMBERS = 500;

export function UpdateView({ run, id }) {
  const lineage = useResource(["runs", run, "updates", id, "lineage"], {}, { on: (entry) => entry.subject === id || entry.event === "policy.prepared" || entry.event.startsWith("line.") });
  return html`<h1>Update <span class="id">${id}</span></h1>
    <${Loaded} resource=${lineage}>${({ update, members, refusals, made_versions: made }) => {
      const sources = [...new Set(members.flatMap((member) => member.policies.map((policy) => policy.version)))].sort((a, b) => b - a);
      return html`<${Panel} title="Where it stands" id="standing">
          <${Facts} pairs=${[
            ["State", html`<${State} of=${update.state} />`],
            ["Commit", update.commit_no ?? "–"],
            ["After commit", update.after_commit_no ?? "–"],
            ["Lease", html`<${Lease} update=${update} />`],
            ["Opened", html`<${Age} at=${update.opened_at} />`],
            ["Owner", html`<span class="id">${update.owner}</span>`],
            ["Artifact", html`<${Hash} of=${update.artifact_hash} />`],
            update.reason && ["Reason", update.reason],
          ]} />
          <ol class="lineage" aria-label="Lineage">
            <li><span>Rollouts made by</span> ${sources.length ? sources.map((version) => html`<${Version} run=${run} of=${version} /> `) : "none yet"}</li>
            <li><span>Weights from</span> <${Version} run=${run} of=${update.policy_version} /></li>
            <li><span>This update</span> <strong>${count(members.length)} rollouts</strong></li>
            <li><span>Led to</span> ${made.length ? made.map((version) => html`<${Version} run=${run} of=${version} /> `) : "no version yet"}</li>
          </ol>
        <//>
        <${Panel} title=${`${count(members.length)} rollouts`} id="members">
          ${members.length === 0 ? html`<${Empty}>It holds nothing yet: the trainer asks for candidates and reserves them.<//>` : html`<${Members} run=${run} members=${members.slice(0, SHOWN_MEMBERS)} />`}
          ${members.length > SHOWN_MEMBERS && html`<p class="empty">The first ${SHOWN_MEMBERS}; all are told by <code>GET /v1/runs/${run}/updates/${id}/lineage</code>.</p>`}
        <//>
        ${refusals.length > 0 && html`<${Panel} title=${`${count(refusals.length)} refused`} id="refusals"><${Refusals} run=${run} refusals=${refusals.slice(0, SHOWN_MEMBERS)} /><//>`}`;
    }}<//>`;
}
