// Keys, for those who do without a mouse. A letter does nothing while one types into a field.
import { route, go, to } from "./router.js";
import { signOut } from "./session.js";
import { toggle } from "./theme.js";

export const PAGES = [
  ["o", "", "Overview"],
  ["w", "workers", "Workers"],
  ["p", "policies", "Policies"],
  ["a", "activations", "Activations"],
  ["u", "updates", "Updates"],
  ["r", "rollouts", "Rollouts"],
  ["e", "events", "Events"],
  ["f", "failures", "Failures"],
];

export const HELP = [
  ["?", "this list"],
  ["g then l", "all runs"],
  ...PAGES.map(([key, , name]) => [`g then ${key}`, name.toLowerCase()]),
  ["/", "first field of the page"],
  ["t", "dark or light"],
  ["g then x", "sign out"],
  ["Esc", "close this list"],
];

export function install(showHelp) {
  let went = 0;
  const press = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    const [, run] = route.get().parts;
    if (Date.now() - went < 1500) {
      went = 0;
      const page = PAGES.find(([key]) => key === event.key);
      if (event.key === "l") go(to("runs"));
      else if (event.key === "x") signOut();
      else if (page && run) go(page[1] ? to("runs", run, page[1]) : to("runs", run));
      return;
    }
    if (event.key === "g") went = Date.now();
    else if (event.key === "t") toggle();
    else if (event.key === "?") showHelp();
    else if (event.key === "/") document.querySelector("main input, main select")?.focus();
    else return;
    event.preventDefault();
  };
  document.addEventListener("keydown", press);
  return () => document.removeEventListener("keydown", press);
}
