// Dark or light: the browser's preference, unless one was chosen here.
import { createStore } from "./store.js";

const KEY = "coordinator.theme";
const preference = matchMedia("(prefers-color-scheme: dark)");

const current = () => document.documentElement.dataset.theme ?? (preference.matches ? "dark" : "light");

export const theme = createStore(current());
preference.addEventListener("change", () => theme.set(current()));

export function toggle() {
  const next = current() === "dark" ? "light" : "dark";
  localStorage.setItem(KEY, next);
  document.documentElement.dataset.theme = next;
  theme.set(next);
}

/** The colours of a custom property as the browser resolves it now, for what is drawn on a canvas. */
export function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
