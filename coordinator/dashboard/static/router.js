// Every state of the page is an address behind '#', which can be sent to a colleague; no token is ever in it.
import { createStore } from "./store.js";

function parse() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part; // a '%' that somebody typed
    }
  });
  return { parts, query: Object.fromEntries(new URLSearchParams(query)), hash: location.hash };
}

export const route = createStore(parse());
window.addEventListener("hashchange", () => route.set(parse()));

/** The address of a page: `to("runs", run, "workers")`, with a query as the last argument if it is an object. */
export function to(...parts) {
  const query = typeof parts.at(-1) === "object" ? parts.pop() : {};
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}${text ? `?${text}` : ""}`;
}

export function go(hash, { replace = false } = {}) {
  if (replace) {
    history.replaceState(null, "", hash);
    route.set(parse());
  } else location.hash = hash;
}
