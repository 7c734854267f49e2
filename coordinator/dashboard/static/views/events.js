// The journal as it grows: the newest entries first.
import { exact, timeOfDay } from "../format.js";
import { html, useEffect, useState } from "../lib.js";
import { useResource } from "../resource.js";
import { to } from "../router.js";
import { listen } from "../stream.js";
import { Empty, Loaded, Panel, Table } from "../ui.js";

const SHOWN = 100;

/** Where the subject of an event leads to. */
function subject(run, { event, subject: name, detail }) {
  const [noun] = event.split(".");
  const page = { worker: "workers", policy: "policies", activation: "activations", update: "updates" }[noun];
  if (!page) return html`<span class="id">${name}</span>`;
  const address = page === "workers" ? to("runs", run, page, { worker: name }) : to("runs", run, page, name);
  return html`<a class="id" href=${address}>${page === "policies" ? `v${name}` : name}</a>${detail.version !== undefined && page !== "policies" && html` <small>v${detail.version}</small>`}`;
}

function told(detail) {
  const { version, ...rest } = detail;
  return Object.entries(rest).filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && value.length === 0))
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${/hash/.test(name) ? String(value).slice(0, 12) : Array.isArray(value) ? value.join(" ") : typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
}

export const EventTable = ({ run, entries }) =>
  html`<${Table} label="Events" columns=${[["No.", "n"], ["Time (UTC)"], ["Event"], ["Of"], ["By", "wide"], ["Detail"]]}
    rows=${entries.map((entry) => html`<tr key=${entry.event_no}>
      <td class="n">${entry.event_no}</td>
      <td><time datetime=${entry.at} title=${exact(entry.at)}>${timeOfDay(entry.at)}</time></td>
      <th scope="row">${entry.event}</th>
      <td>${subject(run, entry)}</td>
      <td class="wide">${entry.actor}</td>
      <td class="detail">${told(entry.detail)}</td>
    </tr>`)} />`;

/** The newest entries of the run, and each new one as it is told. */
export function useEvents(run, after, most) {
  const first = useResource(["runs", run, "journal"], { after, limit: most });
  const [later, setLater] = useState([]);
  useEffect(() => listen((entry) => entry !== null && setLater((before) => [...before, entry].slice(-most))), [run]);
  const all = new Map([...(first.data?.entries ?? []), ...later].map((entry) => [entry.event_no, entry]));
  return { resource: first, entries: [...all.values()].sort((a, b) => b.event_no - a.event_no).slice(0, most) };
}

/** Entries after number `begin`; those before `before` if it is given, else all that come. */
function Stretch({ run, begin, before }) {
  const { resource, entries } = useEvents(run, begin, SHOWN);
  const shown = before === null ? entries : entries.filter((entry) => entry.event_no < before);
  const oldest = shown.at(-1)?.event_no ?? 0;
  const ways = html`${before !== null && html`<a href=${to("runs", run, "events")}>Newest</a> `}${oldest > 1 && html`<a href=${to("runs", run, "events", { before: oldest })}>Older</a>`}`;
  return html`<${Loaded} resource=${resource}>${() =>
    shown.length === 0
      ? html`<${Empty}>There is no event here.<//>`
      : html`<${Panel} title=${before === null ? "The newest" : `Before no. ${before}`} id="events" aside=${ways}><${EventTable} run=${run} entries=${shown} /><//>`}
  <//>`;
}

/** Where the stretch of the newest begins, as it was when the page was opened: what comes later is added to it. */
function Newest({ run, newest }) {
  const [begin] = useState(Math.max(0, newest - SHOWN));
  return html`<${Stretch} run=${run} begin=${begin} before=${null} />`;
}

export function EventsView({ run, query }) {
  const view = useResource(query.before ? null : ["runs", run]);
  const before = Number(query.before);
  return html`<h1>Events</h1>
    ${query.before
      ? html`<${Stretch} key=${before} run=${run} begin=${Math.max(0, before - 1 - SHOWN)} before=${before} />`
      : html`<${Loaded} resource=${view}>${({ event_no: newest }) => html`<${Newest} run=${run} newest=${newest} />`}<//>`}`;
}
