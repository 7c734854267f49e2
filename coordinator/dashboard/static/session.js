// Who looks: a token, kept for this tab only (sessionStorage), and why the last one was put aside.
import { createStore } from "./store.js";

const KEY = "coordinator.token";

export const session = createStore({ token: sessionStorage.getItem(KEY), said: null, fresh: false });

export function signIn(token) {
  sessionStorage.setItem(KEY, token);
  session.set({ token, said: null, fresh: true });
}

export function signOut(said = null) {
  sessionStorage.removeItem(KEY);
  session.set({ token: null, said, fresh: false });
}

/** Once the page after signing in was chosen. */
export function settle() {
  session.set({ ...session.get(), fresh: false });
}
