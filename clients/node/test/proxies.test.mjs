// A server on this machine is reached without the proxy of the environment; where there is one, errors name it.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:net";
import { test } from "node:test";

import { QuireClient } from "quire-llm";

import { proxyOf } from "../dist/proxies.js";
import { TARGET, TIMEOUT_MS } from "./servers.mjs";

/** What listens instead of a proxy, and refuses everything. */
async function refusingProxy() {
  const requests = [];
  const server = createServer((socket) => {
    socket.on("error", () => undefined);
    socket.once("data", (bytes) => {
      requests.push(bytes.toString());
      socket.end("HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n");
    });
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return { requests, server, host: `127.0.0.1:${server.address().port}` };
}

test("no proxy is asked for this machine, and one is named for others", async () => {
  const { requests, server, host } = await refusingProxy();
  process.env.http_proxy = `http://me:secret@${host}`;
  try {
    const port = TARGET.split(":").at(-1);
    for (const target of [`127.0.0.1:${port}`, `localhost:${port}`, `dns:///localhost:${port}`]) {
      const client = new QuireClient(target, { timeoutMs: TIMEOUT_MS });
      assert.ok((await client.status()).workers.length);
      client.close();
    }
    assert.deepEqual(requests, []);
    const other = new QuireClient("quire.example:50051", { timeoutMs: 2000 });
    const named = (error) => error.message.includes(`(through the proxy ${host} of http_proxy)`);
    await assert.rejects(other.prefill([1]), named);
    await assert.rejects(async () => {
      for await (const chunk of other.execute("x")) assert.ok(chunk);
    }, named);
    await assert.rejects(other.session().prefill([1]), named);
    await assert.rejects(other.ready(200), named);
    other.close();
    assert.ok(requests.length);
  } finally {
    delete process.env.http_proxy;
    server.close();
  }
});

test("which targets have a proxy", () => {
  const environment = { https_proxy: "http://proxy.example:3128", no_proxy: ".here,10.0.0.1" };
  const named = "proxy.example:3128 of https_proxy";
  for (const target of ["quire.example:1", "[2001:db8::1]:1", "10.0.0.2:1", "ipv4:127.0.0.1:1,10.0.0.2:1"]) {
    assert.equal(proxyOf(target, environment), named, target);
  }
  for (const target of ["a.here:1", "10.0.0.1:1", "127.9.9.9:1", "[::1]:1", "LOCALHOST:1", "0.0.0.0:1", "unix:/x"]) {
    assert.equal(proxyOf(target, environment), "", target);
  }
  assert.equal(proxyOf("quire.example:1", { http_proxy: "https://proxy.example" }), "");
});
