import assert from "node:assert/strict";
import { after, test } from "node:test";

import { errorFromStatus, item, QuireClient, QuireError, runner, status } from "quire-llm";

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
