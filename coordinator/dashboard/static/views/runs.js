// The runs that the token may see, the newest first. Whoever signs in and sees one run is led to it.
import { count } from "../format.js";
import { html, useEffect } from "../lib.js";
import { useResource } from "../resource.js";
import { go, to } from "../router.js";
import { session, settle } from "../session.js";
import { Age, Empty, Loaded, Panel, Table, Version } from "../ui.js";
import { Standing } from "./blockers.js";

const DIAGNOSED = 20; // of the newest runs; each takes a question of its own

export function RunsView() {
  const runs = useResource(["runs"], {}, { every: 10000 });
  useEffect(() => {
    if (runs.data === null || !session.get().fresh) return;
    settle();
    if (runs.data.runs.length === 1) go(to("runs", runs.data.runs[0].run_id), { replace: true });
  }, [runs.data]);
  return html`<h1>Runs</h1>
    <${Loaded} resource=${runs}>${({ runs: all }) =>
      all.length === 0
        ? html`<${Empty}>There is no run that this token may see. An admin creates one with <code>coordinator run create</code>, or <code>POST /v1/runs</code>.<//>`
        : html`<${Panel} title="All runs" id="runs">
            <${Table} label="Runs" columns=${[["Run"], ["How it stands"], ["Active", "n"], ["Last commit", "n"], ["Events", "n"], ["Contract", "wide"], ["Group", "n wide"], ["Max lag", "n wide"], ["Max drift", "n wide"], ["Created"]]}
              rows=${[...all].reverse().map((run, place) => html`<tr key=${run.run_id}>
                <th scope="row"><a class="id" href=${to("runs", run.run_id)}>${run.run_id}</a></th>
                <td>${place < DIAGNOSED ? html`<${Standing} run=${run.run_id} />` : "–"}</td>
                <td class="n"><${Version} run=${run.run_id} of=${run.active.version} /></td>
                <td class="n">${count(run.last_commit_no)}</td>
                <td class="n">${count(run.event_no)}</td>
                <td class="wide">${run.contract.dtype}, ${run.contract.logprobs_mode}</td>
                <td class="n wide">${run.settings.group_size ?? "–"}</td>
                <td class="n wide">${run.settings.max_lag}</td>
                <td class="n wide">${run.settings.max_drift}</td>
                <td><${Age} at=${run.created_at} /></td>
              </tr>`)} />
          <//>`}
    <//>`;
}
