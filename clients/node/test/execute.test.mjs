import assert from "node:assert/strict";
import { after, test } from "node:test";

import { create, Execution, item, QuireClient, QuireError, runner, status, types } from "quire-llm";

import { breakingWay, TARGET, TIMEOUT_MS } from "./servers.mjs";
import { OtherSignal } from "./signals.mjs";

const client = new QuireClient(TARGET, { timeoutMs: TIMEOUT_MS });
after(() => client.close());

/** Tokens and text of each sample, and checks that none was left out or said twice. */
async function read(execution) {
  const samples = {};
  for await (const { itemId, sample, position, tokenIds, text } of execution) {
    const said = (samples[`${itemId}/${sample}`] ??= { tokenIds: [], text: "" });
    assert.equal(position, said.tokenIds.length);
    said.tokenIds.push(...tokenIds);
    said.text += text;
  }
  return samples;
}

// Long ones, so that many messages come.
const LONG = [item("12+34=", { itemId: "a", maxTokens: 40, ignoreEos: true, n: 2 }), item("1+1=", { itemId: "b" })];

test("a text is generated", async () => {
  const execution = client.execute("12+34=");
  assert.equal((await read(execution))["0/0"].text, "46");
  assert.equal(execution.started.runtime, "local");
});

test("texts and tokens can be asked for, and failures are of an item", async () => {
  const items = [item([1, 2, 3], { itemId: "t", maxTokens: 2, ignoreEos: true }), item([{ role: "user", content: "1+1=" }])];
  const last = {};
  for await (const chunk of client.execute(items, { raiseOnError: false })) last[chunk.itemId] = chunk;
  assert.deepEqual([last.t.finishReason, last[0].finishReason], ["length", "error"]);
  assert.equal(last[0].error.reason, "NO_CHAT_TEMPLATE");
  await assert.rejects(read(client.execute(items)), { reason: "NO_CHAT_TEMPLATE" });
});

test("chunks say what was computed of their tokens, and what has become of a cache", async () => {
  const cache = await client.prefill([1, 2, 3]);
  const hidden = { dtype: types.DataType.F32 };
  const prompt = { case: "cache", value: { cacheId: cache.cacheId, tokenIds: [cache.output.tokenId] } };
  const onCache = create(runner.ExecuteItemSchema, { itemId: "c", prompt, maxTokens: 2, ignoreEos: true });
  const last = {};
  for await (const chunk of client.execute([item([1, 2, 3], { hidden, maxTokens: 2, ignoreEos: true }), onCache])) {
    assert.equal(chunk.weightsVersion, cache.weightsVersion);
    assert.equal(chunk.hidden.length, chunk.itemId === "c" ? 0 : chunk.tokenIds.length);
    assert.deepEqual(chunk.experts, []);
    for (const { states } of chunk.hidden) assert.ok(states[0].data.length > 0);
    last[chunk.itemId] = chunk;
  }
  assert.equal(last[0].kvCache, undefined);
  assert.deepEqual([last.c.kvCache.cacheId, last.c.kvCache.seqLen], [cache.cacheId, cache.seqLen + 2]);
  await cache.release();
});

test("generate returns a text, and texts those of several prompts and samples", async () => {
  assert.equal(await client.generate("12+34="), "46");
  assert.equal(await client.generate("12+34=", { maxTokens: 1, priority: "high", temperature: 0 }), "4");
  await assert.rejects(client.generate("12+34=", { n: 2 }), TypeError); // it was both texts, one behind the other
  for (const several of [["1+1=", "2+3="], [item("x", { n: 2 })], [item("x"), item("y", { itemId: "1" })]]) {
    await assert.rejects(client.generate(several), TypeError);
  }
  assert.deepEqual(await client.execute(["1+1=", "2+3="], { n: 2 }).texts(), ["2", "2", "5", "5"]);
  assert.deepEqual(await client.execute([[1, 2]], { maxTokens: 2, ignoreEos: true, tokensOnly: true }).texts(), [""]);
  await assert.rejects(client.generate([{ role: "user", content: "1+1=" }]), { reason: "NO_CHAT_TEMPLATE" });
});

test("invalid items are refused before anything is sent", () => {
  assert.throws(() => item("x", { maxTokenz: 1 }), { name: "TypeError", message: /no setting maxTokenz: it has/ });
  assert.throws(() => item([{ role: "boss", content: "x" }]), { message: /one of system, user, assistant, tool, not "boss"/ });
  assert.throws(() => item([{ role: "user" }]), { name: "TypeError" });
  assert.throws(() => client.execute([item("x")], { maxTokens: 1 }), { message: /each item has settings of its own/ });
  assert.throws(() => client.execute([item("x"), "y"]), { message: /make each an item/ });
});

test("items have settings of sampling, constraints and tool calls", () => {
  const call = { id: "c", function: { name: "add", arguments: { a: 1 } } };
  const messages = [{ role: "assistant", content: null, tool_calls: [call] }];
  const settings = { seed: 7n, sampling: { topK: 3, seed: 1n }, constraint: { jsonSchema: { type: "object" } }, itemTimeoutMs: 1500 };
  const made = item(messages, settings);
  assert.deepEqual([made.sampling.seed, made.sampling.topK], [7n, 3]);
  const drafted = [item("x", { speculation: "prompt_lookup" }), item("x", { speculation: { method: "prompt_lookup", maxDraftTokens: 3 } })];
  assert.deepEqual(drafted.map(({ speculation }) => [speculation.method, speculation.maxDraftTokens]), [[1, undefined], [1, 3]]);
  assert.deepEqual(made.constraint.kind, { case: "jsonSchema", value: '{"type":"object"}' });
  assert.deepEqual([made.timeout.seconds, made.timeout.nanos], [1n, 500_000_000]);
  const [message] = made.prompt.value.messages;
  assert.deepEqual([message.role, message.content], [runner.ChatRole.ASSISTANT, undefined]);
  assert.equal(message.toolCalls[0].argumentsJson, '{"a":1}');
});

test("tools are shown by a chat, or beside tokens", () => {
  const tools = [{ type: "function", function: { name: "add" } }];
  const chat = [{ role: "user", content: "1+1=" }];
  const made = item(chat, { tools, toolChoice: "add", parallelToolCalls: false, templateVariables: { enable_thinking: false } });
  assert.deepEqual([made.prompt.value.toolsJson, made.prompt.value.variablesJson], [JSON.stringify(tools), '{"enable_thinking":false}']);
  const { toolsJson, toolChoice, function: name, singleCall } = made.answerParts;
  assert.deepEqual([toolsJson, toolChoice, name, singleCall], ["", runner.ToolChoice.REQUIRED, "add", true]);
  const ofTokens = item([1, 2], { tools, toolChoice: "none" }).answerParts;
  assert.deepEqual([ofTokens.toolsJson, ofTokens.toolChoice], [JSON.stringify(tools), runner.ToolChoice.NONE]);
  assert.ok(item("x", { answerParts: true }).answerParts);
  assert.equal(item(chat, { tools: [], toolChoice: "auto" }).answerParts, undefined);
  assert.throws(() => item("x", { tools }), { message: /tools are for messages/ });
  assert.throws(() => item("x", { templateVariables: {} }), { message: /templateVariables are for messages/ });
});

test("what is wrong with a batch ends the call", async () => {
  await assert.rejects(read(client.execute([item("1"), item("2")])), { name: "InvalidRequest", reason: "DUPLICATE_ITEM_ID" });
});

test("a kept execution goes on where a connection breaks", async () => {
  const expected = await read(client.execute(LONG));
  const way = await breakingWay([500, 900, 1300, Infinity]);
  const other = new QuireClient(way.target, { timeoutMs: TIMEOUT_MS });
  try {
    const execution = other.execute(LONG, { keepMs: TIMEOUT_MS });
    assert.deepEqual(await read(execution), expected);
    assert.ok(way.connections > 2, `${way.connections} connections`);
    await execution.cancel();
    assert.equal(await client.cancelExecution(execution.requestId), false);
  } finally {
    other.close();
    await way.close();
  }
});

test("one that is not kept ends with its connection", async () => {
  const way = await breakingWay([500]);
  const other = new QuireClient(way.target, { timeoutMs: TIMEOUT_MS });
  try {
    await assert.rejects(read(other.execute(LONG)), { code: status.UNAVAILABLE });
  } finally {
    other.close();
    await way.close();
  }
});

test("leaving the loop ends it, and nothing is left on the server", async () => {
  for await (const chunk of client.execute(LONG)) {
    assert.ok(chunk.itemId);
    break;
  }
  const until = Date.now() + TIMEOUT_MS;
  while ((await client.status()).operationsInFlight) assert.ok(Date.now() < until);
});

test("cancelling ends the loop", async () => {
  const execution = client.execute(LONG);
  await assert.rejects(
    async () => {
      for await (const chunk of execution) {
        assert.ok(chunk.itemId);
        await execution.cancel();
      }
    },
    (error) => error instanceof QuireError && error.code === status.CANCELLED,
  );
});

test("what was cancelled before it was read is not read as finished", async () => {
  const execution = client.execute(LONG);
  await execution.cancel();
  await assert.rejects(execution.texts(), { code: status.CANCELLED });
});

/** An execution whose streams do what `streams` says, one after another; each is a generator of messages. */
function executionOf(streams, settings = {}, cancelKept = async () => true) {
  const begun = [];
  const begin = (request, options) => {
    begun.push({ request, options });
    return { call: Object.assign(streams[Math.min(begun.length, streams.length) - 1](), { cancel() {} }), proxy: "" };
  };
  const keep = { seconds: BigInt(TIMEOUT_MS / 1000) };
  const request = create(runner.ExecuteRequestSchema, { items: [item("x")], requestId: "r", keep });
  return { begun, execution: new Execution(request, settings, begin, cancelKept) };
}

const broken = () => Object.assign(new Error("cut"), { code: status.UNAVAILABLE, details: "cut" });
test("an answer has its thoughts and whole calls, and malformed ones are text", async () => {
  const said = (position, parts) => ({ chunks: [create(runner.SampleChunkSchema, { itemId: "0", position, ...parts })] });
  async function* streams() {
    yield said(0, { reasoningContent: "Hm.", text: "Let me see.", toolCalls: [{ index: 0, id: "a", name: "add" }] });
    yield said(1, { toolCalls: [{ index: 0, argumentsJson: '{"a":' }] });
    yield said(2, { toolCalls: [{ index: 0, argumentsJson: "1}" }, { index: 1, id: "b", name: "stop" }] });
    yield said(3, { malformedCalls: { 1: "<stop" }, finishReason: runner.FinishReason.TOOL_CALLS });
  }
  const [answer] = await executionOf([streams]).execution.answers();
  assert.equal(answer.finishReason, "tool_calls");
  assert.deepEqual(answer.message, {
    role: "assistant",
    content: "Let me see.<stop",
    tool_calls: [{ id: "a", type: "function", function: { name: "add", arguments: '{"a":1}' } }],
    reasoning_content: "Hm.",
  });
  assert.equal(item([answer.message]).prompt.value.messages[0].toolCalls[0].argumentsJson, '{"a":1}');
});

const chunk = (position) => ({ chunks: [{ itemId: "0", sample: 0, position, tokenIds: [7], text: "t" }] });

test("a stream that breaks while it is cancelled does not resume", async () => {
  let tellCancelled;
  const cancelling = new Promise((resolve) => (tellCancelled = resolve));
  async function* breaks() {
    yield chunk(0);
    await cancelling;
    throw broken();
  }
  const kept = async () => {
    tellCancelled();
    // The loop hears of the break before the server has answered.
    await new Promise((resolve) => setImmediate(resolve));
    return true;
  };
  const { begun, execution } = executionOf([breaks], {}, kept);
  let ended;
  await assert.rejects(async () => {
    for await (const one of execution) {
      assert.ok(one.itemId);
      ended = execution.cancel();
    }
  }, { code: status.UNAVAILABLE });
  await ended;
  assert.equal(begun.length, 1);
});

test("an execution that the server does not know yet is cancelled once its call has ended", async () => {
  const asked = [];
  const cancelKept = async (requestId) => asked.push(requestId) > 1;
  const { execution } = executionOf([async function* () {}], {}, cancelKept);
  await execution.cancel();
  assert.deepEqual(asked, ["r", "r"]);
});

test("the time until the first chunk is none of the time that a stream may be broken", async (context) => {
  context.mock.timers.enable({ apis: ["Date"], now: 1000 });
  async function* late() {
    context.mock.timers.setTime(Date.now() + 2 * TIMEOUT_MS);
    throw broken();
  }
  async function* whole() {
    yield chunk(0);
  }
  const { begun, execution } = executionOf([late, whole]);
  const texts = [];
  for await (const { text } of execution) texts.push(text);
  assert.deepEqual(texts, ["t"]);
  assert.equal(begun.length, 2);
});

test("a stream that a proxy breaks off goes on", async () => {
  async function* whole() {
    yield chunk(0);
  }
  for (const name of ["CANCELLED", "INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"]) {
    async function* breaks() {
      throw Object.assign(new Error("RST_STREAM"), { code: status[name], details: "RST_STREAM" });
    }
    const { begun, execution } = executionOf([breaks, whole]);
    const goesOn = !["RESOURCE_EXHAUSTED", "UNIMPLEMENTED"].includes(name);
    if (goesOn) await read(execution);
    else await assert.rejects(read(execution), { code: status[name] });
    assert.equal(begun.length, goesOn ? 2 : 1, name);
  }
});

test("all that resume an execution have one timeout", async (context) => {
  context.mock.timers.enable({ apis: ["Date"], now: 1000 });
  async function* breaks() {
    context.mock.timers.setTime(Date.now() + 4000);
    throw broken();
  }
  const { begun, execution } = executionOf([breaks], { timeoutMs: 10_000 });
  await assert.rejects(read(execution), { code: status.UNAVAILABLE });
  assert.deepEqual(begun.map(({ options }) => options.timeoutMs), [10_000, 6000, 2000]);
});

test("one that may not be retried does not resume, and leaving its block ends it", async () => {
  async function* breaks() {
    yield chunk(0);
    throw broken();
  }
  const { begun, execution } = executionOf([breaks], { retries: false });
  await assert.rejects(read(execution), { code: status.UNAVAILABLE });
  assert.equal(begun.length, 1);
  const running = client.execute(LONG);
  await assert.rejects(
    async () => {
      for await (const one of running) {
        assert.ok(one.itemId);
        await running[Symbol.asyncDispose]();
      }
    },
    { code: status.CANCELLED },
  );
});

test("one that is left while it waits to resume ends at once", async () => {
  async function* breaks() {
    yield chunk(0);
    throw broken();
  }
  const own = new AbortController();
  const other = new OtherSignal();
  const ways = [
    [own.signal, (execution) => execution.cancel()],
    [own.signal, () => own.abort()],
    [other, () => other.abort()],
  ];
  for (const [signal, leave] of ways) {
    const { begun, execution } = executionOf([breaks], { signal });
    const reading = read(execution);
    await new Promise((resolve) => setImmediate(resolve));
    await leave(execution);
    await assert.rejects(reading, { code: status.CANCELLED });
    assert.equal(begun.length, 1);
  }
  assert.equal(other.count, 0);
});
