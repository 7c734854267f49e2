// A proxy that fails as proxies do: it answers 503 for a while, and cuts streams of events off after their first piece.

import { createServer, request, type Server } from "node:http";
import type { AddressInfo } from "node:net";

export interface Relay {
  url: string;
  /** How many requests to answer 503 from now on. */
  away: number;
  /** How many streams of events to cut off from now on. */
  cuts: number;
  close(): void;
}

export async function relay(target: string): Promise<Relay> {
  const state = { url: "", away: 0, cuts: 0, close: () => void server.close() };
  const server: Server = createServer((asked, answer) => {
    if (state.away > 0) {
      state.away--;
      answer.writeHead(503, { "Retry-After": "0" }).end("the upstream is away");
      return;
    }
    const onward = request(target + asked.url!, { method: asked.method!, headers: asked.headers }, (received) => {
      answer.writeHead(received.statusCode!, received.headers);
      if (received.headers["content-type"]?.startsWith("text/event-stream") && state.cuts > 0) {
        state.cuts--;
        received.once("data", (piece) => answer.write(piece, () => answer.destroy()));
      } else {
        received.pipe(answer);
      }
    });
    onward.on("error", () => answer.destroy());
    answer.on("close", () => onward.destroy());
    asked.pipe(onward);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  state.url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  return state;
}
