import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import { TARGET } from "./servers.mjs";

async function run(example) {
  const path = fileURLToPath(new URL(`../examples/${example}.mjs`, import.meta.url));
  return (await promisify(execFile)(process.execPath, [path, TARGET])).stdout;
}

test("greedy", async () => assert.equal(await run("greedy"), "46\n"));

test("session", async () => assert.match(await run("session"), /^\[(\s*\[( \d+,?){4} \],?){2}\s*\]\n$/));

test("execute", async () => assert.equal(await run("execute"), "46\n{ '0': '2', '1': '3', '2': '4' }\n"));
