// The time as the server has it, told once a second while somebody looks.
import { createStore } from "./store.js";

let offset = 0;

/** Holds this machine's clock against the Date of an answer, which is whole seconds. */
export function compare(date) {
  const server = Date.parse(date);
  if (Number.isFinite(server) && Math.abs(server + 500 - (Date.now() + offset)) > 1500) offset = server + 500 - Date.now();
}

export const now = () => Date.now() + offset;
export const tick = createStore(now());

setInterval(() => {
  if (!document.hidden) tick.set(now());
}, 1000);
