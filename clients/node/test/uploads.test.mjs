// Adapters and weights that are sent, or loaded from where the server finds them.
import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test } from "node:test";
import { fileURLToPath } from "node:url";

import { Aborted, AdapterNotFound, admin, InvalidRequest, QuireClient, QuireError } from "quire-llm";

import { TARGET, TIMEOUT_MS } from "./servers.mjs";

const client = new QuireClient(TARGET, { timeoutMs: TIMEOUT_MS });
after(() => client.close());

const ADDER = fileURLToPath(new URL("../../../workers/models/adder/", import.meta.url));

/** A file in safetensors format: float32 tensors of a shape, each filled with one number. */
function safetensors(tensors) {
  const header = {};
  const parts = [];
  let end = 0;
  for (const [name, shape, value] of tensors) {
    const data = Buffer.from(new Float32Array(shape[0] * shape[1]).fill(value).buffer);
    header[name] = { dtype: "F32", shape, data_offsets: [end, (end += data.length)] };
    parts.push(data);
  }
  const text = Buffer.from(JSON.stringify(header));
  const size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([size, text, ...parts]);
}

/** An adapter of the adder: to the queries of its layers, of shape [64, 64]. */
function adapterFiles(value) {
  const config = { peft_type: "LORA", task_type: "CAUSAL_LM", r: 2, lora_alpha: 2, target_modules: ["q_proj"] };
  const tensors = [0, 1, 2, 3].flatMap((layer) => {
    const name = `base_model.model.model.layers.${layer}.self_attn.q_proj.lora`;
    return [[`${name}_A.weight`, [2, 64], 0.1], [`${name}_B.weight`, [64, 2], value]];
  });
  return {
    "adapter_config.json": Buffer.from(JSON.stringify(config)),
    "adapter_model.safetensors": safetensors(tensors),
  };
}

test("adapters are sent as contents or from a directory, used, listed and unloaded", async (t) => {
  const directory = mkdtempSync(join(tmpdir(), "quire-node-"));
  t.after(() => rmSync(directory, { recursive: true }));
  for (const [name, content] of Object.entries(adapterFiles(0))) writeFileSync(join(directory, name), content);
  const neutral = await client.loadAdapter("neutral", { files: directory, pinned: true });
  assert.deepEqual([neutral.adapterId, neutral.pinned, neutral.shared], ["neutral", true, false]);
  await client.loadAdapter("strong", { files: adapterFiles(3) });
  assert.deepEqual((await client.listAdapters()).map(({ adapterId }) => adapterId), ["neutral", "strong"]);
  const plain = await client.score([1, 2, 3]);
  assert.deepEqual((await client.score([1, 2, 3], { adapterId: "neutral" })).tokenLogprobs, plain.tokenLogprobs);
  assert.notDeepEqual((await client.score([1, 2, 3], { adapterId: "strong" })).tokenLogprobs, plain.tokenLogprobs);
  for (const adapterId of ["neutral", "strong"]) assert.equal(await client.unloadAdapter(adapterId), true);
  assert.equal(await client.unloadAdapter("strong"), false);
  await assert.rejects(client.prefill([1], { adapterId: "strong" }), AdapterNotFound);
});

test("what is wrong with an adapter is said", async () => {
  for (const settings of [{}, { source: "/x", files: {} }]) await assert.rejects(client.loadAdapter("a", settings), RangeError);
  await assert.rejects(client.loadAdapter("a", { files: "/nothing" }), { code: "ENOENT" });
  await assert.rejects(client.loadAdapter("a", { source: "/nothing" }), QuireError);
  await assert.rejects(client.loadAdapter("no spaces", { files: adapterFiles(0) }), InvalidRequest);
  // Much more than the server reads before it refuses.
  const huge = { ...adapterFiles(0), "adapter_config.json": Buffer.alloc(64 << 20) };
  await assert.rejects(client.loadAdapter("a", { files: huge }), QuireError);
  const signal = AbortSignal.abort();
  await assert.rejects(client.loadAdapter("a", { files: adapterFiles(0), signal }), { name: "Cancelled" });
  assert.deepEqual(await client.listAdapters(), []);
});

test("weights are sent and replace those that are served, and it is told how far that is", async () => {
  const cache = await client.prefill([1, 2, 3]);
  const expected = cache.output.tokenId;
  const one = readFileSync(join(ADDER, "model.safetensors"));
  for (const files of [ADDER, one, (async function* () { yield join(ADDER, "model.safetensors"); })()]) {
    const source = await client.uploadWeights(files);
    const phases = [];
    const onProgress = ({ phase }) => phases.push(phase);
    const served = await client.loadWeights(source, { recompute: true, onProgress });
    assert.ok(served.fingerprint);
    assert.equal(phases.at(-1), served.phase);
  }
  const { weightsVersion } = cache;
  await cache.truncate(2);
  assert.equal((await cache.extend([3])).tokenId, expected);
  assert.ok(cache.weightsVersion > weightsVersion);
  assert.equal((await client.score([1, 2, 3])).weightsVersion, cache.weightsVersion);
  await cache.release();
  assert.equal((await client.loadWeights("adder")).phase, admin.LoadWeightsPhase.SERVING);
  await assert.rejects(client.loadWeights("/nothing"), { reason: "BAD_SOURCE" });
});

test("what is wrong with weights is said", async () => {
  const one = safetensors([["a", [1, 1], 0]]);
  // The server hears a little later that an upload has ended.
  const refused = async (files, expected) => {
    for (;;) {
      const error = await client.uploadWeights(files).catch((failed) => failed);
      if (!(error instanceof Aborted)) return assert.match(error.message, expected);
    }
  };
  // One that was cancelled before it began is not there: an upload would be refused beside it.
  await assert.rejects(client.uploadWeights(one, { signal: AbortSignal.abort() }), { name: "Cancelled" });
  await client.uploadWeights(join(ADDER, "model.safetensors"));
  await refused(Buffer.from("no tensors"), /not in safetensors format/);
  await refused([one, one], /the tensor a is in two files/);
  await refused(fileURLToPath(new URL(".", import.meta.url)), /no safetensors files/);
  await refused("/nothing", /ENOENT/);
});
