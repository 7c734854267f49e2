// What training waits for, in a word: beside each run of the list.
import { title } from "../format.js";
import { html } from "../lib.js";
import { useResource } from "../resource.js";
import { State } from "../ui.js";

const GRAVE = ["active_withdrawn", "no_workers", "no_live_producers", "workers_fenced", "all_stale"];

/** Whether somebody has to act, rather than wait. */
export const isGrave = ({ code }) => GRAVE.includes(code);

export function Standing({ run }) {
  const { data, problem } = useResource(["runs", run, "diagnosis"], {}, { every: 15000 });
  if (data === null) return html`<span>${problem === null ? "…" : problem.message}</span>`;
  const { blockers } = data;
  if (blockers.length === 0) return html`<${State} of="Nothing is in the way" tone="good" />`;
  return html`<${State} of=${title((blockers.find(isGrave) ?? blockers[0]).code)} tone=${blockers.some(isGrave) ? "bad" : "warn"} />`;
}
