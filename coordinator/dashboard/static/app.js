// The page: who is signed in, which view the address names, and the frame around it.
import { timeOfDay } from "./format.js";
import { follow, live } from "./stream.js";
import { html, render, useEffect, useRef, useState } from "./lib.js";
import { route, to } from "./router.js";
import { session, signOut } from "./session.js";
import { HELP, PAGES, install } from "./shortcuts.js";
import { useStore } from "./store.js";
import { theme, toggle } from "./theme.js";
import { ActivationView, ActivationsView } from "./views/activations.js";
import { EventsView } from "./views/events.js";
import { FailuresView } from "./views/failures.js";
import { Overview } from "./views/overview.js";
import { PoliciesView, PolicyView } from "./views/policies.js";
import { RolloutView } from "./views/rollout.js";
import { RolloutsView } from "./views/rollouts.js";
import { RunsView } from "./views/runs.js";
import { SignIn } from "./views/signin.js";
import { UpdateView, UpdatesView } from "./views/updates.js";
import { WorkersView } from "./views/workers.js";

const MANY = { workers: WorkersView, policies: PoliciesView, activations: ActivationsView, updates: UpdatesView, rollouts: RolloutsView, events: EventsView, failures: FailuresView };
const ONE = { policies: PolicyView, activations: ActivationView, updates: UpdateView, rollouts: RolloutView };

function NotThere() {
  return html`<h1>There is no such page</h1><p class="empty">Go back to <a href=${to("runs")}>all runs</a>.</p>`;
}

function view({ parts, query }) {
  const [root, run, page, id, ...rest] = parts;
  if (parts.length === 0 || (root === "runs" && run === undefined)) return html`<${RunsView} />`;
  if (root !== "runs" || rest.length) return html`<${NotThere} />`;
  if (page === undefined) return html`<${Overview} key=${run} run=${run} query=${query} />`;
  const View = id === undefined ? MANY[page] : ONE[page];
  return View ? html`<${View} key=${`${run} ${page} ${id}`} run=${run} id=${id} query=${query} />` : html`<${NotThere} />`;
}

const CONNECTION = {
  connecting: "Connecting…",
  live: "Live",
  paused: "Paused while this tab is hidden",
};

/** Whether what is shown is live; said aloud when that changes, so that nothing in it ticks. */
function Connection() {
  const { state, since, why } = useStore(live);
  if (state === "off") return null;
  return html`<div class="connection ${state}" role="status" title=${why ?? ""}>
    <span aria-hidden="true" class="dot"></span>
    ${state === "lost" ? `Connection lost at ${timeOfDay(since)} UTC, trying again` : CONNECTION[state]}
  </div>`;
}

function Tabs({ run, page }) {
  return html`<nav class="tabs" aria-label="Run ${run}">
    <ul>${PAGES.map(([, name, title]) => html`<li><a href=${name ? to("runs", run, name) : to("runs", run)} aria-current=${(page ?? "") === name ? "page" : undefined}>${title}</a></li>`)}</ul>
  </nav>`;
}

function Help({ dialog }) {
  return html`<dialog ref=${dialog} aria-labelledby="help-title">
    <h2 id="help-title">Keys</h2>
    <table><thead><tr><th scope="col">Key</th><th scope="col">Leads to</th></tr></thead>
      <tbody>${HELP.map(([keys, what]) => html`<tr><td><kbd>${keys}</kbd></td><td>${what}</td></tr>`)}</tbody></table>
    <form method="dialog"><button>Close</button></form>
  </dialog>`;
}

function Frame() {
  const where = useStore(route), shade = useStore(theme);
  const help = useRef(null), main = useRef(null), shown = useRef(null);
  const [, run, page] = where.parts;
  useEffect(() => install(() => help.current.showModal()), []);
  useEffect(() => (run ? follow(run) : undefined), [run]);
  const place = where.parts.join("/");
  useEffect(() => {
    document.title = [...where.parts.slice(2).reverse(), run, "Rollout coordinator"].filter(Boolean).join(" · ");
    // A reader of screens begins at the top of the new view; the first view is left as the browser opens it.
    if (shown.current !== null && shown.current !== place) {
      main.current.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
    shown.current = place;
  }, [place]);
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the content</a>
    <header class="top">
      <a class="brand" href=${to("runs")}><img src="icon.svg" width="20" height="20" alt="" /> <span class="word">Runs</span></a>
      ${run && html`<span class="crumb" aria-hidden="true">/</span><a class="run" href=${to("runs", run)}>${run}</a>`}
      <span class="space"></span>
      <${Connection} />
      <button type="button" onClick=${() => help.current.showModal()} aria-label="Keys" title="Keys (?)">?</button>
      <button type="button" onClick=${toggle} title="Theme (t)">${shade === "dark" ? "Light" : "Dark"}</button>
      <button type="button" onClick=${() => signOut()}>Sign out</button>
    </header>
    ${run && html`<${Tabs} run=${run} page=${page} />`}
    <main id="main" tabindex="-1" ref=${main}>${view(where)}</main>
    <${Help} dialog=${help} />`;
}

function App() {
  const { token } = useStore(session);
  return token === null ? html`<${SignIn} />` : html`<${Frame} />`;
}

render(html`<${App} />`, document.getElementById("app"));
