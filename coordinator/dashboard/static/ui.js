// The pieces that every view is put together from. What came from outside is only ever text.
import { tick } from "./clock.js";
import { count, duration, exact, words } from "./format.js";
import { html } from "./lib.js";
import { to } from "./router.js";
import { useStore } from "./store.js";

/** How long ago, with the exact time on hover. */
export function Age({ at, ago = true }) {
  const now = useStore(tick);
  if (!at) return html`<span>–</span>`;
  return html`<time datetime=${at} title=${exact(at)}>${duration((now - Date.parse(at)) / 1000)}${ago ? " ago" : ""}</time>`;
}

/** How long until a time, or since when it is over. */
export function Until({ at, over = "over" }) {
  const now = useStore(tick);
  if (!at) return html`<span>–</span>`;
  const left = (Date.parse(at) - now) / 1000;
  return html`<time datetime=${at} title=${exact(at)} class=${left < 0 ? "bad" : ""}>${left < 0 ? `${over} since ${duration(-left)}` : `in ${duration(left)}`}</time>`;
}

const TONES = {
  good: ["live", "active", "succeeded", "committed", "consumed", "matching", "acked", "ok", "activated"],
  warn: ["draining", "asleep", "suspect", "waiting", "open", "reserved", "reward_failed", "prepared", "downloading", "verifying", "loading", "missing", "would_refuse"],
  bad: ["lost", "fenced", "failed", "mismatched", "quarantined", "expired", "aborted", "withdrawn", "generation_failed", "dropped", "policy_drift"],
};
const toneOf = (state) => Object.keys(TONES).find((tone) => TONES[tone].includes(state)) ?? "plain";
const MARKS = { good: "●", warn: "◐", bad: "▲", plain: "○" };

/** A state: its word, with a mark and a colour that say the same. */
export const State = ({ of, tone = toneOf(of), title }) =>
  html`<span class="state ${tone}" title=${title}><span aria-hidden="true">${MARKS[tone]}</span> ${words(of)}</span>`;

export const Version = ({ run, of }) =>
  of === null || of === undefined ? html`<span>–</span>` : html`<a href=${to("runs", run, "policies", String(of))}>v${of}</a>`;

export const Hash = ({ of }) => (of ? html`<code class="hash" title=${of}>${of.slice(0, 12)}</code>` : html`<span>–</span>`);

export const RolloutLink = ({ run, id }) => html`<a class="id" href=${to("runs", run, "rollouts", id)}>${id}</a>`;
export const UpdateLink = ({ run, id }) => (id ? html`<a class="id" href=${to("runs", run, "updates", id)}>${id}</a>` : html`<span>–</span>`);
export const WorkerLink = ({ run, id }) => html`<a class="id" href=${to("runs", run, "workers", { worker: id })}>${id}</a>`;

export function Panel({ title, id, aside, children, tone = "" }) {
  const name = id ?? title.toLowerCase().replaceAll(/[^a-z]+/g, "-");
  return html`<section class="panel ${tone}" aria-labelledby=${`h-${name}`}>
    <header><h2 id=${`h-${name}`}>${title}</h2>${aside && html`<div class="aside">${aside}</div>`}</header>
    ${children}
  </section>`;
}

/** A table in a region of its own, which scrolls by itself where it is too wide. columns: [heading, class]. */
export const Table = ({ label, columns, rows }) =>
  html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead><tr>${columns.map(([heading, kind = ""]) => html`<th scope="col" class=${kind}>${heading}</th>`)}</tr></thead>
      <tbody>${rows}</tbody>
    </table>
  </div>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

/** What could not be read, in the coordinator's words; and that what is below is older, if there is something. */
export function Trouble({ resource }) {
  if (resource.problem === null) return null;
  return html`<p class="trouble" role="alert">
    <strong>${resource.problem.message}.</strong> ${resource.problem.nextStep}
    ${resource.at !== null && html` What is shown was read <${Age} at=${new Date(resource.at).toISOString()} />.`}
  </p>`;
}

/**
 * The view of what was read, or that it is being read, or why it could not. Each component here is one element, so that
 * a change in it moves none of its siblings: an element that is moved loses the focus.
 */
export function Loaded({ resource, children }) {
  return html`<div class="as-children">
    <${Trouble} resource=${resource} />
    ${resource.data === null ? resource.problem === null && html`<p class="empty" aria-busy="true">Reading…</p>` : children(resource.data)}
  </div>`;
}

/** Names and values. pairs: [name, value]. */
export const Facts = ({ pairs }) =>
  html`<dl class="facts">${pairs.filter(Boolean).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

/** A share of the greatest as a bar, beside its number. */
export const Share = ({ n, of }) =>
  html`<span class="share"><meter min="0" max=${Math.max(of, 1)} value=${n} aria-hidden="true"></meter><span class="n">${count(n)}</span></span>`;
