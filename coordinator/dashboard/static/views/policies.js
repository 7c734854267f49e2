// Policy versions, and one of them: what made it, what it made, and what its artifact is.
import { bytes, count, real } from "../format.js";
import { html } from "../lib.js";
import { useResource } from "../resource.js";
import { to } from "../router.js";
import { Age, Empty, Facts, Hash, Loaded, Panel, State, Table, UpdateLink, Version } from "../ui.js";

const size = (policy) => policy.files.reduce((sum, file) => sum + file.size, 0);

export function PoliciesView({ run }) {
  const policies = useResource(["runs", run, "policies"], {}, { every: 60000, on: ["policy.", "line."] });
  return html`<h1>Policies</h1>
    <${Loaded} resource=${policies}>${({ policies: all }) => html`<${Panel} title=${`${all.length} versions`} id="policies">
      <${Table} label="Policy versions" columns=${[["Version", "n"], ["State"], ["Kind"], ["Parent", "n"], ["Lag clock", "n wide"], ["Updates"], ["Size", "n"], ["Artifact"], ["Prepared"], ["Active since"]]}
        rows=${[...all].reverse().map((policy) => html`<tr key=${policy.version}>
          <th scope="row" class="n"><${Version} run=${run} of=${policy.version} /></th>
          <td><${State} of=${policy.state} /></td>
          <td>${policy.kind}</td>
          <td class="n"><${Version} run=${run} of=${policy.parent_version} /></td>
          <td class="n wide">${policy.lag_clock}</td>
          <td>${policy.updates.length ? policy.updates.map((id) => html`<${UpdateLink} run=${run} id=${id} /> `) : "–"}</td>
          <td class="n">${policy.files.length ? bytes(size(policy)) : "–"}</td>
          <td><${Hash} of=${policy.artifact_hash} /></td>
          <td><${Age} at=${policy.prepared_at} /></td>
          <td>${policy.activated_at ? html`<${Age} at=${policy.activated_at} />` : "–"}</td>
        </tr>`)} />
    <//>`}<//>`;
}

function Made({ run, version }) {
  const uses = useResource(["runs", run, "lineage"], { version }, { on: ["update.committed", "line."] });
  return html`<${Panel} title="Used by" id="uses">
    <${Loaded} resource=${uses}>${({ uses: all }) =>
      all.length === 0
        ? html`<${Empty}>No update has bound a rollout of this version. <a href=${to("runs", run, "rollouts", { version })}>Its rollouts</a><//>`
        : html`<${Table} label="Updates that used its rollouts" columns=${[["Update"], ["State"], ["Commit", "n"], ["On"], ["Its rollouts", "n"]]}
            rows=${[...all].reverse().map((use) => html`<tr key=${use.update_id}>
              <th scope="row"><${UpdateLink} run=${run} id=${use.update_id} /></th>
              <td><${State} of=${use.state} /></td><td class="n">${use.commit_no ?? "–"}</td>
              <td><${Version} run=${run} of=${use.policy_version} /></td><td class="n">${count(use.rollouts)}</td>
            </tr>`)} />`}
    <//>
  <//>`;
}

export function PolicyView({ run, id }) {
  const policy = useResource(["runs", run, "policies", id], {}, { on: ["policy."] });
  return html`<h1>Version ${id}</h1>
    <${Loaded} resource=${policy}>${(found) => html`
      <${Panel} title="Where it stands" id="standing">
        <${Facts} pairs=${[
          ["State", html`<${State} of=${found.state} />`],
          ["Kind", found.kind],
          ["Lag clock", found.lag_clock],
          ["Base model", `${found.base_model.name} ${found.base_model.revision}`],
          ["Artifact", html`<${Hash} of=${found.artifact_hash} />`],
          ["Prepared", html`<${Age} at=${found.prepared_at} />`],
          ["Committed", html`<${Age} at=${found.committed_at} />`],
          ["Activated", html`<${Age} at=${found.activated_at} />`],
          found.ended_at && ["Ended", html`<${Age} at=${found.ended_at} />`],
          found.verification && ["Verification", `${found.verification.state}, ${real((100 * found.verification.bytes_done) / Math.max(1, found.verification.bytes_total))} %`],
        ]} />
        <ol class="lineage" aria-label="Lineage">
          <li><span>Parent</span> <${Version} run=${run} of=${found.parent_version} /></li>
          <li><span>Made by</span> ${found.updates.length ? found.updates.map((update) => html`<${UpdateLink} run=${run} id=${update} /> `) : "no update"}</li>
          <li><span>This version</span> <strong>v${found.version}</strong></li>
          <li><span>Made</span> <a href=${to("runs", run, "rollouts", { version: found.version })}>its rollouts</a></li>
        </ol>
      <//>
      <${Made} run=${run} version=${found.version} />
      <${Panel} title="Files" id="files" aside=${found.uri ?? ""}>
        ${found.files.length === 0
          ? html`<${Empty}>A version of kind ${found.kind} has no files.<//>`
          : html`<${Table} label="Files" columns=${[["Name"], ["Size", "n"], ["sha256"]]} rows=${found.files.map((file) => html`<tr key=${file.name}><th scope="row" class="detail">${file.name}</th><td class="n">${bytes(file.size)}</td><td><${Hash} of=${file.sha256} /></td></tr>`)} />`}
      <//>`}
    <//>`;
}
