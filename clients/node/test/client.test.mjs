import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { readFileSync } from "node:fs";
import { after, test } from "node:test";
import { promisify } from "node:util";

import { Metadata, Server, ServerCredentials } from "@grpc/grpc-js";

import { fromBinary, toBinary } from "@bufbuild/protobuf";
import { durationMs } from "@bufbuild/protobuf/wkt";
import {
  admin,
  CacheNotFound,
  create,
  executor,
  outputOptions,
  PositionMismatch,
  QuireClient,
  QuireError,
  runner,
  RuntimeNotFound,
  status,
  types,
  Unavailable,
} from "quire-llm";

import { ErrorInfoSchema, RetryInfoSchema } from "../dist/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../dist/gen/google/rpc/status_pb.js";
import { mayRepeat } from "../dist/methods.js";
import { breakingWay, failingServer, GUARDED, silentServer, TARGET, TIMEOUT_MS } from "./servers.mjs";
import { OtherSignal } from "./signals.mjs";

const METHODS = executor.ModelExecutorService.method;
const client = new QuireClient(TARGET, { timeoutMs: TIMEOUT_MS });
after(() => client.close());

function bytesOf(schema, message) {
  return toBinary(schema, create(schema, message));
}

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
  const verified = await copy.verify([second, 1, 2], { accept: "all", score: true });
  assert.deepEqual([verified.path, verified.tokens], [[0, 1, 2], [1, 2, copy.output.tokenId]]);
  assert.deepEqual([verified.outputs.length, verified.tokenLogprobs.length], [3, 2]);
  assert.equal(copy.seqLen, 7);
  await copy.truncate(4);
  assert.equal((await copy.decode(second)).tokenId, (await cache.extend([second])).tokenId);
  assert.equal((await client.cache(copy.cacheId)).seqLen, 5);
  assert.equal(await copy.release(), true);
  assert.equal(await copy.release(), false);
  assert.equal(await cache.release(), true);
});

test("what a cache was asked for goes on", async () => {
  const output = outputOptions({ allowed: [7] });
  const cache = await client.prefill([1, 2, 3], { output });
  assert.equal(cache.output.tokenId, 7);
  const [copy] = await cache.fork();
  const [[other]] = await client.forkCaches([[cache, 1]]);
  for (const each of [cache, copy, other]) {
    assert.equal((await each.decode(1)).tokenId, 7);
    assert.equal((await each.extend([1])).tokenId, 7);
    assert.deepEqual((await each.verify([1])).tokens, [7]);
    assert.equal((await each.decode(1, { output: outputOptions({ allowed: [8] }) })).tokenId, 8);
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
  assert.equal((await refused(client.call(METHODS.decode, unset))).reason, "EMPTY_TOKENS");
  assert.equal((await refused(client.call(METHODS.truncateKV, unset))).reason, "BAD_FIELD");
  assert.equal((await client.cache(cache.cacheId)).seqLen, 3);
  await cache.release();
});

test("several caches are forked in one call, and seeds drawn for", async (t) => {
  const output = outputOptions({ temperature: 1, seed: 7n });
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
    assert.ok(error instanceof PositionMismatch); // and nothing was released
    assert.deepEqual(await first.fork(0, { release: [first, second] }), []);
    await refused(client.cache(first.cacheId));
    await refused(client.cache(second.cacheId));
    assert.equal(await third.release(), true);
  }
});

test("the calls of each service answer", async () => {
  const { model, tokenizerJson } = await client.modelInfo({ includeTokenizer: true });
  assert.ok(model.vocabSize > 0);
  assert.ok(types.DataType[model.dtype], model.dtype); // one that has a name
  assert.ok(JSON.parse(Buffer.from(tokenizerJson).toString()).model);
  assert.ok((await client.capabilities()).limits.maxItemsPerCall > 0);
  assert.equal(await client.warmup(), 1);
  const { uptime, workers } = await client.status();
  assert.ok(durationMs(uptime) > 0);
  const [{ workerId }] = workers;
  const [metrics] = await client.cacheMetrics({ checkIntegrity: true });
  assert.deepEqual([metrics.workerId, metrics.poolIntact], [workerId, true]);
  assert.deepEqual((await client.loraMetrics()).map((worker) => worker.workerId), [workerId]);
  assert.deepEqual((await client.listRuntimes()).map(({ name }) => name), ["local"]);
  assert.equal((await client.estimateCost("1+1=", { maxTokens: 5 }))[0].maxOutputTokens, 5n);
  assert.equal(await client.cancelExecution("nobody's"), false);
  const cache = await client.prefill([1, 2, 3]);
  assert.deepEqual((await client.listCaches()).map(({ cacheId }) => cacheId), [cache.cacheId]);
  const items = [{ cacheId: cache.cacheId, tokenIds: [1], position: 3 }, { cacheId: "none", tokenIds: [1], position: 1 }];
  const [appended, missing] = await client.unifiedForward(items);
  assert.equal(appended.kvCache.seqLen, 4);
  assert.ok(missing instanceof CacheNotFound);
  await cache.release();
});

test("texts are scored", async () => {
  const scored = await client.score([1, 2, 3], { output: outputOptions({ topLogprobs: 2 }) });
  assert.deepEqual([scored.outputs.length, scored.outputs[0].top.tokenIds.length], [3, 2]);
  assert.equal(scored.logprob, scored.tokenLogprobs[0] + scored.tokenLogprobs[1]);
  assert.equal(scored.isGreedy, false);
  const [same, later, wrong] = await client.scoreBatch([[1, 2, 3], { tokenIds: [1, 2, 3], scoreFrom: 2 }, []]);
  assert.deepEqual(same.tokenLogprobs, scored.tokenLogprobs);
  assert.deepEqual(later.tokenLogprobs, scored.tokenLogprobs.slice(1));
  assert.equal(wrong.reason, "EMPTY_TOKENS");
  const cache = await client.prefill([1, 2, 3], { scoreFrom: 0 });
  assert.deepEqual(cache.tokenLogprobs, scored.tokenLogprobs);
  await cache.release();
});

test("batches have results and errors in their places", async () => {
  const output = outputOptions({ allowed: [7] });
  const [one, wrong, own] = await client.batchPrefill([[1, 2], [], { tokenIds: [3], output }]);
  assert.equal(wrong.reason, "EMPTY_TOKENS");
  assert.deepEqual([one.seqLen, own.output.tokenId], [2, 7]);
  const [first, second] = await client.batchDecode([[one, 5, outputOptions({ allowed: [8] })], [own, 5]], { priority: "low" });
  assert.deepEqual([first.tokenId, second.tokenId], [8, 7]); // by its own output, and by its cache's
  assert.deepEqual([one.seqLen, own.seqLen], [3, 2]);
  await own.release();
  const [, gone] = await client.batchDecode([[one, 5], [own, 5]]);
  assert.ok(gone instanceof CacheNotFound);
  assert.equal(own.seqLen, 2);
  await one.release();
});

test("a cache that somebody else changed is refreshed, and a lease renewed", async () => {
  const cache = await client.prefill([1, 2, 3], { leaseMs: 60_000 });
  await (await client.cache(cache.cacheId)).extend([4, 5]);
  const { seqLen } = await refused(cache.decode(1));
  assert.equal(seqLen, 5);
  assert.equal(await cache.refresh(), 5);
  await cache.decode(1);
  const expires = async () => Number((await client.listCaches())[0].expireTime.seconds);
  await cache.renew(1_000_000);
  const later = await expires();
  await cache.renew(60_000);
  assert.ok((await expires()) < later);
  await cache.release();
});

test("await using releases a cache, and closes a session and a client", async () => {
  const other = new QuireClient(TARGET, { timeoutMs: TIMEOUT_MS });
  const session = other.session();
  const cache = await session.prefill([1, 2, 3]);
  await cache[Symbol.asyncDispose]();
  await assert.rejects(client.cache(cache.cacheId), CacheNotFound);
  await session[Symbol.asyncDispose]();
  await assert.rejects(session.prefill([1]), { message: /the session is closed/ });
  await other[Symbol.asyncDispose]();
  await assert.rejects(other.status());
});

test("a text is not taken for tokens", async () => {
  const cache = await client.prefill(new Uint32Array([1, 2, 3]));
  const attempts = [
    () => client.prefill("123"),
    () => client.batchPrefill(["123"]),
    () => client.score("123"),
    () => client.scoreBatch([{ tokenIds: "123" }]),
    () => cache.extend("123"),
    () => cache.verify("123"),
  ];
  const expected = { name: "TypeError", message: /tokens are numbers, not a text: a tokenizer/ };
  for (const attempt of attempts) await assert.rejects(attempt, expected);
  assert.equal(await cache.refresh(), 3);
  await cache.release();
});

test("words of enums are checked", async () => {
  const cache = await client.prefill([1, 2, 3], { priority: "high" });
  const known = /^priority is one of low, normal, high, not "urgent"$/;
  await assert.rejects(cache.decode(1, { priority: "urgent" }), { name: "RangeError", message: known });
  assert.throws(() => new QuireClient(TARGET, { priority: "urgent" }), RangeError);
  await assert.rejects(cache.verify([1], { accept: "some" }), { message: /^accept is one of all, greedy, sampled, speculative/ });
  assert.throws(() => outputOptions({ logits: "f64" }), { message: /^logits is one of f32, bf16, f16/ });
  assert.throws(() => client.execute("x", { policy: "best" }), { message: /^policy is one of order, local_first, cheapest/ });
  const { logits } = await cache.decode(1, { output: outputOptions({ logits: "f32" }) });
  assert.equal(logits.dtype, types.DataType.F32);
  assert.equal(logits.data.length, 4 * logits.shape[0]);
  await cache.release();
});

test("a mask is sent packed, or deflated where that is smaller", () => {
  const kindOf = (allowed) => outputOptions({ allowed }).mask.kind.case;
  assert.equal(kindOf([1]), "allowed");
  assert.equal(kindOf(new Uint8Array(64)), "packed");
  assert.equal(kindOf(new Uint8Array(4000)), "deflated");
});

test("the priority of a call, or of its client, is in each append", async () => {
  const seen = [];
  const server = await failingServer("/quire.v1.ModelExecutorService/BatchDecode", undefined, Buffer.alloc(0), (bytes) =>
    seen.push(fromBinary(executor.BatchDecodeRequestSchema, bytes).items.map(({ priority }) => priority)),
  );
  const other = new QuireClient(server.target, { timeoutMs: TIMEOUT_MS, priority: "low" });
  try {
    await other.call(METHODS.batchDecode, { items: [DECODE, DECODE] });
    await other.call(METHODS.batchDecode, { items: [DECODE] }, { priority: "high" });
    assert.deepEqual(seen, [[1, 1], [3]]);
  } finally {
    other.close();
    server.close();
  }
});

test("where nothing listens, the error asks for a server", async () => {
  const server = await failingServer("/x/Y");
  server.close();
  const other = new QuireClient(server.target, { retries: false });
  const error = await refused(other.status());
  assert.ok(error instanceof Unavailable);
  assert.match(error.message, /is a server running there\?/);
  other.close();
});

test("drawing is repeatable with a seed beyond 2^53", async () => {
  const output = outputOptions({ temperature: 1, seed: 2n ** 63n + 1n });
  const [one, other] = await Promise.all([1, 2].map(() => client.prefill([1, 2, 3], { output })));
  assert.equal(one.output.tokenId, other.output.tokenId);
  await Promise.all([one.release(), other.release()]);
});

test("a failure says its code, reason, metadata and field", async () => {
  const cache = await client.prefill([1, 2, 3]);
  const { cacheId } = cache;
  const mismatch = await refused(client.call(METHODS.decode, { cacheId, tokenId: 1, position: 2 }));
  assert.deepEqual([mismatch.code, mismatch.reason], [status.FAILED_PRECONDITION, "POSITION_MISMATCH"]);
  assert.ok(mismatch instanceof PositionMismatch);
  assert.equal(mismatch.name, "PositionMismatch");
  assert.equal(mismatch.seqLen, 3);
  assert.equal(mismatch.retryDelayMs, undefined);
  await cache.release();
  await assert.rejects(cache.decode(1), CacheNotFound);
  await assert.rejects(client.estimateCost("x", { runtime: "nowhere" }), RuntimeNotFound);
  const wrong = await refused(client.batchDecode([]));
  assert.deepEqual([wrong.code, wrong.reason], [status.INVALID_ARGUMENT, "EMPTY_BATCH"]);
  assert.equal(wrong.violations[0].field, "items");
});

test("a time limit and a signal end a call", async () => {
  const late = await refused(client.status({ timeoutMs: 0 }));
  assert.equal(late.code, status.DEADLINE_EXCEEDED);
  const given = AbortSignal.abort();
  assert.equal((await refused(client.status({ signal: given }))).code, status.CANCELLED);
  const silent = await silentServer();
  const other = new QuireClient(silent.target);
  try {
    assert.equal((await refused(other.status({ timeoutMs: 50 }))).code, status.DEADLINE_EXCEEDED);
    const later = new AbortController();
    const waiting = other.status({ signal: later.signal });
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
      assert.equal((await refused(other.call(METHODS.decode, DECODE))).code, error.code);
      assert.equal(server.calls, 1);
      assert.equal((await refused(other.call(METHODS.decode, { ...DECODE, position: 2 }))).code, error.code);
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
    metadata.set("grpc-status-details-bin", Buffer.from(bytesOf(StatusSchema, value)));
    return { code, metadata };
  };
  const reason = bytesOf(ErrorInfoSchema, { reason: "CANCELLED" });
  const delay = bytesOf(RetryInfoSchema, { retryDelay: { seconds: 600n } });
  for (const error of [
    details(status.CANCELLED, "google.rpc.ErrorInfo", reason),
    details(status.UNAVAILABLE, "google.rpc.RetryInfo", delay),
  ]) {
    const server = await failingServer("/quire.v1.ModelExecutorService/Decode", error);
    const other = new QuireClient(server.target);
    try {
      await refused(other.call(METHODS.decode, { ...DECODE, position: 2 }));
      assert.equal(server.calls, 1);
    } finally {
      other.close();
      server.close();
    }
  }
});

test("a batch is sent again while the gateway of an item is away", async () => {
  const results = [{ case: "response", value: {} }, { case: "error", value: { code: status.UNAVAILABLE } }];
  const answer = { results: results.map((result) => ({ result })) };
  const bytes = Buffer.from(bytesOf(executor.BatchDecodeResponseSchema, answer));
  const server = await failingServer("/quire.v1.ModelExecutorService/BatchDecode", undefined, bytes);
  const other = new QuireClient(server.target, { timeoutMs: TIMEOUT_MS });
  try {
    for (const [items, calls] of [[[{ ...DECODE, position: 2 }], 4], [[DECODE], 1]]) {
      server.calls = 0;
      const { results } = await other.call(METHODS.batchDecode, { items });
      assert.deepEqual(results.map(({ result }) => result.case), ["response", "error"]); // what there is at last
      assert.equal(server.calls, calls);
    }
    server.calls = 0;
    const given = new AbortController();
    const waiting = refused(other.call(METHODS.batchDecode, { items: [{ ...DECODE, position: 2 }] }, { signal: given.signal }));
    while (!server.calls) await new Promise(setImmediate);
    given.abort();
    assert.equal((await waiting).code, status.CANCELLED);
    assert.equal(server.calls, 1);
  } finally {
    other.close();
    server.close();
  }
});

test("with retries: false nothing is repeated", async () => {
  const server = await failingServer("/quire.v1.ModelExecutorService/GetStatus");
  const other = new QuireClient(server.target, { timeoutMs: TIMEOUT_MS, retries: false });
  try {
    await assert.rejects(other.status(), Unavailable);
    assert.equal(server.calls, 1);
  } finally {
    other.close();
    server.close();
  }
});

test("only what is known to be safe is repeated", () => {
  const never = ["Drain", "LoadAdapter", "RebuildSession", "Shutdown", "UploadWeights", "LoadWeights", "Execute", "Session"];
  const services = [executor.ModelExecutorService, runner.ModelRunnerService, admin.AdminService];
  for (const { name, input } of services.flatMap(({ methods }) => methods)) {
    const bare = create(input, { items: [{}] });
    const conditional = /^(Batch)?(Prefill|Decode)$|^ForwardVerify$|^Fork|^UnifiedForward$/.test(name);
    assert.equal(mayRepeat({ name }, bare), !never.includes(name) && !conditional, name);
  }
  assert.equal(mayRepeat({ name: "SomethingNew" }, {}), false);
  const newCache = { cacheId: "", requestId: "mine" };
  assert.equal(mayRepeat({ name: "Prefill" }, newCache), true);
  assert.equal(mayRepeat({ name: "UnifiedForward" }, { items: [newCache] }), false);
  assert.equal(mayRepeat({ name: "ForkCaches" }, { requestId: "mine" }), true);
});

test("a token does not leave this machine without TLS", () => {
  for (const target of ["quire.example:1", ["127.0.0.1:1", "10.0.0.1:1"], "0.0.0.0:1"]) {
    assert.throws(() => new QuireClient(target, { token: "secret" }), { message: /in plain view/ });
    new QuireClient(target, { token: "secret", tokenInPlainView: true }).close();
  }
  new QuireClient(["127.0.0.1:1", "unix:/x"], { token: "secret" }).close();
  for (const target of [[], "", "http://127.0.0.1:1"]) assert.throws(() => new QuireClient(target), RangeError);
});

test("TLS and tokens", { skip: GUARDED ? false : "no $QUIRE_GUARDED" }, async () => {
  const tls = { ca: readFileSync(GUARDED.ca) };
  const known = new QuireClient(GUARDED.target, { tls, token: GUARDED.token, timeoutMs: TIMEOUT_MS });
  const stranger = new QuireClient(GUARDED.target, { tls, timeoutMs: TIMEOUT_MS });
  const distrustful = new QuireClient(GUARDED.target, { tls: true, timeoutMs: TIMEOUT_MS });
  try {
    const cache = await known.prefill([1, 2, 3]);
    const session = known.session();
    assert.equal((await session.call(METHODS.releaseCache, { cacheId: cache.cacheId })).released, true);
    await session.close();
    assert.equal((await refused(known.status())).reason, "ROLE_MISSING");
    const unknown = await refused(stranger.prefill([1]));
    assert.deepEqual([unknown.code, unknown.reason], [status.UNAUTHENTICATED, "NO_TOKEN"]);
    assert.equal((await refused(distrustful.prefill([1]))).code, status.UNAVAILABLE);
  } finally {
    for (const either of [known, stranger, distrustful]) either.close();
  }
  assert.throws(() => new QuireClient(TARGET, { token: "two words" }), RangeError);
});

test("a setting that does not exist is refused, and not without effect", async () => {
  const cache = await client.prefill([1, 2, 3]);
  const session = client.session();
  const refusals = {
    temperature: [
      client.prefill([1], { temperature: 0.5 }),
      client.batchPrefill([{ tokenIds: [1], temperature: 0.5 }]),
      client.score([1, 2], { temperature: 0.5 }),
      cache.decode(1, { temperature: 0.5 }),
      cache.extend([1], { temperature: 0.5 }),
      cache.verify([1], { temperature: 0.5 }),
    ],
    timeout: [
      client.status({ timeout: 3 }),
      session.prefill([1], { timeout: 3 }),
      client.scoreBatch([[1, 2]], { timeout: 3 }),
      client.loadAdapter("a", { source: "/none", timeout: 3 }),
      client.loadWeights("/none", { timeout: 3 }),
      client.uploadWeights(Buffer.alloc(0), { timeout: 3 }),
    ],
  };
  assert.throws(() => outputOptions({ temprature: 1 }), TypeError);
  assert.throws(() => new QuireClient(TARGET, { timeout: 3 }), TypeError);
  assert.throws(() => client.session({ maxInflight: 3 }), TypeError);
  assert.throws(() => client.execute([{ role: "user", content: "x", foo: 1 }]), TypeError);
  assert.throws(() => client.execute([{ role: "user", content: "x", refusal: null, foo: 1 }]), /foo/);
  for (const [name, calls] of Object.entries(refusals)) {
    for (const call of calls) {
      await assert.rejects(call, (error) => error instanceof TypeError && error.message.endsWith(`no setting ${name}`));
    }
  }
  assert.equal(cache.seqLen, 3);
  await session.close();
  await cache.release();
});

test("a setting that is undefined need not exist", async () => {
  const unset = { temperature: undefined, timeout: undefined };
  const cache = await client.prefill([1, 2, 3], unset);
  outputOptions(unset);
  await cache.decode(1, unset);
  await assert.rejects(cache.decode(1, { ...unset, temprature: 1 }), /Decode has no setting temprature$/);
  await cache.release(unset);
});

test("a time is a number", async () => {
  for (const timeoutMs of ["1000", {}, NaN]) {
    await assert.rejects(client.status({ timeoutMs }), TypeError);
    await assert.rejects(client.ready(timeoutMs), TypeError);
  }
  for (const leaseMs of ["1000", NaN, Infinity]) await assert.rejects(client.prefill([1], { leaseMs }), TypeError);
  await client.status({ timeoutMs: Infinity });
});

test("weights of which the server says nothing", async () => {
  const server = new Server();
  const asBytes = (bytes) => bytes;
  const load = admin.AdminService.method.loadWeights;
  const path = `/${load.parent.typeName}/${load.name}`;
  const definition = { path, requestStream: false, responseStream: true, requestSerialize: asBytes };
  const coded = { requestDeserialize: asBytes, responseSerialize: asBytes, responseDeserialize: asBytes };
  server.addService({ load: { ...definition, ...coded } }, { load: (call) => call.end() });
  const port = await promisify(server.bindAsync).bind(server)("127.0.0.1:0", ServerCredentials.createInsecure());
  const alone = new QuireClient(`127.0.0.1:${port}`, { timeoutMs: TIMEOUT_MS });
  const error = await refused(alone.loadWeights("/some"));
  assert.equal(error.code, status.INTERNAL);
  alone.close();
  server.forceShutdown();
});

test("what abandoned calls made is released by their request ids, and a release whose signal is given is made", async () => {
  const server = new Server();
  const asBytes = (bytes) => Buffer.from(bytes);
  const pathOf = ({ parent, name }) => `/${parent.typeName}/${name}`;
  const [forks, released] = [new Set(), new Set()];
  let [begin, end] = [];
  const isBegun = new Promise((resolve) => (begin = resolve));
  const areReleased = new Promise((resolve) => (end = resolve));
  const fork = ({ request }) => {
    // It is never answered.
    const { count, requestId } = fromBinary(METHODS.forkCache.input, request);
    forks.add(requestId);
    if (count === 2) begin();
  };
  const release = ({ request }, callback) => {
    const { cacheId, requestIds } = fromBinary(METHODS.releaseCache.input, request);
    released.add(cacheId || requestIds[0]);
    if (released.size === 3) end();
    callback(null, bytesOf(METHODS.releaseCache.output, { released: true }));
  };
  const renew = (_, callback) => callback(null, bytesOf(METHODS.renewCache.output, { kvCache: { cacheId: "a" } }));
  server.register(pathOf(METHODS.forkCache), fork, asBytes, asBytes, "unary");
  server.register(pathOf(METHODS.releaseCache), release, asBytes, asBytes, "unary");
  server.register(pathOf(METHODS.renewCache), renew, asBytes, asBytes, "unary");
  const port = await promisify(server.bindAsync).bind(server)("127.0.0.1:0", ServerCredentials.createInsecure());
  const alone = new QuireClient(`127.0.0.1:${port}`, { timeoutMs: TIMEOUT_MS });
  const cache = await alone.cache("a");
  const given = new AbortController();
  const late = refused(cache.fork(3, { timeoutMs: 500 }));
  const calls = [refused(cache.fork(2, { signal: given.signal })), refused(cache.release({ signal: given.signal }))];
  await isBegun;
  given.abort();
  for (const error of await Promise.all(calls)) assert.equal(error.code, status.CANCELLED);
  assert.equal((await late).code, status.DEADLINE_EXCEEDED);
  await areReleased;
  for (const made of ["a", ...forks]) assert.ok(released.has(made));
  alone.close();
  server.forceShutdown();
});

test("many calls can have one signal, and an output the entropy", async () => {
  const warned = [];
  const warn = (warning) => warned.push(warning.name);
  process.on("warning", warn);
  const { signal } = new AbortController();
  const output = outputOptions({ entropy: true });
  const session = client.session();
  const made = Array.from({ length: 12 }, () => [client, session].map((caller) => caller.prefill([1, 2], { output, signal })));
  const caches = await Promise.all(made.flat());
  for (const cache of caches) assert.ok(cache.output.entropy > 0);
  await Promise.all(caches.map((cache) => cache.release()));
  await session.close();
  process.off("warning", warn);
  assert.deepEqual(warned, []);
});

test("a signal need not be Node's own", async () => {
  const { target, close } = await silentServer();
  const silent = new QuireClient(target, { timeoutMs: TIMEOUT_MS });
  const signal = new OtherSignal();
  const call = refused(silent.status({ signal }));
  await new Promise((resolve) => setImmediate(resolve));
  signal.abort();
  assert.equal((await call).code, status.CANCELLED);
  assert.equal(signal.count, 0);
  silent.close();
  close();
});

test("a call of a closed client leaves no listener, and fails alone", async () => {
  for (const target of [TARGET, [TARGET, "127.0.0.1:1"]]) {
    const closed = new QuireClient(target, { timeoutMs: TIMEOUT_MS });
    closed.close();
    const { signal } = new AbortController();
    await assert.rejects(closed.status({ signal }), /closed|shut ?down/i);
    assert.deepEqual(getEventListeners(signal, "abort"), []);
  }
});
