// The client: the calls as they are generated, and what a generator does not know. Retries, refusals, event streams.

import { createClient, type Client } from "./generated/client/index.js";
import { streamEvents } from "./generated/sdk.gen.js";
import type { JournalEntry, ProblemCode, ProblemDocument, Watch } from "./generated/types.gen.js";

export * from "./generated/index.js";
export type { Client };

/** The coordinator refused a call, which has changed nothing. Switch on `code`; `problem.next_step` says what to do. */
export class Refused extends Error {
  override readonly name = "Refused";
  readonly code: ProblemCode;
  readonly status: number;

  constructor(readonly problem: ProblemDocument) {
    super(`${problem.code}: ${problem.detail}; ${problem.next_step}`);
    this.code = problem.code;
    this.status = problem.status;
  }
}

/** No coordinator answered within the time for retries. */
export class Unreachable extends Error {
  override readonly name = "Unreachable";
}

export interface Options {
  /** http://host:port, without a path. */
  url: string;
  token: string;
  /** For how long a call is sent again after a fault, 502, 503, 504 or 429. Every call is safe to repeat. */
  retrySeconds?: number;
}

/** What the generated functions take as `client`. */
export function connect({ url, token, retrySeconds = 60 }: Options): Client {
  const client = createClient({
    baseUrl: url.replace(/\/+$/, ""),
    auth: () => token,
    throwOnError: true,
    fetch: persistent(retrySeconds),
  });
  client.interceptors.error.use((error) => (isProblem(error) ? new Refused(error) : error));
  return client;
}

export interface RunEvent {
  /** The `event_no` to go on after. */
  id: number;
  data: JournalEntry | Watch;
}

/**
 * The journal of a run as it grows, without an end, a hole or an entry told twice: a stream that breaks is taken up
 * where it was. Without `after` it begins with what `watch` answers; `names` are beginnings of names, such as "policy.".
 */
export async function* events(
  client: Client,
  runId: string,
  { after, names = [], signal }: { after?: number; names?: string[]; signal?: AbortSignal } = {},
): AsyncGenerator<RunEvent> {
  const { fetch: send = globalThis.fetch } = client.getConfig();
  let place = after;
  while (!signal?.aborted) {
    let refusal: unknown;
    const { stream } = await streamEvents({
      client,
      path: { run_id: runId },
      query: { events: names.join(","), ...(place === undefined ? {} : { after: place }) },
      signal: signal ?? null,
      fetch: async (input, init) => {
        const response = await send(input, init);
        return response.ok ? response : Promise.reject(await refused(response));
      },
      sseMaxRetryAttempts: 1,
      onSseError: (error) => {
        refusal = error instanceof Refused || error instanceof Unreachable ? error : undefined;
      },
      // An event without data moves the place alone.
      onSseEvent: ({ id }) => {
        place = id === undefined ? place : Number(id);
      },
    });
    for await (const data of stream as AsyncGenerator<JournalEntry | Watch>) {
      yield { id: data.event_no, data };
    }
    if (refusal) throw refusal;
    await pause(0.1);
  }
}

const AGAIN = new Set([429, 502, 503, 504]);

/** fetch, sent again where that may help, with a pause that grows to 5 s or is as long as Retry-After asks. */
function persistent(retrySeconds: number): typeof fetch {
  return async (input, init) => {
    const request = new Request(input, init);
    const end = Date.now() + retrySeconds * 1000;
    for (let attempt = 0; ; attempt++) {
      let asked = 0;
      let why: unknown;
      try {
        const response = await fetch(request.clone());
        if (!AGAIN.has(response.status)) return response;
        asked = Number(response.headers.get("Retry-After") ?? 0);
        why = await refused(response);
      } catch (fault) {
        if (request.signal.aborted) throw fault;
        why = fault;
      }
      const seconds = Math.max(asked, Math.min(5, 0.1 * 2 ** attempt) * (0.5 + Math.random() / 2));
      if (Date.now() + seconds * 1000 > end) {
        if (why instanceof Refused && why.status === 429) throw why;
        throw new Unreachable(`${request.method} ${request.url}: no answer in ${retrySeconds} s`, { cause: why });
      }
      await pause(seconds);
    }
  };
}

function pause(seconds: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, seconds * 1000));
}

function isProblem(value: unknown): value is ProblemDocument {
  return typeof value === "object" && value !== null && "code" in value && "next_step" in value;
}

async function refused(response: Response): Promise<Error> {
  const text = await response.text();
  try {
    const problem: unknown = JSON.parse(text);
    if (isProblem(problem)) return new Refused(problem);
  } catch {
    // A proxy's page, which is no JSON.
  }
  return new Error(`${response.status} ${response.statusText}: ${text.slice(0, 200)}`);
}
