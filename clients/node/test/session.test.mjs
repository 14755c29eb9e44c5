import assert from "node:assert/strict";
import { after, test } from "node:test";

import { create, executor, QuireClient, QuireError, SessionEnded, status, Unavailable } from "quire-llm";

import { breakingWay, silentServer, TARGET, TIMEOUT_MS } from "./servers.mjs";

const METHODS = executor.ModelExecutorService.method;
const client = new QuireClient(TARGET, { timeoutMs: TIMEOUT_MS });
after(() => client.close());

/** A session that ends with its test, however that ends. */
function sessionOf(t, caller, options) {
  const session = caller.session(options);
  t.after(() => session.cancel());
  return session;
}

async function greedy(caller, prompt, steps) {
  const cache = await caller.prefill(prompt);
  const tokens = [cache.output.tokenId];
  while (tokens.length < steps) tokens.push((await cache.decode(tokens.at(-1))).tokenId);
  assert.equal(await cache.release(), true);
  return tokens;
}

test("a session says what the client says", async (t) => {
  const prompts = [[1], [2, 3], [4, 5, 6], [7, 8, 9, 1]];
  const session = sessionOf(t, client);
  const together = await Promise.all(prompts.map((prompt) => greedy(session, prompt, 5)));
  await session.close();
  for (const [index, prompt] of prompts.entries()) {
    assert.deepEqual(together[index], await greedy(client, prompt, 5));
  }
});

test("more calls than may be in flight are all answered", async (t) => {
  const session = sessionOf(t, client, { maxInFlight: 4 });
  const calls = Array.from({ length: 200 }, (_, n) => session.forward([1, 2, 1 + (n % 9)]));
  for (const answer of await Promise.all(calls)) assert.equal(answer.outputs.length, 3);
  await session.close();
});

test("settings that make no sense are refused at once, and open no stream", async (t) => {
  const before = (await client.status()).sessions;
  for (const closeTimeoutMs of [NaN, "5", null]) assert.throws(() => client.session({ closeTimeoutMs }), TypeError);
  for (const settings of [{ closeTimeoutMs: -1 }, { maxInFlight: 0 }, { maxInFlight: NaN }]) {
    assert.throws(() => client.session(settings), RangeError);
  }
  assert.throws(() => new QuireClient(TARGET, { timeoutMs: NaN }), TypeError);
  assert.throws(() => new QuireClient(TARGET, { timeoutMs: -1 }), RangeError);
  const session = sessionOf(t, client);
  await assert.rejects(session.forward([1], { timeoutMs: NaN }), TypeError);
  await session.forward([1]);
  assert.equal((await client.status()).sessions, before + 1);
  await session.close();
});

test("a session can wait without a limit when it closes", async (t) => {
  const warned = [];
  const warn = (warning) => warned.push(warning.name);
  process.on("warning", warn);
  for (const closeTimeoutMs of [Infinity, 2 ** 40]) {
    const session = sessionOf(t, client, { closeTimeoutMs });
    const calls = Array.from({ length: 20 }, () => session.forward([1, 2]));
    // They are made in the next tick.
    await new Promise((resolve) => setImmediate(resolve));
    await session.close();
    for (const answer of await Promise.all(calls)) assert.equal(answer.outputs.length, 2);
  }
  process.off("warning", warn);
  assert.deepEqual(warned, []);
});

test("large requests go in messages of their own", async (t) => {
  // Each is a quarter of what a message holds here, so that four do not fit.
  const small = new QuireClient(TARGET, { timeoutMs: TIMEOUT_MS, maxRequestBytes: 4096 });
  const session = sessionOf(t, small);
  const cacheId = "x".repeat(1000);
  const answers = await Promise.all(Array.from({ length: 20 }, () => session.call(METHODS.releaseCache, { cacheId })));
  assert.ok(answers.every((answer) => !answer.released));
  await assert.rejects(session.call(METHODS.releaseCache, { cacheId: "x".repeat(4096) }), { code: status.RESOURCE_EXHAUSTED });
  assert.equal((await session.call(METHODS.releaseCache, { cacheId: "x" })).released, false);
  await session.close();
  small.close();
});

test("a failed call fails alone, with its reason", async (t) => {
  const session = sessionOf(t, client);
  const results = await Promise.allSettled([
    session.call(METHODS.decode, { cacheId: "unknown", tokenId: 1 }),
    session.prefill([1, 2, 3]),
  ]);
  assert.equal(results[0].reason.reason, "CACHE_NOT_FOUND");
  assert.ok(results[0].reason instanceof QuireError && !(results[0].reason instanceof SessionEnded));
  assert.equal(await results[1].value.release(), true);
  await session.close();
});

test("calls that are given up leave no cache behind", async (t) => {
  const before = await cacheIds();
  const session = sessionOf(t, client);
  const given = new AbortController();
  const signal = { signal: given.signal };
  const copied = await session.prefill([1, 2, 3]);
  const given_up = [
    session.prefill([1, 2, 3], signal),
    session.batchPrefill([[1], [2]], signal),
    copied.fork(2, signal),
    session.forkCaches([[copied, 2]], signal),
  ];
  await new Promise(setImmediate); // They are sent.
  given.abort();
  for (const each of given_up) await assert.rejects(each, { code: status.CANCELLED });
  await copied.release();
  await session.close(); // Waits for what is open, the releases included.
  assert.deepEqual(await cacheIds(), before);
});

async function cacheIds() {
  return (await client.listCaches()).map(({ cacheId }) => cacheId);
}

test("batches and scores run on a session, other calls do not", async (t) => {
  const session = sessionOf(t, client);
  const [one, wrong] = await session.batchPrefill([[1, 2], []]);
  assert.equal(wrong.reason, "EMPTY_TOKENS");
  await session.batchDecode([[one, 3]]);
  assert.equal(one.seqLen, 3);
  assert.deepEqual(await session.score([1, 2, 3]), await client.score([1, 2, 3]));
  assert.equal(await one.refresh(), 3);
  await one.truncate(2);
  assert.equal(await one.release(), true);
  await assert.rejects(session.call(METHODS.getStatus, create(executor.GetStatusRequestSchema)), { name: "TypeError" });
  await session.close();
});

test("a time limit ends a call where nobody answers", async (t) => {
  const silent = await silentServer();
  const other = new QuireClient(silent.target, { timeoutMs: 50 });
  t.after(() => other.close());
  t.after(() => silent.close());
  const session = sessionOf(t, other);
  await assert.rejects(session.prefill([1]), { code: status.DEADLINE_EXCEEDED });
  await assert.rejects(session.prefill([1], { timeoutMs: 10 }), { code: status.DEADLINE_EXCEEDED });
});

test("a time limit beyond our time is none, and ends no process", async (t) => {
  const session = sessionOf(t, client);
  for (const timeoutMs of [Infinity, Number.MAX_SAFE_INTEGER]) {
    const text = await client.generate([1, 2], { maxTokens: 1, ignoreEos: true, tokensOnly: true, timeoutMs });
    assert.equal(text, "");
    for (const caller of [client, session]) {
      const cache = await caller.prefill([1], { timeoutMs });
      await cache.release({ timeoutMs });
    }
  }
});

test("a closed session takes no calls", async (t) => {
  const session = sessionOf(t, client);
  const open = session.prefill([1, 2]);
  await Promise.all([session.close(), open]);
  await assert.rejects(session.prefill([1]), SessionEnded);
  assert.equal((await client.call(METHODS.releaseCache, { cacheId: (await open).cacheId })).released, true);
});

test("a stream that breaks fails all its calls, and a cache goes on elsewhere", async (t) => {
  const way = await breakingWay([Infinity]);
  const other = new QuireClient(way.target, { timeoutMs: TIMEOUT_MS });
  try {
    const session = sessionOf(t, other);
    const cache = await session.prefill([1, 2, 3]);
    way.cut();
    const calls = [cache.decode(1), session.prefill([1]), session.prefill([2])];
    for (const { reason } of await Promise.allSettled(calls)) {
      assert.ok(reason instanceof SessionEnded && reason instanceof Unavailable, reason);
      assert.equal(reason.cause.code, status.UNAVAILABLE);
    }
    await assert.rejects(session.prefill([1]), SessionEnded);
    await session.close();
    client.adopt(cache);
    await cache.decode(1);
    assert.equal(cache.seqLen, 4);
    await cache.release();
  } finally {
    other.close();
    await way.close();
  }
});

test("what is wrong with the stream is told to each of its calls", async (t) => {
  const session = sessionOf(t, client);
  // Larger than the server takes: it ends the stream.
  const huge = new QuireClient(TARGET, { timeoutMs: TIMEOUT_MS, maxRequestBytes: 1 << 30 });
  const wrong = sessionOf(t, huge);
  await assert.rejects(wrong.call(METHODS.releaseCache, { cacheId: "x".repeat(17 << 20) }), (error) => {
    assert.ok(error instanceof SessionEnded);
    assert.equal(error.cause.code, status.RESOURCE_EXHAUSTED);
    return true;
  });
  assert.equal((await session.call(METHODS.releaseCache, { cacheId: "x" })).released, false);
  await session.close();
  huge.close();
});
