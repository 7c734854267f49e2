// What a view shows: read once, again when an event says that it changed, and every so often where no event tells.
import { Problem, read } from "./api.js";
import { now } from "./clock.js";
import { useEffect, useState } from "./lib.js";
import { listen } from "./stream.js";

const TOGETHER = 250; // milliseconds in which several events lead to one question
const GAP = 1000; // and between two questions, however many events come
const AFTER_FAILURE = 10000;

/** Whether an entry of the journal concerns `on`: a test of the entry, or beginnings of names of events. */
const concerns = (on, entry) => (typeof on === "function" ? on(entry) : on.some((name) => entry.event.startsWith(name)));

/**
 * `useResource(path, query, { every, on, after })` answers `{ data, problem, at }`. `every`: milliseconds between two reads,
 * where no event tells of a change; `on`: the events after which it is read at once; `after`: it is read again when this
 * value changes. Without a path nothing is read. What was read last stays while a later read fails. Nothing is read while
 * the tab is hidden.
 */
export function useResource(path, query = {}, { every = null, on = [], after = null } = {}) {
  const key = JSON.stringify([path, query]);
  const [state, setState] = useState({ key, data: null, problem: null, at: null });
  const [again, ask] = useState(0);
  useEffect(() => {
    if (path === null) return undefined;
    let timer = null, due = Infinity, reading = null, missed = false, stopped = false, began = -Infinity;

    /** Reads after so many milliseconds, unless it is to read earlier anyway. */
    function within(milliseconds) {
      const then = performance.now() + milliseconds;
      if (then >= due) return;
      clearTimeout(timer);
      due = then;
      timer = setTimeout(load, milliseconds);
    }

    async function load() {
      clearTimeout(timer);
      due = Infinity;
      if (document.hidden || stopped) return;
      if (reading !== null) {
        missed = true;
        return;
      }
      reading = new AbortController();
      began = performance.now();
      let next = every;
      try {
        const data = await read(path, query, { signal: reading.signal });
        if (!stopped) setState({ key, data, problem: null, at: now() });
      } catch (error) {
        if (stopped) return;
        if (!(error instanceof Problem)) throw error;
        if (error.status === 0 || error.status >= 500) next = Math.max(every ?? 0, AFTER_FAILURE);
        setState((before) => ({ ...(before.key === key ? before : { key, data: null, at: null }), problem: error }));
      } finally {
        reading = null;
      }
      if (missed) soon();
      missed = false;
      if (next !== null) within(next);
    }

    const soon = () => within(Math.max(TOGETHER, began + GAP - performance.now()));
    const seen = () => document.hidden || load();
    const unlisten = listen((entry) => {
      if (entry === null || concerns(on, entry)) soon();
    });
    document.addEventListener("visibilitychange", seen);
    load();
    return () => {
      stopped = true;
      clearTimeout(timer);
      reading?.abort();
      unlisten();
      document.removeEventListener("visibilitychange", seen);
    };
  }, [key, every, again, String(on), after]);
  const shown = state.key === key ? state : { key, data: null, problem: null, at: null };
  return { ...shown, readAgain: () => ask((times) => times + 1) };
}
