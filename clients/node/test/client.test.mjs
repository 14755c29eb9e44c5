import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, test } from "node:test";

import { Metadata } from "@grpc/grpc-js";

import { executor, QuireClient, QuireError, status, types } from "quire-llm";

import { ErrorInfo, RetryInfo } from "../dist/gen/google/rpc/error_details.js";
import { Status } from "../dist/gen/google/rpc/status.js";
import { breakingWay, failingServer, GUARDED, silentServer, TARGET, TIMEOUT_MS } from "./servers.mjs";

const client = new QuireClient(TARGET, { timeoutMs: TIMEOUT_MS });
after(() => client.close());

/** Checks that a promise is refused with a QuireError, and returns it. */
async function refused(promise) {
  const error = await promise.then(
    () => assert.fail("it was not refused"),
    (failed) => failed,
  );
  assert.ok(error instanceof QuireError, error);
  return error;
}

test("a cache lives through every call on it", async () => {
  await client.ready(TIMEOUT_MS);
  const cache = await client.prefill([1, 2, 3]);
  assert.equal(cache.seqLen, 3);
  const first = cache.output.tokenId;
  const second = (await cache.decode(first)).tokenId;
  assert.equal(cache.seqLen, 4);
  const [copy] = await cache.fork();
  assert.notEqual(copy.cacheId, cache.cacheId);
  const verified = await copy.verify([second, 1, 2], { accept: types.VerifyAccept.VERIFY_ACCEPT_UNSPECIFIED });
  assert.equal(verified.outputs.length, 3);
  assert.equal(copy.seqLen, 7);
  await copy.truncate(4);
  assert.equal((await copy.decode(second)).tokenId, (await cache.extend([second])).tokenId);
  assert.equal((await client.cache(copy.cacheId)).seqLen, 5);
  assert.equal(await copy.release(), true);
  assert.equal(await copy.release(), false);
  assert.equal(await cache.release(), true);
});

test("what a cache was asked for goes on", async () => {
  const output = { mask: { kind: { $case: "allowed", value: { ids: [7] } } } };
  const cache = await client.prefill([1, 2, 3], { output });
  assert.equal(cache.output.tokenId, 7);
  const [copy] = await cache.fork();
  const [[other]] = await client.forkCaches([[cache, 1]]);
  for (const each of [cache, copy, other]) {
    assert.equal((await each.decode(1)).tokenId, 7);
    assert.equal((await each.extend([1])).tokenId, 7);
    assert.equal((await each.verify([1])).outputs[0].tokenId, 7);
    assert.equal((await each.decode(1, { mask: { kind: { $case: "allowed", value: { ids: [8] } } } })).tokenId, 8);
    assert.equal((await each.decode(1)).tokenId, 7);
    each.defaultOutput = undefined;
    assert.notEqual((await each.decode(1)).tokenId, 7);
    await each.release();
  }
});

test("no token and no length are no zero", async () => {
  const cache = await client.prefill([1, 2, 3]);
  for (const nothing of [undefined, null, NaN]) {
    await assert.rejects(cache.decode(nothing), TypeError);
    await assert.rejects(cache.truncate(nothing), TypeError);
  }
  const unset = { cacheId: cache.cacheId };
  assert.equal((await refused(client.call("decode", unset))).reason, "EMPTY_TOKENS");
  assert.equal((await refused(client.call("truncateKv", unset))).reason, "BAD_FIELD");
  assert.equal((await client.cache(cache.cacheId)).seqLen, 3);
  await cache.release();
});

test("several caches are forked in one call, and seeds drawn for", async (t) => {
  const output = { sampling: { temperature: 1, seed: 7n } };
  const session = client.session();
  t.after(() => session.cancel());
  for (const caller of [client, session]) {
    const left = await caller.prefill([1, 2, 3], { output, sampleSeeds: [7n, 2n ** 64n - 1n] });
    assert.equal(left.samples.length, 2);
    assert.equal(left.samples[0].tokenId, left.output.tokenId); // by the same seed
    const right = await caller.prefill([4]);
    const copies = await caller.forkCaches([[left, 2], [right, 1]], { release: [left, right] });
    assert.deepEqual(copies.map((each) => each.map((copy) => copy.seqLen)), [[3, 3], [1]]);
    assert.deepEqual(copies[0][1].output, left.output);
    await refused(client.cache(left.cacheId));

    const [[first, second], [third]] = copies;
    await (await client.cache(third.cacheId)).decode(1);
    const error = await refused(caller.forkCaches([[first, 1], [third, 1]], { release: [first] }));
    assert.equal(error.reason, "POSITION_MISMATCH"); // and nothing was released
    assert.deepEqual(await first.fork(0, { release: [first, second] }), []);
    await refused(client.cache(first.cacheId));
    await refused(client.cache(second.cacheId));
    assert.equal(await third.release(), true);
  }
});

test("the calls of each service answer", async () => {
  const { model, tokenizerJson } = await client.executor.getModelInfo({ includeTokenizer: true });
  assert.ok(model.vocabSize > 0);
  assert.ok(JSON.parse(tokenizerJson.toString()).model);
  assert.deepEqual(
    (await client.runner.listRuntimes()).runtimes.map((runtime) => runtime.name),
    ["local"],
  );
  assert.equal((await client.admin.warmup()).workersReady, 1);
  const scored = await client.executor.forward({ tokenIds: [1, 2, 3], output: { topLogprobs: 2 } });
  assert.equal(scored.outputs.length, 3);
  assert.equal(scored.tokenLogprobs.length, 2);
});

test("drawing is repeatable with a seed beyond 2^53", async () => {
  const sampling = { temperature: 1, seed: 2n ** 63n + 1n };
  const [one, other] = await Promise.all([1, 2].map(() => client.prefill([1, 2, 3], { output: { sampling } })));
  assert.equal(one.output.tokenId, other.output.tokenId);
  await Promise.all([one.release(), other.release()]);
});

test("a failure says its code, reason, metadata and field", async () => {
  const cache = await client.prefill([1, 2, 3]);
  const { cacheId } = cache;
  const mismatch = await refused(client.executor.decode({ cacheId, tokenId: 1, position: 2 }));
  assert.deepEqual([mismatch.code, mismatch.reason], [status.FAILED_PRECONDITION, "POSITION_MISMATCH"]);
  assert.equal(mismatch.metadata.seq_len, "3");
  assert.equal(mismatch.retryDelayMs, undefined);
  await cache.release();
  assert.equal((await refused(cache.decode(1))).reason, "CACHE_NOT_FOUND");
  const wrong = await refused(client.executor.batchDecode({ items: [] }));
  assert.deepEqual([wrong.code, wrong.reason], [status.INVALID_ARGUMENT, "EMPTY_BATCH"]);
  assert.equal(wrong.violations[0].field, "items");
});

test("a time limit and a signal end a call", async () => {
  const late = await refused(client.executor.getStatus({}, { timeoutMs: 0 }));
  assert.equal(late.code, status.DEADLINE_EXCEEDED);
  const given = AbortSignal.abort();
  assert.equal((await refused(client.executor.getStatus({}, { signal: given }))).code, status.CANCELLED);
  const silent = await silentServer();
  const other = new QuireClient(silent.target);
  try {
    assert.equal((await refused(other.executor.getStatus({}, { timeoutMs: 50 }))).code, status.DEADLINE_EXCEEDED);
    const later = new AbortController();
    const waiting = other.executor.getStatus({}, { signal: later.signal });
    setImmediate(() => later.abort());
    assert.equal((await refused(waiting)).code, status.CANCELLED);
  } finally {
    other.close();
    silent.close();
  }
});

test("what may be sent twice is sent again where a connection breaks", async () => {
  const way = await breakingWay([0, Infinity]);
  const other = new QuireClient(way.target, { timeoutMs: TIMEOUT_MS });
  try {
    const cache = await other.prefill([1, 2, 3]);
    assert.equal(cache.seqLen, 3);
    assert.equal(await cache.release(), true);
    assert.ok(way.connections > 1);
  } finally {
    other.close();
    await way.close();
  }
});

const DECODE = { cacheId: "any", tokenId: 1 };

test("an append without a position is sent once, one with a position again", async () => {
  const away = { code: status.UNAVAILABLE };
  const dropped = { code: status.CANCELLED }; // by gRPC in a gateway that stops
  for (const error of [away, dropped]) {
    const server = await failingServer("/quire.v1.ModelExecutorService/Decode", error);
    const other = new QuireClient(server.target, { timeoutMs: TIMEOUT_MS });
    try {
      assert.equal((await refused(other.executor.decode(DECODE))).code, error.code);
      assert.equal(server.calls, 1);
      assert.equal((await refused(other.executor.decode({ ...DECODE, position: 2 }))).code, error.code);
      assert.equal(server.calls, 1 + 4);
    } finally {
      other.close();
      server.close();
    }
  }
});

test("what the server cancels, or wants to have late, is sent once", async () => {
  const details = (code, typeUrl, detail) => {
    const metadata = new Metadata();
    const value = { code, details: [{ typeUrl, value: detail }] };
    metadata.set("grpc-status-details-bin", Buffer.from(Status.encode(Status.fromPartial(value)).finish()));
    return { code, metadata };
  };
  const reason = ErrorInfo.encode(ErrorInfo.fromPartial({ reason: "CANCELLED" })).finish();
  const delay = RetryInfo.encode(RetryInfo.fromPartial({ retryDelay: { seconds: 600n } })).finish();
  for (const error of [
    details(status.CANCELLED, "google.rpc.ErrorInfo", reason),
    details(status.UNAVAILABLE, "google.rpc.RetryInfo", delay),
  ]) {
    const server = await failingServer("/quire.v1.ModelExecutorService/Decode", error);
    const other = new QuireClient(server.target);
    try {
      await refused(other.executor.decode({ ...DECODE, position: 2 }));
      assert.equal(server.calls, 1);
    } finally {
      other.close();
      server.close();
    }
  }
});

test("a batch is sent again while the gateway of an item is away", async () => {
  const { BatchDecodeResponse } = executor;
  const results = [{ $case: "response", value: {} }, { $case: "error", value: { code: status.UNAVAILABLE } }];
  const answer = { results: results.map((result) => ({ result })) };
  const bytes = Buffer.from(BatchDecodeResponse.encode(BatchDecodeResponse.fromPartial(answer)).finish());
  const server = await failingServer("/quire.v1.ModelExecutorService/BatchDecode", undefined, bytes);
  const other = new QuireClient(server.target, { timeoutMs: TIMEOUT_MS });
  try {
    for (const [items, calls] of [[[{ ...DECODE, position: 2 }], 4], [[DECODE], 1]]) {
      server.calls = 0;
      const { results } = await other.executor.batchDecode({ items });
      assert.deepEqual(results.map(({ result }) => result.$case), ["response", "error"]); // what there is at last
      assert.equal(server.calls, calls);
    }
    server.calls = 0;
    const given = new AbortController();
    const waiting = refused(other.executor.batchDecode({ items: [{ ...DECODE, position: 2 }] }, { signal: given.signal }));
    while (!server.calls) await new Promise(setImmediate);
    given.abort();
    assert.equal((await waiting).code, status.CANCELLED);
    assert.equal(server.calls, 1);
  } finally {
    other.close();
    server.close();
  }
});

test("TLS and tokens", { skip: GUARDED ? false : "no $QUIRE_GUARDED" }, async () => {
  const tls = { ca: readFileSync(GUARDED.ca) };
  const known = new QuireClient(GUARDED.target, { tls, token: GUARDED.token, timeoutMs: TIMEOUT_MS });
  const stranger = new QuireClient(GUARDED.target, { tls, timeoutMs: TIMEOUT_MS });
  const distrustful = new QuireClient(GUARDED.target, { tls: true, timeoutMs: TIMEOUT_MS });
  try {
    const cache = await known.prefill([1, 2, 3]);
    const session = known.session();
    assert.equal((await session.call("releaseCache", { cacheId: cache.cacheId })).released, true);
    await session.close();
    assert.equal((await refused(known.executor.getStatus())).reason, "ROLE_MISSING");
    const unknown = await refused(stranger.prefill([1]));
    assert.deepEqual([unknown.code, unknown.reason], [status.UNAUTHENTICATED, "NO_TOKEN"]);
    assert.equal((await refused(distrustful.prefill([1]))).code, status.UNAVAILABLE);
  } finally {
    for (const either of [known, stranger, distrustful]) either.close();
  }
  assert.throws(() => new QuireClient(TARGET, { token: "two words" }), RangeError);
});
