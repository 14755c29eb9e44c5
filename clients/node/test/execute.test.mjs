import assert from "node:assert/strict";
import { after, test } from "node:test";

import { errorFromStatus, Execution, item, QuireClient, QuireError, runner, status } from "quire-llm";

import { breakingWay, TARGET, TIMEOUT_MS } from "./servers.mjs";

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
  for await (const chunk of client.execute(items)) last[chunk.itemId] = chunk;
  assert.equal(last.t.finishReason, runner.FinishReason.FINISH_REASON_LENGTH);
  assert.equal(last[0].finishReason, runner.FinishReason.FINISH_REASON_ERROR);
  assert.equal(errorFromStatus(last[0].error).reason, "NO_CHAT_TEMPLATE");
});

test("what is wrong with a batch ends the call", async () => {
  await assert.rejects(read(client.execute([])), { reason: "EMPTY_BATCH", code: status.INVALID_ARGUMENT });
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
    assert.equal((await client.runner.cancelExecution({ requestId: execution.requestId })).cancelled, false);
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
  while ((await client.executor.getStatus()).operationsInFlight) assert.ok(Date.now() < until);
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

test("weights are loaded, and it is told how far that is", async () => {
  const phases = [];
  for await (const { phase } of client.loadWeights({ source: "adder" })) phases.push(phase);
  assert.equal(phases.at(-1), runner.LoadWeightsPhase.LOAD_WEIGHTS_PHASE_SERVING);
  await assert.rejects(
    async () => {
      for await (const message of client.loadWeights({ source: "/nothing" })) assert.ok(message);
    },
    { reason: "BAD_SOURCE" },
  );
});

/** An execution whose streams do what `streams` says, one after another; each is a generator of messages. */
function executionOf(streams, settings = {}, cancelKept = async () => ({ cancelled: true })) {
  const begun = [];
  const begin = (request, options) => {
    begun.push({ request, options });
    return Object.assign(streams[Math.min(begun.length, streams.length) - 1](), { cancel() {} });
  };
  return { begun, execution: new Execution([item("x")], { requestId: "r", ...settings }, begin, cancelKept) };
}

const broken = () => Object.assign(new Error("cut"), { code: status.UNAVAILABLE, details: "cut" });
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
    return { cancelled: true };
  };
  const { begun, execution } = executionOf([breaks], { keepMs: TIMEOUT_MS }, kept);
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
  const cancelKept = async (requestId) => ({ cancelled: asked.push(requestId) > 1 });
  const { execution } = executionOf([async function* () {}], { keepMs: TIMEOUT_MS }, cancelKept);
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
  const { begun, execution } = executionOf([late, whole], { keepMs: TIMEOUT_MS });
  const texts = [];
  for await (const { text } of execution) texts.push(text);
  assert.deepEqual(texts, ["t"]);
  assert.equal(begun.length, 2);
});

test("all that resume an execution have one timeout", async (context) => {
  context.mock.timers.enable({ apis: ["Date"], now: 1000 });
  async function* breaks() {
    context.mock.timers.setTime(Date.now() + 4000);
    throw broken();
  }
  const { begun, execution } = executionOf([breaks], { keepMs: TIMEOUT_MS, timeoutMs: 10_000 });
  await assert.rejects(read(execution), { code: status.UNAVAILABLE });
  assert.deepEqual(begun.map(({ options }) => options.timeoutMs), [10_000, 6000, 2000]);
});
