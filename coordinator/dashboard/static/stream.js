// The run's events as they are recorded: server-sent events, read with fetch since EventSource cannot send a token.
import { ask } from "./api.js";
import { now } from "./clock.js";
import { createStore } from "./store.js";

const FIRST_PAUSE = 1000, LONGEST_PAUSE = 10000;
const SILENCE = 40000; // the coordinator says something every 15 s

/** state: off, connecting, live, lost or paused; since: when that began; event: the entry that was told last. */
export const live = createStore({ run: null, state: "off", since: now() });

const listeners = new Set();

/** `heard(entry)` for each entry of the journal, and `heard(null)` when one may have been missed. */
export function listen(heard) {
  listeners.add(heard);
  return () => listeners.delete(heard);
}

const tell = (entry) => [...listeners].forEach((heard) => heard(entry));

function became(run, state, why = null) {
  const before = live.get();
  if (before.run !== run || before.state !== state) live.set({ run, state, since: now(), why });
}

/** Follows a run until the function that it returns is called. Pauses while the tab is hidden. */
export function follow(run) {
  let lastId = null, attempt = null, retry = null, ended = false, pause = FIRST_PAUSE;

  function connect() {
    clearTimeout(retry);
    if (ended || document.hidden) return;
    attempt?.abort();
    attempt = new AbortController();
    if (live.get().run !== run || live.get().state !== "lost") became(run, "connecting");
    receive(attempt).catch((error) => {
      if (ended || error.name === "AbortError" && document.hidden) return;
      if (error.status === 401) return; // the page leads back to signing in
      if (error.status === 422 && lastId !== null) lastId = null; // the events went back: the database was restored
      else if ([403, 404, 422].includes(error.status)) {
        became(run, "off"); // there is no such run for this token, and the view says so
        return;
      }
      became(run, "lost", error.message);
      retry = setTimeout(connect, pause);
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    });
  }

  async function receive(current) {
    let silence;
    const hear = () => {
      clearTimeout(silence);
      silence = setTimeout(() => current.abort(new Error("nothing was heard for too long")), SILENCE);
    };
    const headers = lastId === null ? {} : { "Last-Event-ID": lastId };
    try {
      hear();
      const response = await ask(["runs", run, "events", "stream"], {}, { signal: current.signal, headers });
      became(run, "live");
      pause = FIRST_PAUSE;
      tell(null);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) throw new Error("the coordinator ended the stream");
        hear();
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        blocks.forEach(take);
      }
    } finally {
      clearTimeout(silence);
    }
  }

  function take(block) {
    const fields = {};
    for (const line of block.split("\n")) {
      const colon = line.indexOf(":");
      if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 1).replace(/^ /, "");
    }
    if (fields.id) lastId = fields.id;
    if (fields.data && fields.event !== "watch") tell(JSON.parse(fields.data));
  }

  function seen() {
    if (document.hidden) {
      clearTimeout(retry);
      attempt?.abort();
      became(run, "paused");
    } else connect();
  }

  document.addEventListener("visibilitychange", seen);
  window.addEventListener("online", connect);
  connect();
  return () => {
    ended = true;
    clearTimeout(retry);
    attempt?.abort();
    document.removeEventListener("visibilitychange", seen);
    window.removeEventListener("online", connect);
    became(null, "off");
  };
}
