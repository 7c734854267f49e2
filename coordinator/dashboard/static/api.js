// Questions to /v1. A refusal carries the coordinator's own words; a token that ended leads back to signing in.
import { compare } from "./clock.js";
import { session, signOut } from "./session.js";

export const TOKEN_ENDED = "Your token is not accepted any more: it has expired or was revoked. Sign in with another one.";

export class Problem extends Error {
  constructor(status, code, detail, nextStep) {
    super(detail);
    this.status = status;
    this.code = code;
    this.nextStep = nextStep;
  }
}

/** Where an answer of the API lies, relative to the page, so that a proxy's prefix stays in it. */
export function address(path, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) if (value !== null && value !== undefined && value !== "") parameters.set(name, value);
  const text = parameters.toString();
  return `../v1/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  return new Problem(response.status, body.code ?? "unknown", body.detail ?? `the answer was ${response.status}`, body.next_step ?? "Try again in a moment.");
}

/** Sends one question with the token. Throws Problem for a refusal, and for no answer (status 0). */
export async function ask(path, query, { signal, headers = {}, token = session.get().token } = {}) {
  let response;
  try {
    response = await fetch(address(path, query), { headers: { ...headers, authorization: `Bearer ${token}` }, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "no_answer", "the coordinator does not answer", "It is asked again by itself; look at the server and the network.");
  }
  compare(response.headers.get("date"));
  if (response.ok) return response;
  const problem = await refusal(response);
  if (response.status === 401 && token === session.get().token && token !== null) signOut(TOKEN_ENDED);
  throw problem;
}

export const read = async (path, query, options) => (await ask(path, query, options)).json();
