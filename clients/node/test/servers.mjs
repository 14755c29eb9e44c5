// The server that the tests talk to, and what stands between: $QUIRE_TARGET is a `quire serve --model adder`.
import { once } from "node:events";
import { connect, createServer } from "node:net";
import { promisify } from "node:util";

import { Metadata, Server, ServerCredentials, status } from "@grpc/grpc-js";

export const TARGET = process.env.QUIRE_TARGET ?? "127.0.0.1:50051";
/** A server with TLS and tokens, or undefined: its target, its CA's file, and a token of the role `call`. */
export const GUARDED = process.env.QUIRE_GUARDED && JSON.parse(process.env.QUIRE_GUARDED);
export const TIMEOUT_MS = 60_000;

/**
 * A way to the server that breaks. Each connection carries as many bytes of answers as `plan` says for it, the last one's
 * for all later ones, and is cut then.
 */
export async function breakingWay(plan) {
  const [host, port] = TARGET.split(":");
  const sockets = new Set();
  const way = { target: "", connections: 0, cut, close };
  const server = createServer((near) => {
    if (!server.listening) return near.destroy();
    let left = plan[Math.min(way.connections++, plan.length - 1)];
    const far = connect(Number(port), host);
    for (const socket of [near, far]) {
      sockets.add(socket);
      socket.on("error", () => undefined);
      socket.on("close", () => [near, far].forEach((either) => either.destroy()));
    }
    near.pipe(far);
    far.on("data", (bytes) => {
      left -= bytes.length;
      if (left >= 0) near.write(bytes);
      else near.destroy();
    });
  });
  function cut() {
    for (const socket of sockets) socket.destroy();
    sockets.clear();
  }
  async function close() {
    server.close();
    cut();
    await once(server, "close");
  }
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  way.target = `127.0.0.1:${server.address().port}`;
  return way;
}

/** A server that hears everything and says nothing. */
export async function silentServer() {
  const sockets = [];
  const server = createServer((socket) => sockets.push(socket.on("error", () => undefined)));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  function close() {
    for (const socket of sockets) socket.destroy();
    server.close();
  }
  return { target: `127.0.0.1:${server.address().port}`, close };
}

/**
 * A server that counts the calls of one method, and answers each with an error, or with the bytes `answer`. `hears` is given
 * the bytes of each request, and returns the trailing metadata of its answer, or nothing.
 */
export async function failingServer(method, error = { code: status.UNAVAILABLE }, answer = undefined, hears = () => {}) {
  const server = new Server();
  const counting = { target: "", calls: 0, close: () => server.forceShutdown() };
  const asBytes = (bytes) => bytes;
  const refuse = ({ request }, callback) => {
    counting.calls += 1;
    const trailing = hears(request);
    callback(answer ? null : error, answer, trailing instanceof Metadata ? trailing : undefined);
  };
  server.register(method, refuse, asBytes, asBytes, "unary");
  const bind = promisify(server.bindAsync).bind(server);
  counting.target = `127.0.0.1:${await bind("127.0.0.1:0", ServerCredentials.createInsecure())}`;
  return counting;
}
