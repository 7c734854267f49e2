// A run at a glance: what is in the way first, then the flow, the policy, the workers, and how all lies to the limits.
import { FlowChart, Histogram, summed } from "../charts.js";
import { bytes, count, duration, rate, real, timeOfDay, title, words } from "../format.js";
import { html } from "../lib.js";
import { useResource } from "../resource.js";
import { go, to } from "../router.js";
import { Age, Empty, Facts, Hash, Loaded, Panel, Share, State, Table, Trouble, Until, UpdateLink, Version, WorkerLink } from "../ui.js";
import { Stages } from "./activations.js";
import { isGrave } from "./blockers.js";
import { EventTable, useEvents } from "./events.js";
import { EVERY, NoWorkers, byUrgency } from "./workers.js";

const WINDOWS = [["300", "5 min"], ["900", "15 min"], ["3600", "1 h"], ["21600", "6 h"], ["86400", "24 h"]];
const STAGES = ["generated", "rewarded", "reserved", "consumed"];
const GETS = { generated: "arrived", rewarded: "rewarded", reserved: "reserved", consumed: "consumed" };
const SHOWN_WORKERS = 8, SHOWN_EVENTS = 8;

/** Words of the coordinator, with the times in them as times. */
const Told = ({ text }) => html`<span>${text.split(/(\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d))/).map((part, number) => (number % 2 ? html`<span>${timeOfDay(part)} UTC (<${Until} at=${part} />)</span>` : part))}</span>`;

/** What stops nothing and wants to be looked at all the same. */
function Attention({ run, diagnosis }) {
  const { producers, refused } = diagnosis;
  const n = Object.values(refused).reduce((sum, each) => sum + each, 0);
  return html`<span>Workers: ${count(producers.live)} live${producers.lost > 0 && html`, <${State} of="lost" /> ${count(producers.lost)}`}${producers.fenced > 0 && html`, <${State} of="fenced" /> ${count(producers.fenced)}`}${producers.suspect.length > 0 && html`, <${State} of="suspect" /> ${producers.suspect.map((id, number) => html`${number > 0 && ", "}<${WorkerLink} run=${run} id=${id} />`)}`}.${n > 0 && ` Refused in the last 5 min: ${count(n)}.`}</span>`;
}

/** The diagnosis in words, the first thing to look at first. */
function Diagnosis({ run, diagnosis }) {
  const { blockers, last_commit_no: commit, last_commit_at: at } = diagnosis;
  const last = commit ? html`Last commit: no. ${count(commit)}, <${Age} at=${at} />.` : "Nothing was committed yet.";
  if (blockers.length === 0) return html`<section class="diagnosis good" aria-labelledby="h-diagnosis"><h2 id="h-diagnosis"><span aria-hidden="true">● </span>Nothing is in the way</h2><p>${last} <${Attention} run=${run} diagnosis=${diagnosis} /></p></section>`;
  const grave = blockers.some(isGrave);
  return html`<section class="diagnosis ${grave ? "bad" : "warn"}" aria-labelledby="h-diagnosis">
    <h2 id="h-diagnosis"><span aria-hidden="true">${grave ? "▲" : "◐"} </span>${title(blockers[0].code)}</h2>
    <ol>${blockers.map((blocker, number) => html`<li key=${blocker.code}>
      <p>${number > 0 && html`<strong>${title(blocker.code)}: </strong>`}<${Told} text=${blocker.detail} />${blocker.since && html`, for <${Age} at=${blocker.since} ago=${false} />`}.</p>
      <p class="next"><span>Next:</span> ${blocker.next_step}</p>
    </li>`)}</ol>
    <p>${last} <${Attention} run=${run} diagnosis=${diagnosis} /></p>
  </section>`;
}

/** Rollouts per second over the last minute, or the last whole bucket where that is longer. */
function recentRate(statistics, field) {
  const whole = statistics.buckets.slice(0, -1);
  const buckets = whole.slice(-Math.max(1, Math.round(60 / statistics.bucket_seconds)));
  return buckets.reduce((sum, bucket) => sum + bucket[field], 0) / (buckets.length * statistics.bucket_seconds || 1);
}

function Flow({ run, counts, statistics, diagnosis }) {
  const ages = Object.fromEntries((statistics?.ages ?? []).map((age) => [age.state, age]));
  return html`<div class="as-children"><ol class="flow">${STAGES.map((stage) => html`<li>
      <h3><a href=${to("runs", run, "rollouts", { state: stage })}>${stage}</a></h3>
      <p class="big">${count(counts?.rollouts[stage])}</p>
      <p>${statistics ? rate(recentRate(statistics, GETS[stage])) : "–"} <small>in</small></p>
      <p class="ages">${stage === "consumed" ? html`<small>for good</small>` : ages[stage] ? html`<small>median</small> ${duration(ages[stage].median_seconds)} <small>oldest</small> <span title=${ages[stage].oldest_at}>${duration(ages[stage].oldest_seconds)}</span>` : html`<small>none waits</small>`}</p>
    </li>`)}</ol>
    <ul class="exits" aria-label="Out of the way">${["quarantined", "offline", "generation_failed", "reward_failed"].map((state) => html`<li><a href=${to("runs", run, "rollouts", { state })}>${words(state)}</a> <b>${count(counts?.rollouts[state])}</b></li>`)}</ul>
    ${diagnosis && html`<ul class="exits" aria-label="Groups">
      <li>groups ready <b>${count(diagnosis.groups.ready)}</b></li>
      <li>incomplete <b>${count(diagnosis.groups.incomplete)}</b></li>
      <li>stale <b>${count(diagnosis.groups.stale)}</b></li>
      <li>held <b>${count(diagnosis.groups.held)}</b></li>
      <li>tickets out <b>${count(diagnosis.tickets)}</b></li>
      <li>stored tokens <b>${counts ? bytes(counts.evidence_bytes) : "–"}</b></li>
    </ul>`}</div>`;
}

function PolicyPanel({ run, view, diagnosis }) {
  const activation = diagnosis?.activation ?? null;
  return html`<${Panel} title="Active policy" id="policy" aside=${html`<a href=${to("runs", run, "policies")}>All versions</a>`}>
    ${view && html`<p class="pointer"><span class="big"><${Version} run=${run} of=${view.active.version} /></span> <${State} of="active" /> <${Hash} of=${view.active.artifact_hash} /></p>`}
    ${activation === null
      ? diagnosis !== null && html`<${Empty}>No activation is open.<//>`
      : html`<div class="as-children"><h3>Activation <a class="id" href=${to("runs", run, "activations", activation.activation_id)}>${activation.activation_id}</a> of <${Version} run=${run} of=${activation.version} /></h3>
          <${Facts} pairs=${[
            ["Opened", html`<${Age} at=${activation.opened_at} />`],
            ["Deadline", html`<${Until} at=${activation.deadline_at} />`],
            ["Artifact", activation.artifact_committed ? "committed" : html`<${State} of="missing" title="not committed yet" />`],
            ["Waits for", `${activation.missing_workers.length + activation.mismatched_workers.length} workers`],
          ]} />
          <${Stages} run=${run} id=${activation.activation_id} /></div>`}
  <//>`;
}

function UpdatesPanel({ run, diagnosis }) {
  const open = diagnosis?.updates ?? [];
  return html`<${Panel} title="Open updates" id="updates" aside=${html`<a href=${to("runs", run, "updates")}>All updates</a>`}>
    ${open.length === 0
      ? diagnosis !== null && html`<${Empty}>No update is open: no trainer is stepping now.<//>`
      : html`<${Table} label="Open updates" columns=${[["Update"], ["On"], ["Holds", "n"], ["Open for", "n"], ["Lease ends"]]}
          rows=${open.map((update) => html`<tr key=${update.update_id}>
            <th scope="row"><${UpdateLink} run=${run} id=${update.update_id} /></th><td><${Version} run=${run} of=${update.policy_version} /></td>
            <td class="n">${count(update.reserved)}</td><td class="n"><${Age} at=${update.opened_at} ago=${false} /></td><td><${Until} at=${update.lease_until} over="ran out" /></td>
          </tr>`)} />`}
  <//>`;
}

function WorkersPanel({ run, workers }) {
  const all = (workers.data?.workers ?? []).filter((worker) => worker.state !== "deregistered");
  return html`<${Panel} title="Workers" id="workers" aside=${html`<a href=${to("runs", run, "workers")}>All workers</a>`}>
    <${Trouble} resource=${workers} />
    ${all.length === 0
      ? workers.data !== null && html`<${NoWorkers} run=${run} />`
      : html`<${Table} label="Workers" columns=${[["Worker"], ["State"], ["Heartbeat"], ["Serves", "n"], ["Drift", "n"]]}
          rows=${byUrgency(all).slice(0, SHOWN_WORKERS).map((worker) => html`<tr key=${worker.worker_id}>
            <th scope="row"><${WorkerLink} run=${run} id=${worker.worker_id} /></th>
            <td><${State} of=${worker.state} /> ${worker.fenced && html`<${State} of="fenced" title=${worker.fenced_reason} />`} ${worker.suspect_reason && html`<${State} of="suspect" title=${worker.suspect_reason} />`}</td>
            <td><${Age} at=${worker.heartbeat_at} /></td><td class="n"><${Version} run=${run} of=${worker.version} /></td><td class="n">${real(worker.drift)}</td>
          </tr>`)} />`}
    ${all.length > SHOWN_WORKERS && html`<p class="empty">and ${all.length - SHOWN_WORKERS} more that need less attention</p>`}
  <//>`;
}

const TAKEN = { quarantine: "quarantined", set_aside: "set aside", discard: "discarded" };
const WHERE = { quarantine: "quarantined", set_aside: "offline", discard: "offline" };

function Refusals({ run, statistics }) {
  const { refused, rejected } = statistics;
  const most = Math.max(0, ...refused.map((each) => each.rollouts));
  return html`<${Panel} title="Refused, by reason" id="refused">
    ${refused.length === 0
      ? html`<${Empty}>Nothing was refused in this window.<//>`
      : html`<${Table} label="Refusals by reason" columns=${[["Reason"], ["Became"], ["Rollouts", "n"]]}
          rows=${refused.map((each) => html`<tr key=${each.event + each.reason}>
            <th scope="row"><a href=${to("runs", run, "rollouts", { state: WHERE[each.event], reason: each.reason })}>${words(each.reason)}</a></th><td>${TAKEN[each.event]}</td><td class="n"><${Share} n=${each.rollouts} of=${most} /></td>
          </tr>`)} />`}
    ${rejected.length > 0 && html`<h3>Sent back to workers, nothing stored</h3>`}
    ${rejected.length > 0 && html`<${Table} label="Rejected arrivals" columns=${[["Worker"], ["Reason"], ["Rollouts", "n"], ["Last"], ["What was wrong"]]}
        rows=${rejected.map((each) => html`<tr><th scope="row"><${WorkerLink} run=${run} id=${each.worker_id} /></th><td>${words(each.reason)}</td><td class="n">${count(each.rollouts)}</td><td><${Age} at=${each.last_at} /></td><td class="detail">${each.last_detail}</td></tr>`)} />`}
  <//>`;
}

function Distributions({ run, statistics, query }) {
  const { versions, max_lag: maxLag, max_drift: maxDrift, lag_gate: lagGate, drift_gate: driftGate } = statistics;
  const one = versions.find((version) => String(version.version) === query.version);
  const shown = summed(statistics, one ? [one] : versions);
  const judged = (one ? [one] : versions).reduce((sum, version) => sum + version.judged, 0);
  const choose = (event) => go(to("runs", run, { ...query, version: event.target.value }), { replace: true });
  const over = (version) => version.drifts.slice(shown.driftLimit).reduce((sum, n) => sum + n, 0);
  return html`<${Panel} title="Lag and drift against their limits" id="distributions" aside=${html`<label>Made by <select onChange=${choose}><option value="" selected=${!one}>all versions</option>${versions.map(({ version }) => html`<option value=${version} selected=${one?.version === version}>v${version}</option>`)}</select></label>`}>
    ${judged === 0
      ? html`<${Empty}>No update has judged a rollout in this window.<//>`
      : html`<div class="two">
          <${Histogram} label="Lag, in versions" unit="lag" bars=${shown.lags} limit=${shown.lagLimit} limitText=${`limit ${maxLag}${lagGate === "observe" ? ", observed" : ""}`} />
          ${driftGate === "off" ? html`<${Empty}>The run's drift gate is off: drift is not measured.<//>` : html`<${Histogram} label="Drift, mean |d log-prob|" unit="drift" bars=${shown.drifts} limit=${shown.driftLimit} limitText=${`limit ${real(maxDrift)}${driftGate === "observe" ? ", observed" : ""}`} />`}
        </div>`}
    ${versions.length > 0 && html`<${Table} label="By version" columns=${[["Version", "n"], ["Arrived", "n"], ...STAGES.map((stage) => [title(stage), "n"]), ["Quarantined", "n"], ["Offline", "n"], ["Judged", "n"], ["Mean drift", "n"], ["Max drift", "n"], ["At or over", "n"]]}
      rows=${versions.map((version) => html`<tr key=${version.version}>
        <th scope="row" class="n"><${Version} run=${run} of=${version.version} /></th><td class="n">${count(version.arrived)}</td>
        ${[...STAGES, "quarantined", "offline"].map((state) => html`<td class="n">${count(version.states[state] ?? 0)}</td>`)}
        <td class="n">${count(version.judged)}</td><td class="n">${real(version.drift_mean)}</td>
        <td class="n ${version.drift_max > maxDrift ? "bad" : ""}">${real(version.drift_max)}</td><td class="n">${count(over(version))}</td>
      </tr>`)} />`}
  <//>`;
}

function Recent({ run, newest }) {
  const { resource, entries } = useEvents(run, Math.max(0, newest - SHOWN_EVENTS), SHOWN_EVENTS);
  return html`<${Panel} title="Latest events" id="events" aside=${html`<a href=${to("runs", run, "events")}>All events</a>`}>
    <${Loaded} resource=${resource}>${() => html`<${EventTable} run=${run} entries=${entries} />`}<//>
  <//>`;
}

/** A long window changes little from one moment to the next, and costs more to read. */
const refresh = (seconds) => ({ every: Math.min(Math.max(5000, seconds * 5), 60000), on: seconds > 900 ? [] : ["update.", "line."] });

export function Overview({ run, query }) {
  const window = query.window ?? "900";
  const on = ["activation.", "policy.", "worker.", "update.", "line."];
  const view = useResource(["runs", run], {}, { on: ["policy.", "line.", "update.committed"] });
  const diagnosis = useResource(["runs", run, "diagnosis"], {}, { every: 5000, on });
  const counts = useResource(["runs", run, "counts"], {}, { every: 5000, on: ["update.", "line."] });
  const statistics = useResource(["runs", run, "statistics"], { window_seconds: window, buckets: 60 }, refresh(Number(window)));
  const workers = useResource(["runs", run, "workers"], {}, { every: EVERY, on: ["worker.", "policy.activated", "activation."] });
  if ([403, 404, 422].includes(view.problem?.status)) return html`<h1>${run}</h1><${Empty}>There is no run of this name, or the token is bound to another one. <a href=${to("runs")}>All runs</a><//>`;
  return html`<div class="title"><h1>${run}</h1>
      <label>Window <select onChange=${(event) => go(to("runs", run, { ...query, window: event.target.value }), { replace: true })}>${WINDOWS.map(([seconds, text]) => html`<option value=${seconds} selected=${window === seconds}>${text}</option>`)}</select></label>
    </div>
    <p class="unseen" role="status">${diagnosis.data && (diagnosis.data.blockers.map(({ code }) => title(code)).join(", ") || "Nothing is in the way")}</p>
    <${Loaded} resource=${diagnosis}>${(found) => html`<${Diagnosis} run=${run} diagnosis=${found} />`}<//>
    <${Panel} title="Flow" id="flow">
      <${Trouble} resource=${counts} /><${Trouble} resource=${statistics} />
      <${Flow} run=${run} counts=${counts.data} statistics=${statistics.data} diagnosis=${diagnosis.data} />
      ${statistics.data && html`<${FlowChart} statistics=${statistics.data} />`}
    <//>
    <div class="two">
      <${PolicyPanel} run=${run} view=${view.data} diagnosis=${diagnosis.data} />
      <div class="stack"><${UpdatesPanel} run=${run} diagnosis=${diagnosis.data} /><${WorkersPanel} run=${run} workers=${workers} /></div>
    </div>
    ${statistics.data && html`<${Distributions} run=${run} statistics=${statistics.data} query=${query} />`}
    ${statistics.data && html`<${Refusals} run=${run} statistics=${statistics.data} />`}
    ${view.data && html`<${Recent} key=${run} run=${run} newest=${view.data.event_no} />`}`;
}
