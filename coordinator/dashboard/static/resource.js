// What a view shows: read once, again when an event says that it changed, and every so often where no event tells.
import { Problem, read } from "./api.js";
import { now } from "./clock.js";
import { useEffect, useState } from "./lib.js";
import { listen } from "./stream.js";

const TOGETHER = 250; // milliseconds in which several events lead to one question
const AFTER_FAILURE = 5000;

/**
 * `useResource(path, query, { every, on })` answers `{ data, problem, at }`. `every`: milliseconds between two reads;
 * `on`: beginnings of the names of events after which it is read at once. Without a path nothing is read. What was read
 * last stays while a later read fails. Nothing is read while the tab is hidden.
 */
export function useResource(path, query = {}, { every = null, on = [] } = {}) {
  const key = JSON.stringify([path, query]);
  const [state, setState] = useState({ key, data: null, problem: null, at: null });
  useEffect(() => {
    if (path === null) return undefined;
    let timer = null, reading = null, again = false, stopped = false;

    function later(milliseconds) {
      clearTimeout(timer);
      timer = setTimeout(load, milliseconds);
    }

    async function load() {
      clearTimeout(timer);
      if (document.hidden || stopped) return;
      if (reading !== null) {
        again = true;
        return;
      }
      reading = new AbortController();
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
      if (again) {
        again = false;
        next = TOGETHER;
      }
      if (next !== null) later(next);
    }

    const seen = () => document.hidden || load();
    const unlisten = listen((entry) => {
      if (entry === null || on.some((name) => entry.event.startsWith(name))) later(TOGETHER);
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
  }, [key, every, on.join()]);
  return state.key === key ? state : { key, data: null, problem: null, at: null };
}
