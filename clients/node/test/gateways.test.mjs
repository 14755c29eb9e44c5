// Several gateways: a call goes to the one that has its cache, and its next attempt to another one.
import assert from "node:assert/strict";
import { test } from "node:test";

import { toBinary } from "@bufbuild/protobuf";
import { Metadata } from "@grpc/grpc-js";

import { create, executor, QuireClient, Unavailable } from "quire-llm";

import { Gateways, targetsOf } from "../dist/gateways.js";
import { failingServer, silentServer, TARGET, TIMEOUT_MS } from "./servers.mjs";

const RENEWED = Buffer.from(
  toBinary(executor.RenewCacheResponseSchema, create(executor.RenewCacheResponseSchema, { kvCache: { cacheId: "kv1_x" } })),
);
const RENEW = "/quire.v1.ModelExecutorService/RenewCache";

/** Two gateways, of which the second one has the caches of shard 1, and a client of both. */
async function twoGateways(t, settings = {}) {
  const named = new Metadata();
  const gateways = [
    await failingServer(RENEW, undefined, RENEWED, () => named),
    await failingServer(RENEW, undefined, RENEWED),
  ];
  named.set("quire-gateway", gateways[1].target);
  const client = new QuireClient(gateways.map(({ target }) => target), { timeoutMs: TIMEOUT_MS, ...settings });
  t.after(() => [client, ...gateways].forEach((each) => each.close()));
  return { gateways, client, named };
}

test("a call goes to the gateway that has its cache", async (t) => {
  const { gateways, client, named } = await twoGateways(t);
  for (let n = 0; n < 10; n++) await client.cache("kv1_x");
  const [first, second] = gateways.map(({ calls }) => calls);
  assert.deepEqual([first <= 1, second], [true, 10 - first]);
  // What is not of the list would get the token.
  named.set("quire-gateway", "evil.example:1");
  for (let n = 0; n < 4; n++) await client.cache("kv2_x");
  assert.equal(gateways[0].calls + gateways[1].calls, 14);
});

test("where a gateway is away, the next attempt goes to another one", async (t) => {
  const away = await failingServer(RENEW);
  const there = await failingServer(RENEW, undefined, RENEWED);
  const client = new QuireClient([away.target, there.target], { timeoutMs: TIMEOUT_MS });
  const strict = new QuireClient([away.target, there.target], { timeoutMs: TIMEOUT_MS, retries: false });
  t.after(() => [client, strict, away, there].forEach((each) => each.close()));
  for (let n = 0; n < 4; n++) await client.cache("kv1_x");
  assert.ok(away.calls <= 1);
  const results = await Promise.allSettled([strict.cache("kv1_x"), strict.cache("kv1_x")]);
  assert.ok(results.some(({ reason }) => reason instanceof Unavailable));
});

test("a gateway that is silent is left, and is waited for once", async (t) => {
  const silent = await silentServer();
  const there = await failingServer(RENEW, undefined, RENEWED);
  const client = new QuireClient([silent.target, there.target], { timeoutMs: TIMEOUT_MS });
  t.after(() => [client, silent, there].forEach((each) => each.close()));
  await client.ready(TIMEOUT_MS);
  for (let n = 0; n < 5; n++) await client.cache("kv1_x");
  assert.equal(there.calls, 5);
});

test("targets are a list, or a text with commas that is no URI", () => {
  assert.deepEqual(targetsOf("a:1,b:2"), ["a:1", "b:2"]);
  assert.deepEqual(targetsOf("ipv4:127.0.0.1:1,127.0.0.2:1"), ["ipv4:127.0.0.1:1,127.0.0.2:1"]);
  assert.deepEqual(targetsOf(["a:1"]), ["a:1"]);
});

test("owners are forgotten where their gateway fails, and learnt from new caches and batches", () => {
  const gateways = new Gateways(["a", "b"]);
  gateways.answered("a", { cacheId: "" }, { kvCache: { cacheId: "kv3_x" } }, undefined);
  const batch = { items: [{ cacheId: "kv3_y" }] };
  assert.deepEqual([1, 2, 3].map(() => gateways.target(batch)), ["a", "a", "a"]);
  gateways.failed("a");
  const turns = [gateways.target(batch), gateways.target(batch)];
  assert.deepEqual([turns[0], [...turns].sort()], ["b", ["a", "b"]]);
});
